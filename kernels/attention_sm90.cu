// Sparse attention for Hopper: what kernels/attention.cu computes, with warpgroup products. Compiled for sm_90a only; for
// other architectures the kernels are empty and never launched.
//
// A block has 64 heads of one query and walks over tiles of 64 keys. Of its three warpgroups one decodes rows of the pages
// to bfloat16 in shared memory, two tiles ahead; one takes scores, weights and the left half of the output's columns; one
// the right half. Blocks are persistent: keys and queries of the next item are on their way while the last is finished.
//
// An item is a query, 64 heads, and a piece of its runs. Runs are cut by the number of tiles alone (`Tiles`), so that bits
// never depend on the batch: a block that has all runs of its query adds them itself, in order, each thread from what it
// wrote; otherwise `attend_hopper_join` does, with the same sums.
#include "attention.cuh"
#include "hopper.cuh"

constexpr u32 TILE = 64;                  // keys of a tile, heads of a block
constexpr u32 OPERAND = 8 * BLOCK_BYTES;  // 64 rows of 512 values
constexpr u32 NOTES = 8;                  // tiles whose notes are kept
constexpr u32 MOST_RUNS = 16;
constexpr u32 RUN_TILES = 3;

// Places in shared memory.
constexpr u32 AT_Q = 0, AT_K = OPERAND, AT_P = 3 * OPERAND, AT_FADES = AT_P + BLOCK_BYTES;
constexpr u32 AT_SUMS = AT_FADES + TILE * 4, AT_NOTES = AT_SUMS + MOST_RUNS * TILE * 8;
constexpr u32 AT_BARRIERS = AT_NOTES + NOTES * 16;
constexpr u32 FULL = AT_BARRIERS, EMPTY = FULL + 16, Q_FULL = EMPTY + 16, Q_EMPTY = Q_FULL + 8, P_FULL = Q_EMPTY + 8;
constexpr u32 P_EMPTY = P_FULL + 8, HOPPER_BYTES = P_EMPTY + 8;

// What the decoding warpgroup tells the others of a tile: row, head block, valid keys and flags, run and number of runs.
constexpr u32 FIRST = 1 << 8;     // of the item
constexpr u32 LAST = 1 << 9;      // of the item
constexpr u32 RUN_ENDS = 1 << 10;
constexpr u32 STOP = 1 << 11;     // no tile, the end

struct HopperParams {
  AttentionParams attention;
  u32 items;   // rows * head blocks * pieces
  u32 pieces;  // blocks that share the runs of a query
  u32 whole;   // one run only
};

struct HopperJoinParams {
  AttentionParams attention;
};

// Runs of a query: about three tiles each, at most 16. Run k begins with tile k * tiles / runs.
__device__ __forceinline__ u32 runs_of(u32 tiles) { return min((tiles + RUN_TILES - 1) / RUN_TILES, MOST_RUNS); }

constexpr float SCALE = 0.04419417382415922f;  // 512^-0.5
constexpr float LOG2_E = 1.4426950408889634f;

// Exchanges words of four lanes: word i of lane j becomes word j of lane i.
__device__ __forceinline__ void transpose4(u32 (&w)[4]) {
  const u32 lane = threadIdx.x;
#pragma unroll
  for (int step = 1; step < 4; step *= 2)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i & step) continue;
      const bool upper = lane & step;
      const u32 other = __shfl_xor_sync(ALL, upper ? w[i] : w[i + step], step);
      if (upper)
        w[i] = other;
      else
        w[i + step] = other;
    }
}

// Finishes 128 columns of 16 heads that a warp holds as 16 fragments of 8 columns, from o[BEGIN]: scales, rotates back,
// rounds, stores. `head` is that of the thread's first row; the second is 8 further.
template <int BEGIN, int SIZE>
__device__ __forceinline__ void finish(const AttentionParams& p, float (&o)[SIZE], const float (&factor)[2], u32 group,
                                       u32 row, u32 head) {
  const u32 quad = threadIdx.x % 4;
  u32 bits[2] = {};
#pragma unroll
  for (int t = 0; t < 16; t++) {
    float2 turn = make_float2(1.0f, 0.0f);
    if (t >= 8 && group == 3) turn = p.turns[u64(row) * (ROPE_DIM / 2) + (t - 8) * 4 + quad];
    turn.y = -turn.y;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float& a = o[BEGIN + t * 4 + half * 2];
      float& b = o[BEGIN + t * 4 + half * 2 + 1];
      a = round_bf16(a * factor[half]);
      b = round_bf16(b * factor[half]);
      if (t >= 8 && group == 3) rotate(turn, a, b);
      bits[half] = max(bits[half], max(magnitude_bits(a), magnitude_bits(b)));
    }
  }
  if (p.quantise) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float scale = e4m3_scale(__uint_as_float(warp_max<4>(bits[half]))), inverse = 1.0f / scale;
#pragma unroll
      for (int t = 0; t < 16; t++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float& v = o[BEGIN + t * 4 + half * 2 + i];
          v = scale != scale ? scale : round_e4m3(clamp_to(v * inverse, 448.0f)) * scale;
        }
    }
  }
#pragma unroll
  for (int t = 0; t < 16; t += 4)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        words[i] = bf16_pair(o[BEGIN + (t + i) * 4 + half * 2], o[BEGIN + (t + i) * 4 + half * 2 + 1]);
      transpose4(words);
      if (head + half * 8 < p.heads)
        *reinterpret_cast<uint4*>(p.out + (u64(row) * p.heads + head + half * 8) * HEAD_DIM + group * 128 +
                                  (t + quad) * 8) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

constexpr u32 PART = TILE * HEAD_DIM / 4;  // float4 of a run of 64 heads

// Where a thread keeps its fragments of a run: float4 i of 32 is i * 128 further, the threads side by side.
__device__ __forceinline__ float4* part_of(const AttentionParams& p, u32 row, u32 run, u32 block, u32 half, u32 thread) {
  const u64 blocks = (p.heads + TILE - 1) / TILE;
  return reinterpret_cast<float4*>(p.part_out) + ((u64(row) * MAX_SPLITS + run) * blocks + block) * PART +
         half * (PART / 2) + thread;
}

// Adds the runs of 128 columns, in order: both sides are brought to the higher maximum. `sums` are those (maximum, sum) of
// the thread's two rows, `pitch` apart; (maximum, sum) of all comes back in `total`.
__device__ __forceinline__ void join_runs(float (&v)[64], float2 (&total)[2], const float4* part, u64 step, u32 runs,
                                          const float2* const (&sums)[2], u32 pitch) {
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const float4 x = part[i * 128];
    v[i * 4] = x.x, v[i * 4 + 1] = x.y, v[i * 4 + 2] = x.z, v[i * 4 + 3] = x.w;
  }
  total[0] = sums[0][0];
  total[1] = sums[1][0];
#pragma unroll 1
  for (u32 r = 1; r < runs; r++) {
    float4 x[16];
#pragma unroll
    for (int i = 0; i < 16; i++) x[i] = part[r * step + i * 128];
    float first[2], second[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float2 run = sums[half][r * pitch];
      const float highest = fmaxf(total[half].x, run.x);
      first[half] = expf(total[half].x - highest);
      second[half] = expf(run.x - highest);
      total[half] = make_float2(highest, fmaf(run.y, second[half], total[half].y * first[half]));
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
      v[i * 4] = fmaf(x[i].x, second[0], v[i * 4] * first[0]);
      v[i * 4 + 1] = fmaf(x[i].y, second[0], v[i * 4 + 1] * first[0]);
      v[i * 4 + 2] = fmaf(x[i].z, second[1], v[i * 4 + 2] * first[1]);
      v[i * 4 + 3] = fmaf(x[i].w, second[1], v[i * 4 + 3] * first[1]);
    }
  }
}

// Inverse of a query's sum of weights, the sink's included.
__device__ __forceinline__ float factor_of(const AttentionParams& p, u32 head, float2 total) {
  return 1.0f / (total.y + expf(p.sink[min(head, p.heads - 1)] - total.x));
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The part of a query's tiles that an item has.
struct Item {
  u32 row, block, index;
  u32 start, first_row;  // of the sequence
  Tiles t;
  u32 runs, run, run_end;  // run that `begin` lies in
  u32 begin, end;
};

__device__ __forceinline__ Item item_of(const HopperParams& h, u32 number) {
  const AttentionParams& p = h.attention;
  const u32 blocks = (p.heads + TILE - 1) / TILE;
  Item m;
  const u32 piece = number % h.pieces;
  m.block = number / h.pieces % blocks;
  m.row = number / h.pieces / blocks;
  m.index = p.sequence[m.row];
  const Sequence s = p.sequences[m.index];
  m.start = s.start;
  m.first_row = s.first_row;
  m.t = tiles_of<TILE>(p, m.row, s.start + m.row - s.first_row);
  m.runs = h.whole ? 1 : runs_of(m.t.total);
  m.run = piece * m.runs / h.pieces;
  m.begin = m.run * m.t.total / m.runs;
  m.end = (piece + 1) * m.runs / h.pieces * m.t.total / m.runs;
  m.run_end = (m.run + 1) * m.t.total / m.runs;
  return m;
}

// A factor for E4M3 codes that lie as bfloat16 bits: 2^120 times the scale.
__device__ __forceinline__ u32 code_factor(u32 scale) { return scale * 0x00800080u + 120u * 0x00800080u; }

// whether one of seven scales is beyond 2^7, so that its factor is none
__device__ __forceinline__ bool any_large(u64 scales) {
  const u32 low = u32(scales), high = u32(scales >> 32) & 0x00FFFFFFu;
  return (low & ((low & 0x7F7F7F7Fu) + 0x79797979u) & 0x80808080u) |
         (high & ((high & 0x7F7F7F7Fu) + 0x79797979u) & 0x80808080u);
}

// Eight codes to eight bfloat16.
__device__ __forceinline__ uint4 decode(u64 codes, u32 factor) {
  u32 v[4];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 q = u32(codes >> (32 * i)), low = q << 8;
    const u32 odd = bf16_mul((q & 0x80008000u) | ((q >> 4) & 0x07F007F0u), factor);
    const u32 even = bf16_mul((low & 0x80008000u) | ((low >> 4) & 0x07F007F0u), factor);
    v[2 * i] = __byte_perm(even, odd, 0x5410);
    v[2 * i + 1] = __byte_perm(even, odd, 0x7632);
  }
  return make_uint4(v[0], v[1], v[2], v[3]);
}

// The decoding warpgroup. Eight threads have a row, in four passes of 16 rows; each keeps its share of the next tile in
// registers. Page numbers are looked up one tile earlier, chosen entries another one.
__device__ __forceinline__ void decode_rows(const HopperParams& h, u8* shared) {
  const AttentionParams& p = h.attention;
  const u32 base = shared_address(shared), thread = threadIdx.x % 128, lane = thread % 32, j = thread % 8;
  const u32 slot = thread / 8 + thread % 4 * 16;  // of the row whose place this thread finds
  uint4* const notes = reinterpret_cast<uint4*>(shared + AT_NOTES);
  enum Source : u32 { STAGED, RING, ENTRIES };

  u32 number = blockIdx.x, seen = 0;
  Item m;
  auto enter = [&] {
    for (; number < h.items; number += gridDim.x) {
      m = item_of(h, number);
      if (m.begin < m.end) return;
    }
    m.begin = 0, m.end = 0;
  };
  enter();
  u32 tile = m.begin;

  // a tile on its way: first which row, then which page, then the address
  struct Place {
    u32 entry, index, flags;
    Source source;
    u32 number;
  } ahead, next;
  u32 page = 0;
  auto choose = [&] {
    if (tile >= m.end) {
      if (thread == 0) notes[seen % NOTES] = make_uint4(0, 0, STOP, 0);
      ahead.flags = STOP;
      return;
    }
    const Tiles& t = m.t;
    const bool in_window = tile < t.window_tiles;
    const u32 first = (in_window ? tile : tile - t.window_tiles) * TILE;
    const u32 valid = min((in_window ? t.in_window : t.entries) - first, TILE);
    // rows behind the last repeat it: their weights are zero
    const u32 at = first + min(slot, valid - 1);
    ahead.index = m.index;
    ahead.number = number;
    if (in_window) {
      const u32 q = t.first + at;
      ahead.source = q >= m.start ? STAGED : RING;
      ahead.entry = q >= m.start ? m.first_row + q - m.start : q % p.window;
    } else {
      ahead.source = ENTRIES;
      ahead.entry = p.selected ? p.selected[u64(m.row) * p.width + at] : at;
    }
    const bool run_ends = tile + 1 == m.run_end;
    ahead.flags = (tile == m.begin ? FIRST : 0) | (tile + 1 == m.end ? LAST : 0) | (run_ends ? RUN_ENDS : 0);
    if (thread == 0) notes[seen % NOTES] = make_uint4(m.row, m.block, valid | ahead.flags, m.run | m.runs << 16);
    if (run_ends) m.run_end = (++m.run + 1) * m.t.total / m.runs;
    seen++;
    tile++;
    if (tile == m.end) {
      number += gridDim.x;
      enter();
      tile = m.begin;
    }
  };
  auto look_up = [&] {
    next = ahead;
    if (next.flags == STOP || next.source == STAGED) return;
    const Pages& pages = next.source == RING ? p.ring : p.entries;
    const bool narrow = next.source == ENTRIES && p.ratio != 4;
    page = pages.ids[u64(next.index) * pages.pitch + next.entry / (narrow ? NARROW_ROWS : PAGE_ROWS)];
  };
  auto address = [&]() -> u64 {
    if (next.flags == STOP) return 0;
    if (next.source == STAGED) return u64(p.staged) + u64(next.entry) * ROW_BYTES;
    const Pages& pages = next.source == RING ? p.ring : p.entries;
    const bool narrow = next.source == ENTRIES && p.ratio != 4;
    return u64(pages.base) + u64(page) * pages.page_bytes + next.entry % (narrow ? NARROW_ROWS : PAGE_ROWS) * ROW_BYTES;
  };

  // two passes are on their way at a time
  u64 codes[2][7], ropes[2][2], scales[2];
  auto load = [&](int slot, u64 rows, u32 pass) {
    const u64* words = reinterpret_cast<const u64*>(__shfl_sync(ALL, rows, (lane & 24) + pass));
#pragma unroll
    for (int c = 0; c < 7; c++) codes[slot][c] = words[c * 8 + j];
#pragma unroll
    for (int c = 0; c < 2; c++) ropes[slot][c] = words[56 + j * 2 + c];
    scales[slot] = words[72];
  };
  auto store = [&](int slot, u8* at) {
    const bool large = any_large(scales[slot]);
    const u64 known = large ? 0x7F7F7F7F7F7F7Full : scales[slot];
#pragma unroll
    for (int c = 0; c < 7; c++)
      *reinterpret_cast<uint4*>(at + c * BLOCK_BYTES) = decode(codes[slot][c], code_factor(u32(known >> (8 * c)) & 0xFF));
    if (large) {
#pragma unroll 1
      for (int c = 0; c < 7; c++) {
        uint4& v = *reinterpret_cast<uint4*>(at + c * BLOCK_BYTES);
        const u32 scale = e8m0_pair(u8(scales[slot] >> (8 * c)));
        v = make_uint4(bf16_mul(v.x, scale), bf16_mul(v.y, scale), bf16_mul(v.z, scale), bf16_mul(v.w, scale));
      }
    }
    *reinterpret_cast<uint4*>(at + 7 * BLOCK_BYTES) =
        make_uint4(u32(ropes[slot][0]), u32(ropes[slot][0] >> 32), u32(ropes[slot][1]), u32(ropes[slot][1] >> 32));
  };

  choose();
  look_up();
  choose();
  u32 flags = next.flags, item = next.number;
  u64 rows = address();
  look_up();
  choose();
  if (flags != STOP) {
    load(0, rows, 0);
    load(1, rows, 1);
  }
  u32 count = 0, queries = 0;
  for (; flags != STOP; count++) {
    const u64 next_rows = address();
    const u32 next_flags = next.flags, next_item = next.number;
    look_up();
    choose();
    if (flags & FIRST) {
      if (queries > 0) barrier_wait(base + Q_EMPTY, (queries - 1) % 2);
      const u32 blocks = (p.heads + TILE - 1) / TILE;
      const u32 block = item / h.pieces % blocks, row = item / h.pieces / blocks;
      const u16* q = p.q + (u64(row) * p.heads + block * TILE) * HEAD_DIM;
#pragma unroll 8
      for (u32 i = thread; i < TILE * HEAD_DIM / 8; i += 128) {
        const u32 head = i / 64, c = i % 64;
        const bool valid = block * TILE + head < p.heads;
        copy_async(base + AT_Q + c / 8 * BLOCK_BYTES + block_offset(head, c % 8), q + (valid ? u64(i) * 8 : 0), valid);
      }
      commit_copies();
    }
    barrier_wait(base + EMPTY + count % 2 * 8, count / 2 % 2 ^ 1);
    u8* at = shared + AT_K + count % 2 * OPERAND + block_offset(thread / 8, j);
#pragma unroll 1
    for (int pair = 0; pair < 2; pair++) {
#pragma unroll
      for (int slot = 0; slot < 2; slot++, at += 16 * BLOCK_ROW) {
        store(slot, at);
        if (pair == 0 || next_flags != STOP) load(slot, pair == 0 ? rows : next_rows, pair == 0 ? 2 + slot : slot);
      }
    }
    if (flags & FIRST) {
      wait_copies<0>();
      release(base + Q_FULL);
      queries++;
    }
    release(base + FULL + count % 2 * 8);
    flags = next_flags;
    item = next_item;
    rows = next_rows;
  }
  barrier_wait(base + EMPTY + count % 2 * 8, count / 2 % 2 ^ 1);
  release(base + FULL + count % 2 * 8);
}

// Ends a run: finishes the item if it has only this one, stores it otherwise; after the last, adds up what was stored.
__device__ __forceinline__ void end_run(const HopperParams& h, float (&o)[128], const uint4& note, u32 half, u8* shared) {
  const AttentionParams& p = h.attention;
  const u32 thread = threadIdx.x % 128, low = thread / 32 * 16 + thread % 32 / 4;
  const u32 run = note.w & 0xFFFF, runs = note.w >> 16, head = note.y * TILE + low;
  const float2* mine = reinterpret_cast<const float2*>(shared + AT_SUMS) + low;
  if (runs == 1) {
    const float factor[2] = {factor_of(p, head, mine[0]), factor_of(p, head + 8, mine[8])};
    finish<0>(p, o, factor, half * 2, note.x, head);
    finish<64>(p, o, factor, half * 2 + 1, note.x, head);
    return;
  }
  // one that adds up itself uses the same places for every item: they stay in the L2 cache
  const bool alone = h.pieces == 1;
  float4* part = alone ? part_of(p, 0, 0, 0, 0, 0) + (u64(blockIdx.x) * MAX_SPLITS + run) * PART + half * (PART / 2) + thread
                       : part_of(p, note.x, run, note.y, half, thread);
#pragma unroll
  for (int i = 0; i < 32; i++) part[i * 128] = make_float4(o[i * 4], o[i * 4 + 1], o[i * 4 + 2], o[i * 4 + 3]);
  if (!alone || run + 1 < runs) return;
  part -= run * PART;
#pragma unroll 1
  for (u32 group = half * 2; group < half * 2 + 2; group++, part += PART / 4) {
    float v[64];
    float2 total[2];
    const float2* const sums[2] = {mine, mine + 8};
    join_runs(v, total, part, PART, runs, sums, TILE);
    const float factor[2] = {factor_of(p, head, total[0]), factor_of(p, head + 8, total[1])};
    finish<0>(p, v, factor, group, note.x, head);
  }
}

// Scores, weights and the left half of the output.
__device__ __forceinline__ void score(const HopperParams& h, u8* shared) {
  const AttentionParams& p = h.attention;
  const u32 base = shared_address(shared), thread = threadIdx.x, lane = thread % 32, quad = lane % 4;
  const u32 low = thread / 32 * 16 + lane / 4;  // first of the thread's two heads; the other is 8 further
  const uint4* notes = reinterpret_cast<const uint4*>(shared + AT_NOTES);
  float* const fades = reinterpret_cast<float*>(shared + AT_FADES);
  float2* const sums = reinterpret_cast<float2*>(shared + AT_SUMS);
  const u64 q_blocks = along_columns(base + AT_Q);
  const u32 p_address = base + AT_P + block_offset(thread / 32 * 16 + lane % 16, lane / 16);

  float o[128] = {}, top[2], sum[2];
  u32 count = 0, queries = 0, messages = 0;
  bool fresh = true;
  for (;; count++) {
    const u32 buffer = count % 2;
    barrier_wait(base + FULL + buffer * 8, count / 2 % 2);
    const u32 flags = notes[count % NOTES].z;
    if (flags & STOP) return;
    if (flags & FIRST) barrier_wait(base + Q_FULL, queries++ % 2);
    acquire();
    float s[32];
    const u64 keys = along_columns(base + AT_K + buffer * OPERAND);
    products_begin();
#pragma unroll
    for (int k = 0; k < 32; k++) {
      const u64 step = k / 4 * (BLOCK_BYTES >> 4) + k % 4 * 2;
      product_64(s, q_blocks + step, keys + step, k > 0);
    }
    products_commit();
    products_wait<0>();
    if (flags & LAST) release(base + Q_EMPTY);

    const u32 valid = flags & 0xFF;
    if (valid < TILE) {
#pragma unroll
      for (int i = 0; i < 32; i++)
        if (i / 4 * 8 + quad * 2 + i % 2 >= valid) s[i] = minus_infinity();
    }
    if (fresh) top[0] = top[1] = minus_infinity(), sum[0] = sum[1] = 0.0f;
    float fade[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float highest = top[half];
#pragma unroll
      for (int i = 0; i < 32; i += 4) highest = fmaxf(highest, fmaxf(s[i + half * 2], s[i + half * 2 + 1]));
      highest = fmaxf(highest, __shfl_xor_sync(ALL, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(ALL, highest, 2));
      // weights up to 2^8 do no harm and save rescaling the output
      fade[half] = 1.0f;
      if (fresh || (highest - top[half]) * (SCALE * LOG2_E) > 8.0f) {
        fade[half] = exp2_of((top[half] - highest) * (SCALE * LOG2_E));
        top[half] = highest;
      }
      const float offset = top[half] * (SCALE * LOG2_E);
      float mine = 0.0f;
#pragma unroll
      for (int i = 0; i < 32; i += 4)
#pragma unroll
        for (int k = 0; k < 2; k++) {
          float& x = s[i + half * 2 + k];
          x = exp2_of(fmaf(x, SCALE * LOG2_E, -offset));
          mine += x;
        }
      sum[half] = fmaf(sum[half], fade[half], mine);
    }
    u32 weights[4][4];
#pragma unroll
    for (int step = 0; step < 4; step++)
#pragma unroll
      for (int i = 0; i < 4; i++) weights[step][i] = bf16_pair(s[step * 8 + i * 2], s[step * 8 + i * 2 + 1]);
    barrier_wait(base + P_EMPTY, messages % 2 ^ 1);
#pragma unroll
    for (int step = 0; step < 4; step++) store_matrices(p_address ^ step << 5, weights[step]);
    if (quad == 0) {
      fades[low] = fade[0];
      fades[low + 8] = fade[1];
    }
    release(base + P_FULL);
    messages++;

    if (!fresh && __any_sync(ALL, fade[0] != 1.0f || fade[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < 128; i++) o[i] *= fade[i / 2 % 2];
    }
    const u64 values = along_rows(base + AT_K + buffer * OPERAND);
    products_begin();
#pragma unroll
    for (int step = 0; step < 4; step++)
      product_256(o, weights[step], values + step * (16 * BLOCK_ROW >> 4));
    products_commit();
    products_wait<0>();
    release(base + EMPTY + buffer * 8);
    fresh = flags & RUN_ENDS;
    if (!fresh) continue;
    const uint4 note = notes[count % NOTES];
    const u32 run = note.w & 0xFFFF;
    barrier_wait(base + P_EMPTY, messages % 2 ^ 1);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      sum[half] += __shfl_xor_sync(ALL, sum[half], 1);
      sum[half] += __shfl_xor_sync(ALL, sum[half], 2);
      if (quad != 0) continue;
      const u32 row = low + half * 8, head = note.y * TILE + row;
      const float2 mine = make_float2(top[half] * SCALE, sum[half]);
      sums[(h.pieces == 1 ? run : 0) * TILE + row] = mine;
      if (h.pieces > 1 && head < p.heads) p.part_sums[(u64(note.x) * MAX_SPLITS + run) * p.heads + head] = mine;
    }
    release(base + P_FULL);
    messages++;
    end_run(h, o, note, 0, shared);
    // no value lives on beyond this
#pragma unroll
    for (int i = 0; i < 128; i++) o[i] = 0.0f;
  }
}

// The right half of the output.
__device__ __forceinline__ void add_right(const HopperParams& h, u8* shared) {
  const u32 base = shared_address(shared), thread = threadIdx.x % 128;
  const u32 low = thread / 32 * 16 + thread % 32 / 4;
  const uint4* notes = reinterpret_cast<const uint4*>(shared + AT_NOTES);
  const float* fades = reinterpret_cast<const float*>(shared + AT_FADES);
  const u64 weights = along_columns(base + AT_P);

  float o[128] = {};
  bool fresh = true;
  u32 messages = 0;
  for (u32 count = 0;; count++) {
    const u32 buffer = count % 2;
    barrier_wait(base + FULL + buffer * 8, count / 2 % 2);
    const u32 flags = notes[count % NOTES].z;
    if (flags & STOP) break;
    barrier_wait(base + P_FULL, messages++ % 2);
    acquire();
    const float fade[2] = {fades[low], fades[low + 8]};
    if (!fresh && __any_sync(ALL, fade[0] != 1.0f || fade[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < 128; i++) o[i] *= fade[i / 2 % 2];
    }
    const u64 values = along_rows(base + AT_K + buffer * OPERAND + 4 * BLOCK_BYTES);
    products_begin();
#pragma unroll
    for (int step = 0; step < 4; step++)
      product_256(o, weights + step * 2, values + step * (16 * BLOCK_ROW >> 4));
    products_commit();
    products_wait<0>();
    release(base + P_EMPTY);
    release(base + EMPTY + buffer * 8);
    fresh = flags & RUN_ENDS;
    if (!fresh) continue;
    const uint4 note = notes[count % NOTES];
    barrier_wait(base + P_FULL, messages++ % 2);
    end_run(h, o, note, 1, shared);
    release(base + P_EMPTY);
#pragma unroll
    for (int i = 0; i < 128; i++) o[i] = 0.0f;
  }
}

#endif  // sm_90a

// Grid: at most one block a multiprocessor. Shared memory: HOPPER_BYTES.
extern "C" __global__ void __launch_bounds__(384, 1) attend_hopper(const __grid_constant__ HopperParams h) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = shared_address(shared);
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < 2; i++) {
      barrier_init(base + FULL + i * 8, 4);
      barrier_init(base + EMPTY + i * 8, 8);
    }
    barrier_init(base + Q_FULL, 4);
    barrier_init(base + Q_EMPTY, 4);
    barrier_init(base + P_FULL, 4);
    barrier_init(base + P_EMPTY, 4);
  }
  __syncthreads();
  wait_for_inputs();
  const u32 group = threadIdx.x / 128;
  if (group == 0) {
    take_registers<224>();
    score(h, shared);
  } else if (group == 1) {
    take_registers<176>();
    add_right(h, shared);
  } else {
    give_registers<104>();
    decode_rows(h, shared);
  }
#endif
}

// Adds the runs of queries that have several, in order. Grid (4 groups of columns * head blocks, rows), 128 threads.
extern "C" __global__ void __launch_bounds__(128) attend_hopper_join(const __grid_constant__ HopperJoinParams j) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  wait_for_inputs();
  const AttentionParams& p = j.attention;
  const u32 group = blockIdx.x % 4, block = blockIdx.x / 4, row = blockIdx.y, thread = threadIdx.x;
  const Sequence s = p.sequences[p.sequence[row]];
  const Tiles t = tiles_of<TILE>(p, row, s.start + row - s.first_row);
  const u32 runs = runs_of(t.total);
  if (runs == 1) return;
  const u32 head = block * TILE + thread / 32 * 16 + thread % 32 / 4;
  const float2* sums = p.part_sums + u64(row) * MAX_SPLITS * p.heads;
  const float2* const mine[2] = {sums + min(head, p.heads - 1), sums + min(head + 8, p.heads - 1)};
  const float4* part = part_of(p, row, 0, block, group / 2, thread) + group % 2 * (PART / 4);
  float v[64];
  float2 total[2];
  join_runs(v, total, part, u64((p.heads + TILE - 1) / TILE) * PART, runs, mine, p.heads);
  const float factor[2] = {factor_of(p, head, total[0]), factor_of(p, head + 8, total[1])};
  finish<0>(p, v, factor, group, row, head);
#endif
}
