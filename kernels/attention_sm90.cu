// Sparse attention for Hopper: what kernels/attention.cu computes, with warpgroup products. There is `attend_hopper` for
// sm_90a only; the launcher asks for it.
//
// A block has 64 heads of one query and walks over tiles of 64 keys. Its four warpgroups: one plans, that is looks up where
// the rows of coming tiles lie, and fetches queries; one decodes rows to bfloat16 in shared memory, two tiles ahead; one
// takes scores, weights and the left half of the output's columns; one the right half. Blocks are persistent: keys and
// queries of the next item are on their way while the last is finished.
//
// An item is a query, 64 heads, and a piece of its runs. Runs are cut by the number of tiles alone (`runs_of`), so that bits
// never depend on the batch: a block that has all runs of its query adds them itself, in order, each thread from what it
// wrote; otherwise `attend_hopper_join` does, with the same sums.
#include "attention.cuh"
#include "hopper.cuh"

constexpr u32 TILE = 64;                  // keys of a tile, heads of a block
constexpr u32 OPERAND = 8 * BLOCK_BYTES;  // 64 rows of 512 values
constexpr u32 NOTES = 16;                 // tiles that are planned ahead, and a few that are in use
constexpr u32 MOST_RUNS = 15;
constexpr u32 RUN_TILES = 3;
// What stands where a row's sums have place for MAX_SPLITS: sums of runs, their factors (left and right half), their number.
constexpr u32 FACTORS_AT = MOST_RUNS + 1, RUNS_AT = FACTORS_AT + MOST_RUNS;
static_assert(RUNS_AT < MAX_SPLITS, "all have place");

// Places in shared memory.
constexpr u32 AT_Q = 0, AT_K = OPERAND, AT_P = 3 * OPERAND, AT_FADES = AT_P + BLOCK_BYTES;
constexpr u32 AT_SUMS = AT_FADES + TILE * 4, AT_FACTORS = AT_SUMS + MOST_RUNS * TILE * 8;
constexpr u32 AT_NOTES = AT_FACTORS + 2 * MOST_RUNS * TILE * 4;
constexpr u32 BATCH = 4;  // tiles that are looked up together
constexpr u32 AT_ROWS = AT_NOTES + NOTES * 16, AT_PLAN = AT_ROWS + 2 * BATCH * TILE * 8, PLAN_BYTES = 256 * 16 + 4 * 80;
constexpr u32 FULL = AT_PLAN + PLAN_BYTES, EMPTY = FULL + 16, P_FULL = EMPTY + 16, P_EMPTY = P_FULL + 8;
constexpr u32 HOPPER_BYTES = P_EMPTY + 8;
static_assert(HOPPER_BYTES == 229232, "the launcher says the same");

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

// Runs of a query: about three tiles each, at most 15. Run k begins with tile k * tiles / runs.
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

// Finishes columns of 16 heads that a warp holds as TILES fragments of 8 columns, scaled and packed: rotates back, rounds,
// stores. They are columns `group` * 128 + `begin` * 8 and following; `head` is that of the thread's first row, the second
// is 8 further. `widen` makes the magnitude of a row's fragments that of its 128 columns.
template <int TILES, typename Widen>
__device__ __forceinline__ void finish(const AttentionParams& p, u32 (&words)[2][TILES], u32 group, u32 begin, u32 row,
                                       u32 head, Widen widen) {
  const u32 quad = threadIdx.x % 4;
  if (group == 3) {
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      if (begin + t < 8) continue;
      const float2 turn = p.turns[u64(row) * (ROPE_DIM / 2) + (begin + t - 8) * 4 + quad];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float x = low_value(words[half][t]), y = high_value(words[half][t]);
        words[half][t] = bf16_pair(__fadd_rn(__fmul_rn(x, turn.x), __fmul_rn(y, turn.y)),
                                   __fsub_rn(__fmul_rn(y, turn.x), __fmul_rn(x, turn.y)));
      }
    }
  }
  if (p.quantise) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 bits = 0;
#pragma unroll
      for (int t = 0; t < TILES; t++)
        bits = max(bits, max(magnitude_bits(low_value(words[half][t])), magnitude_bits(high_value(words[half][t]))));
      const float scale = e4m3_scale(__uint_as_float(widen(warp_max<4>(bits), half))), inverse = 1.0f / scale;
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        float v[2] = {low_value(words[half][t]), high_value(words[half][t])};
#pragma unroll
        for (int i = 0; i < 2; i++) v[i] = scale != scale ? scale : round_e4m3(clamp_to(v[i] * inverse, 448.0f)) * scale;
        words[half][t] = bf16_pair(v[0], v[1]);
      }
    }
  }
#pragma unroll
  for (int t = 0; t < TILES; t += 4)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 w[4] = {words[half][t], words[half][t + 1], words[half][t + 2], words[half][t + 3]};
      transpose4(w);
      if (head + half * 8 < p.heads)
        *reinterpret_cast<uint4*>(p.out + (u64(row) * p.heads + head + half * 8) * HEAD_DIM + group * 128 +
                                  (begin + t + quad) * 8) = make_uint4(w[0], w[1], w[2], w[3]);
    }
}

// Runs are stored as float16, each row of a half's 256 columns brought near 2^14 by a power of two: twelve bits or more of
// its largest value, so that a block's runs stay in the L2 cache.
__device__ __forceinline__ u32 half_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ float2 half_values(u32 pair) {
  float2 v;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
      : "=f"(v.x), "=f"(v.y)
      : "r"(pair));
  return v;
}

// What a row of 256 columns with this largest magnitude is multiplied by, and its inverse.
__device__ __forceinline__ float2 part_scale(u32 magnitude) {
  const u32 exponent = min(268 - (magnitude >> 23), 253u);
  return make_float2(__uint_as_float(exponent << 23), __uint_as_float((254 - exponent) << 23));
}

constexpr u32 PART = TILE * HEAD_DIM / 8;  // uint4 of a run of 64 heads: 8 values of two fragments

// Where a thread keeps its fragments of a run: uint4 i of 16 is i * 128 further, the threads side by side.
__device__ __forceinline__ uint4* part_of(const AttentionParams& p, u32 row, u32 run, u32 block, u32 half, u32 thread) {
  const u64 blocks = (p.heads + TILE - 1) / TILE;
  return reinterpret_cast<uint4*>(p.part_out) + ((u64(row) * MAX_SPLITS + run) * blocks + block) * PART +
         half * (PART / 2) + thread;
}

// Tells the weights of a row's runs, whose (maximum, sum) are `pitch` apart; returns the inverse of the sum of all weights
// of keys, the sink's included. Adding up is the same wherever it happens: v = fma(run, weight, v), in order.
template <typename Tell>
__device__ __forceinline__ float weights_of(const AttentionParams& p, u32 head, const float2* sums, u32 pitch, u32 runs,
                                            Tell tell) {
  float highest = minus_infinity(), total = 0.0f;
  for (u32 r = 0; r < runs; r++) highest = fmaxf(highest, sums[r * pitch].x);
  for (u32 r = 0; r < runs; r++) {
    const float2 run = sums[r * pitch];
    const float weight = expf(run.x - highest);
    total = fmaf(run.y, weight, total);
    tell(r, weight);
  }
  return 1.0f / (total + expf(p.sink[min(head, p.heads - 1)] - highest));
}

// v += two fragments, `weight` that of each of the two rows
__device__ __forceinline__ void add_part(float* v, uint4 x, const float (&weight)[2]) {
  const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 pair = half_values(words[i]);
    v[i * 2] = fmaf(pair.x, weight[i % 2], v[i * 2]);
    v[i * 2 + 1] = fmaf(pair.y, weight[i % 2], v[i * 2 + 1]);
  }
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The part of a query's tiles that an item has.
struct Item {
  u32 row, block, index;
  u32 start, first_row;  // of the sequence
  Tiles t;
  u32 runs, run;  // run that `begin` lies in
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
  return m;
}

__device__ __forceinline__ void copy_index(u32* to, const u32* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void prefetch(u64 address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// A tile of an item.
struct Cursor {
  u32 row, block, start, first_row, first, in_window, entries, window_tiles, ring, table;  // of the item
  u32 runs, total, begin, end;
  u32 number, tile, stop;  // the item's number, its tile; whether there is none
  u32 unused[3];
};

// Looks up where the rows of the next four tiles lie, in three phases of which each needs what the one before has asked for:
// the rows' numbers, their pages, their addresses, so that their bytes are in the L2 cache when they are loaded. Each warp of
// the decoding warpgroup has one of the tiles, each lane two rows. All of it lies in shared memory, and what is asked for
// comes there: nothing is held in registers meanwhile, and a load to a register would be waited for with the rows'.
struct Planner {
  static constexpr u32 STAGED = 0, RING = 1, WIDE = 2, NARROW = 3;
  u32 number[256], page[256];
  u32 place[256];  // first page of the sequence, four times, and where rows lie
  u32 offset[256];
  Cursor cursors[4];

  // the next item that has tiles
  static __device__ __forceinline__ void begin(const HopperParams& h, Cursor& c) {
    const AttentionParams& p = h.attention;
    for (; c.number < h.items; c.number += gridDim.x) {
      const Item m = item_of(h, c.number);
      if (m.begin == m.end) continue;
      c.row = m.row, c.block = m.block, c.start = m.start, c.first_row = m.first_row, c.first = m.t.first;
      c.in_window = m.t.in_window, c.entries = m.t.entries, c.window_tiles = m.t.window_tiles;
      c.ring = m.index * p.ring.pitch, c.table = m.index * p.entries.pitch;
      c.runs = m.runs, c.total = m.t.total, c.begin = m.begin, c.end = m.end;
      c.tile = m.begin;
      return;
    }
    c.stop = 1;
  }

  static __device__ __forceinline__ void advance(const HopperParams& h, Cursor& c, u32 tiles) {
    while (!c.stop) {
      const u32 left = c.end - c.tile;
      if (tiles < left) {
        c.tile += tiles;
        return;
      }
      tiles -= left;
      c.number += gridDim.x;
      begin(h, c);
    }
  }

  __device__ __forceinline__ void start(const HopperParams& h) {
    const u32 warp = threadIdx.x / 32 % 4;
    Cursor c = {};
    c.number = blockIdx.x;
    begin(h, c);
    advance(h, c, warp);
    if (threadIdx.x % 32 == 0) cursors[warp] = c;
    __syncwarp();
  }

  // the rows of tile `tile` of all of the block's, which is the warp's
  __device__ __forceinline__ void find_numbers(const HopperParams& h, uint4* notes, u32 tile) {
    const AttentionParams& p = h.attention;
    const u32 thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
    Cursor c = cursors[warp];
    __syncwarp();
    if (c.stop) {
      if (lane == 0) notes[tile % NOTES] = make_uint4(0, 0, STOP, 0);
#pragma unroll
      for (u32 i = 0; i < 2; i++) {
        place[i * 128 + thread] = STAGED;
        number[i * 128 + thread] = 0;
      }
      return;
    }
    const bool in_window = c.tile < c.window_tiles;
    const u32 begin = (in_window ? c.tile : c.tile - c.window_tiles) * TILE;
    const u32 valid = min((in_window ? c.in_window : c.entries) - begin, TILE);
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
      const u32 at = begin + min(i * 32 + lane, valid - 1);  // rows behind the last repeat it: their weights are zero
      if (in_window) {
        const u32 q = c.first + at;
        const bool staged = q >= c.start;
        place[i * 128 + thread] = staged ? STAGED : c.ring * 4 + RING;
        number[i * 128 + thread] = staged ? c.first_row + q - c.start : q % p.window;
      } else {
        place[i * 128 + thread] = c.table * 4 + (p.ratio == 4 ? WIDE : NARROW);
        if (p.selected)
          copy_index(&number[i * 128 + thread], p.selected + u64(c.row) * p.width + at);
        else
          number[i * 128 + thread] = at;
      }
    }
    commit_copies();
    if (lane == 0) {
      const u32 run = ((c.tile + 1) * c.runs - 1) / c.total;
      const u32 flags = (c.tile == c.begin ? FIRST : 0) | (c.tile + 1 == c.end ? LAST : 0) |
                        (c.tile + 1 == (run + 1) * c.total / c.runs ? RUN_ENDS : 0);
      notes[tile % NOTES] = make_uint4(c.row, c.block, valid | flags, run | c.runs << 16);
    }
    advance(h, c, BATCH);
    if (lane == 0) cursors[warp] = c;
    __syncwarp();
  }

  __device__ __forceinline__ void find_pages(const AttentionParams& p) {
    wait_copies<0>();
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
      const u32 mine = i * 128 + threadIdx.x % 128, n = number[mine], kind = place[mine] % 4, table = place[mine] / 4;
      if (kind == STAGED) {
        offset[mine] = n * ROW_BYTES;
        continue;
      }
      const u32 shift = kind == NARROW ? 1 : 6;
      offset[mine] = (n & ((1 << shift) - 1)) * ROW_BYTES;
      copy_index(&page[mine], (kind == RING ? p.ring.ids : p.entries.ids) + u64(table) + (n >> shift));
    }
    commit_copies();
  }

  __device__ __forceinline__ void find_addresses(const AttentionParams& p, u32 rows) {
    wait_copies<0>();
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
      const u32 thread = threadIdx.x % 128, mine = i * 128 + thread, kind = place[mine] % 4;
      u64 address = u64(p.staged) + offset[mine];
      if (kind == RING)
        address = u64(p.ring.base) + u64(page[mine]) * p.ring.page_bytes + offset[mine];
      else if (kind != STAGED)
        address = u64(p.entries.base) + u64(page[mine]) * p.entries.page_bytes + offset[mine];
      store_word(rows + (thread / 32 * TILE + i * 32 + thread % 32) * 8, address);
#pragma unroll
      for (u32 k = 0; k < 5; k++) prefetch(address + k * 128);
    }
  }
};
static_assert(sizeof(Planner) == PLAN_BYTES, "it has its place");

// A factor for E4M3 codes that lie as bfloat16 bits: 2^120 times the scale.
__device__ __forceinline__ u32 code_factor(u32 scale) { return scale * 0x00800080u + 120u * 0x00800080u; }

// whether one of seven scales is beyond 2^7, so that its factor is none
__device__ __forceinline__ bool any_large(u64 scales) {
  const u32 low = u32(scales), high = u32(scales >> 32) & 0x00FFFFFFu;
  return (low & ((low & 0x7F7F7F7Fu) + 0x79797979u) & 0x80808080u) |
         (high & ((high & 0x7F7F7F7Fu) + 0x79797979u) & 0x80808080u);
}

// Eight codes to eight bfloat16: each code goes to the upper byte of its half, then sign and magnitude to their places.
__device__ __forceinline__ uint4 decode(u64 codes, u32 factor) {
  u32 v[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 x = __byte_perm(u32(codes >> (i / 2 * 32)), 0, i % 2 ? 0x3424 : 0x1404);
    v[i] = bf16_mul((x & 0x80008000u) | ((x >> 4) & 0x07F007F0u), factor);
  }
  return make_uint4(v[0], v[1], v[2], v[3]);
}

__device__ __forceinline__ u64 load_word(u64 address) {
  u64 v;
  asm volatile("ld.global.u64 %0, [%1];" : "=l"(v) : "l"(address));
  return v;
}

// The decoding warpgroup. Eight threads have a row, in four passes of 16 rows; a tile is loaded while the others are at work.
__device__ __forceinline__ void decode_rows(const HopperParams& h, u8* shared) {
  u32 base = shared_address(shared);
  asm volatile("" : "+r"(base));  // kept, not found again at each use
  const u32 thread = threadIdx.x % 128, j = thread % 8, warp = thread / 32;
  uint4* const notes = reinterpret_cast<uint4*>(shared + AT_NOTES);
  u64 codes[4][7], ropes[4][2], scales[4];
  auto load = [&](u32 tile) {
    u64 rows[4];
#pragma unroll
    for (int pass = 0; pass < 4; pass++)
      rows[pass] = load_shared(base + AT_ROWS + (tile % (2 * BATCH) * TILE + pass * 16 + thread / 8) * 8);
#pragma unroll
    for (int pass = 0; pass < 4; pass++) {
#pragma unroll
      for (int c = 0; c < 7; c++) codes[pass][c] = load_word(rows[pass] + c * 64 + j * 8);
#pragma unroll
      for (int c = 0; c < 2; c++) ropes[pass][c] = load_word(rows[pass] + NOPE_DIM + j * 16 + c * 8);
      scales[pass] = load_word(rows[pass] + NOPE_DIM + 2 * ROPE_DIM);
    }
  };
  auto store = [&](int pass, u32 at) {
    const bool large = any_large(scales[pass]);
    const u64 known = large ? 0x7F7F7F7F7F7F7Full : scales[pass];
#pragma unroll
    for (int c = 0; c < 7; c++)
      store_shared(at + c * BLOCK_BYTES, decode(codes[pass][c], code_factor(u32(known >> (8 * c)) & 0xFF)));
    store_shared(at + 7 * BLOCK_BYTES, make_uint4(u32(ropes[pass][0]), u32(ropes[pass][0] >> 32), u32(ropes[pass][1]),
                                                  u32(ropes[pass][1] >> 32)));
    if (large) {
#pragma unroll 1
      for (int c = 0; c < 7; c++) {
        const u32 scale = e8m0_pair(u8(scales[pass] >> (8 * c)));
        const u64 low = load_shared(at + c * BLOCK_BYTES), high = load_shared(at + c * BLOCK_BYTES + 8);
        store_shared(at + c * BLOCK_BYTES, make_uint4(bf16_mul(u32(low), scale), bf16_mul(u32(low >> 32), scale),
                                                      bf16_mul(u32(high), scale), bf16_mul(u32(high >> 32), scale)));
      }
    }
  };

  Planner& planner = *reinterpret_cast<Planner*>(shared + AT_PLAN);
  // one of the phases for the tiles of a batch
  auto plan = [&](u32 phase, u32 batch) {
    if (phase == 0) planner.find_numbers(h, notes, batch * BATCH + warp);
    if (phase == 1) planner.find_pages(h.attention);
    if (phase == 2) {
      planner.find_addresses(h.attention, base + AT_ROWS + batch % 2 * (BATCH * TILE * 8));
      asm volatile("bar.sync 2, 128;" ::: "memory");
    }
  };
  planner.start(h);
#pragma unroll 1
  for (u32 phase = 0; phase < 3; phase++) plan(phase, 0);
#pragma unroll 1
  for (u32 tile = 0;; tile++) {
    load(tile);
    const u32 buffer = tile % 2;
    barrier_wait(base + EMPTY + buffer * 8, tile / 2 % 2 ^ 1);
    const bool stops = u32(load_shared(base + AT_NOTES + tile % NOTES * 16 + 8)) == STOP;
    if (!stops) {
      const u32 at = base + AT_K + buffer * OPERAND + block_offset(thread / 8, j);
#pragma unroll
      for (int pass = 0; pass < 4; pass++) store(pass, at + pass * 16 * BLOCK_ROW);
    }
    release(base + FULL + buffer * 8);
    if (stops) break;
    // nothing is held in registers now
    plan(tile % BATCH, tile / BATCH + 1);
  }
  wait_copies<0>();
}

// Fragments i and i + 1 of a run as they are stored.
__device__ __forceinline__ uint4 part_at(const float (&o)[128], int i, const float2 (&scale)[2]) {
  u32 words[4];
#pragma unroll
  for (int k = 0; k < 4; k++)
    words[k] = half_pair(o[i * 4 + k * 2] * scale[k % 2].x, o[i * 4 + k * 2 + 1] * scale[k % 2].x);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Adds the runs before the last, which is in `o`. They come through `place`, 32 KB of shared memory: each thread waits for
// copies of its own only, seven steps of four fragments ahead. `factors` are the runs' weights and undo the scaling.
__device__ __forceinline__ void join(float (&o)[128], const float2 (&scale)[2], const uint4* part, u32 runs,
                                     const float* factors, u8* place) {
  const u32 thread = threadIdx.x % 128, slots = shared_address(place) + thread * 16;
  const uint4* from = part;
  u32 sent = 0, run = 0;
  auto send = [&] {
    if (sent < 8 * (runs - 1)) {
#pragma unroll
      for (int k = 0; k < 2; k++) copy_async(slots + (sent % 8 * 2 + k) * 2048, from + run * PART + k * 128, true);
      sent++;
      if (++run + 1 == runs) run = 0, from += 2 * 128;
    }
    commit_copies();
  };
  auto weights = [&](u32 r, float (&weight)[2]) {
    weight[0] = factors[r * TILE];
    weight[1] = factors[r * TILE + 8];
  };
  asm volatile("fence.acq_rel.cta;" ::: "memory");  // the thread's own stores come before its copies
  for (int i = 0; i < 7; i++) send();
  u32 step = 0;
  float weight[2];
#pragma unroll
  for (int i = 0; i < 32; i += 4) {
    float v[16] = {};
#pragma unroll 1
    for (u32 r = 0; r + 1 < runs; r++, step++) {
      send();
      wait_copies<7>();
      weights(r, weight);
#pragma unroll
      for (int k = 0; k < 2; k++)
        add_part(v + k * 8, *reinterpret_cast<const uint4*>(place + thread * 16 + (step % 8 * 2 + k) * 2048), weight);
    }
    weights(runs - 1, weight);
#pragma unroll
    for (int k = 0; k < 2; k++) add_part(v + k * 8, part_at(o, i + k * 2, scale), weight);
#pragma unroll
    for (int k = 0; k < 16; k++) o[i * 4 + k] = v[k];
  }
  wait_copies<0>();
}

// Ends a run: stores it, or finishes the item. `place` may be used if there are runs to add.
__device__ __forceinline__ void end_run(const HopperParams& h, float (&o)[128], const uint4& note, u32 half, u8* place,
                                        u8* shared) {
  const AttentionParams& p = h.attention;
  const u32 thread = threadIdx.x % 128, low = thread / 32 * 16 + thread % 32 / 4;
  const u32 run = note.w & 0xFFFF, runs = note.w >> 16, head = note.y * TILE + low;
  float* const factors = reinterpret_cast<float*>(shared + AT_FACTORS) + half * MOST_RUNS * TILE + low;
  const bool alone = h.pieces == 1;
  float2 scale[2];
  if (runs > 1) {
    u32 magnitude[2] = {};
#pragma unroll
    for (int i = 0; i < 128; i++) magnitude[i / 2 % 2] = max(magnitude[i / 2 % 2], magnitude_bits(o[i]));
    scale[0] = part_scale(warp_max<4>(magnitude[0]));
    scale[1] = part_scale(warp_max<4>(magnitude[1]));
    if (thread % 4 == 0) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        if (alone)
          factors[run * TILE + i * 8] = scale[i].y;
        else if (head + i * 8 < p.heads)
          reinterpret_cast<float*>(p.part_sums + (u64(note.x) * MAX_SPLITS + FACTORS_AT + run) * p.heads + head + i * 8)[half] =
              scale[i].y;
      }
    }
  }
  // a block that adds up itself uses the same places for every item: they stay in the L2 cache
  uint4* part = alone ? reinterpret_cast<uint4*>(p.part_out) + u64(blockIdx.x) * MAX_SPLITS * PART + half * (PART / 2) + thread
                      : part_of(p, note.x, run, note.y, half, thread);
  if (runs > 1 && (!alone || run + 1 < runs)) {
    if (alone) part += run * PART;
#pragma unroll
    for (int i = 0; i < 32; i += 2) part[i / 2 * 128] = part_at(o, i, scale);
    return;
  }
  const float2* sums = reinterpret_cast<const float2*>(shared + AT_SUMS) + low;
  float factor[2];
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2; i++)
    factor[i] = weights_of(p, head + i * 8, sums + i * 8, TILE, runs, [&](u32 r, float weight) {
      if (runs > 1 && thread % 4 == 0) factors[r * TILE + i * 8] *= weight;
    });
  __syncwarp();
  if (runs > 1) join(o, scale, part, runs, factors, place);
#pragma unroll
  for (int group = 0; group < 2; group++) {
    u32 words[2][16];
#pragma unroll
    for (int t = 0; t < 16; t++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        words[i][t] = bf16_pair(o[group * 64 + t * 4 + i * 2] * factor[i], o[group * 64 + t * 4 + i * 2 + 1] * factor[i]);
    finish(p, words, half * 2 + group, 0, note.x, head, [](u32 bits, int) { return bits; });
  }
}

// The 128 threads that score.
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

// Scores and weights.
__device__ __forceinline__ void score(const HopperParams& h, u8* shared) {
  const AttentionParams& p = h.attention;
  const u32 base = shared_address(shared), thread = threadIdx.x, lane = thread % 32, quad = lane % 4;
  const u32 low = thread / 32 * 16 + lane / 4;  // first of the thread's two heads; the other is 8 further
  const uint4* notes = reinterpret_cast<const uint4*>(shared + AT_NOTES);
  float* const fades = reinterpret_cast<float*>(shared + AT_FADES);
  float2* const sums = reinterpret_cast<float2*>(shared + AT_SUMS);
  const u32 q_blocks = along_columns(base + AT_Q);
  const u32 p_address = base + AT_P + block_offset(thread / 32 * 16 + lane % 16, lane / 16);

  auto fetch = [&](u32 row, u32 block) {
    const u32 heads = min(p.heads - block * TILE, TILE), piece = thread % 64;
    const u16* q = p.q + (u64(row) * p.heads + block * TILE) * HEAD_DIM + piece * 8;
    const u32 to = base + AT_Q + piece / 8 * BLOCK_BYTES;
#pragma unroll 4
    for (u32 head = thread / 64; head < TILE; head += 2)
      copy_async(to + block_offset(head, piece % 8), q + (head < heads ? head * HEAD_DIM : 0), head < heads);
    commit_copies();
  };
  float top[2], sum[2];
  bool fresh = true;
  // the first item's queries, most likely: pieces without runs are left out
  u32 row = blockIdx.x / h.pieces / ((p.heads + TILE - 1) / TILE), block = blockIdx.x / h.pieces % ((p.heads + TILE - 1) / TILE);
  fetch(row, block);
  for (u32 count = 0;; count++) {
    const u32 buffer = count % 2;
    barrier_wait(base + FULL + buffer * 8, count / 2 % 2);
    const u32 flags = notes[count % NOTES].z;
    if (flags & STOP) break;
    if (flags & FIRST) {
      const uint4 note = notes[count % NOTES];
      wait_copies<0>();
      if (note.x != row || note.y != block) {
        fetch(note.x, note.y);
        wait_copies<0>();
      }
      meet();
    }
    acquire();
    float s[32];
    const u32 keys = uniform(along_columns(base + AT_K + buffer * OPERAND));
    products_begin();
#pragma unroll
    for (int k = 0; k < 32; k++) {
      const u32 step = k / 4 * (BLOCK_BYTES >> 4) + k % 4 * 2;
      product_64(s, q_blocks + step, keys + step, k > 0);
    }
    products_commit();
    products_wait<0>();
    if (flags & LAST) {
      const uint4 next = notes[(count + 1) % NOTES];
      meet();
      row = next.x;
      block = next.y;
      if (!(next.z & STOP)) fetch(row, block);
    }

    const u32 valid = flags & 0xFF;
    if (valid < TILE) {
#pragma unroll
      for (int i = 0; i < 32; i++)
        if (i / 4 * 8 + quad * 2 + i % 2 >= valid) s[i] = minus_infinity();
    }
    if (fresh) top[0] = top[1] = minus_infinity(), sum[0] = sum[1] = 0.0f;
    float highest[2], fade[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float pairs[8];
#pragma unroll
      for (int i = 0; i < 8; i++) pairs[i] = fmaxf(s[i * 4 + half * 2], s[i * 4 + half * 2 + 1]);
#pragma unroll
      for (int step = 4; step > 0; step /= 2)
#pragma unroll
        for (int i = 0; i < step; i++) pairs[i] = fmaxf(pairs[i], pairs[i + step]);
      highest[half] = fmaxf(top[half], pairs[0]);
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
#pragma unroll
      for (int half = 0; half < 2; half++)
        highest[half] = fmaxf(highest[half], __shfl_xor_sync(ALL, highest[half], step));
    float part[2][4] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
      // weights up to 2^8 do no harm and save rescaling the output
      const bool rises = fresh || (highest[half] - top[half]) * (SCALE * LOG2_E) > 8.0f;
      fade[half] = rises ? exp2_of((top[half] - highest[half]) * (SCALE * LOG2_E)) : 1.0f;
      top[half] = rises ? highest[half] : top[half];
      const float offset = top[half] * (SCALE * LOG2_E);
#pragma unroll
      for (int i = 0; i < 16; i++) {
        float& x = s[i / 2 * 4 + half * 2 + i % 2];
        x = exp2_of(fmaf(x, SCALE * LOG2_E, -offset));
        part[half][i % 4] += x;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
      sum[half] = fmaf(sum[half], fade[half], (part[half][0] + part[half][1]) + (part[half][2] + part[half][3]));
    u32 weights[4][4];
#pragma unroll
    for (int step = 0; step < 4; step++)
#pragma unroll
      for (int i = 0; i < 4; i++) weights[step][i] = bf16_pair(s[step * 8 + i * 2], s[step * 8 + i * 2 + 1]);
    barrier_wait(base + P_EMPTY, count % 2 ^ 1);
#pragma unroll
    for (int step = 0; step < 4; step++) store_matrices(p_address ^ step << 5, weights[step]);
    if (quad == 0) {
      fades[low] = fade[0];
      fades[low + 8] = fade[1];
    }
    fresh = flags & RUN_ENDS;
    if (fresh) {
      const uint4 note = notes[count % NOTES];
      const u32 run = note.w & 0xFFFF, runs = note.w >> 16;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        sum[half] += __shfl_xor_sync(ALL, sum[half], 1);
        sum[half] += __shfl_xor_sync(ALL, sum[half], 2);
        if (quad != 0) continue;
        const u32 row = low + half * 8, head = note.y * TILE + row;
        const float2 mine = make_float2(top[half] * SCALE, sum[half]);
        sums[run * TILE + row] = mine;
        if (h.pieces > 1 && head < p.heads) {
          float2* const parts = p.part_sums + u64(note.x) * MAX_SPLITS * p.heads + head;
          parts[RUNS_AT * p.heads].x = runs;
          parts[run * p.heads] = mine;
        }
      }
    }
    release(base + P_FULL);
  }
  wait_copies<0>();
}

// Half of the output's columns.
__device__ __forceinline__ void add_values(const HopperParams& h, u8* shared, u32 half) {
  const u32 base = shared_address(shared), thread = threadIdx.x % 128;
  const u32 low = thread / 32 * 16 + thread % 32 / 4;
  const uint4* notes = reinterpret_cast<const uint4*>(shared + AT_NOTES);
  const float* fades = reinterpret_cast<const float*>(shared + AT_FADES);
  const u32 weights = along_columns(base + AT_P);

  float o[128] = {};
  bool fresh = true;
  for (u32 count = 0;; count++) {
    const u32 buffer = count % 2;
    barrier_wait(base + FULL + buffer * 8, count / 2 % 2);
    const u32 flags = notes[count % NOTES].z;
    if (flags & STOP) break;
    barrier_wait(base + P_FULL, count % 2);
    acquire();
    const float fade[2] = {fades[low], fades[low + 8]};
    if (!fresh && __any_sync(ALL, fade[0] != 1.0f || fade[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < 128; i++) o[i] *= fade[i / 2 % 2];
    }
    const u32 place = AT_K + buffer * OPERAND + half * (OPERAND / 2), values = uniform(along_rows(base + place));
    products_begin();
#pragma unroll
    for (int step = 0; step < 4; step++) {
      product_128<0>(o, weights + step * 2, values + step * (16 * BLOCK_ROW >> 4));
      product_128<64>(o, weights + step * 2, values + (2 * BLOCK_BYTES + step * 16 * BLOCK_ROW >> 4));
    }
    products_commit();
    products_wait<0>();
    fresh = flags & RUN_ENDS;
    if (!fresh) {
      release(base + P_EMPTY);
      release(base + EMPTY + buffer * 8);
      continue;
    }
    const uint4 note = notes[count % NOTES];
    const bool joins = h.pieces == 1 && flags & LAST && note.w >> 16 > 1;
    if (!joins) release(base + EMPTY + buffer * 8);
    end_run(h, o, note, half, shared + place, shared);
    release(base + P_EMPTY);
    if (joins) release(base + EMPTY + buffer * 8);
    // no value lives on beyond this
#pragma unroll
    for (int i = 0; i < 128; i++) o[i] = 0.0f;
  }
}

// Grid: at most one block a multiprocessor, 512 threads. Shared memory: HOPPER_BYTES.
extern "C" __global__ void __launch_bounds__(512, 1) attend_hopper(const __grid_constant__ HopperParams h) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = shared_address(shared);
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < 2; i++) {
      barrier_init(base + FULL + i * 8, 4 * WARP);
      barrier_init(base + EMPTY + i * 8, 8 * WARP);
    }
    barrier_init(base + P_FULL, 4 * WARP);
    barrier_init(base + P_EMPTY, 8 * WARP);
  }
  __syncthreads();
  wait_for_inputs();
  const u32 group = threadIdx.x / 128;
  if (group == 0) {
    give_registers<64>();
    score(h, shared);
  } else if (group < 3) {
    take_registers<168>();
    add_values(h, shared, group - 1);
  } else {
    give_registers<112>();
    decode_rows(h, shared);
  }
}

#endif  // sm_90a

// Adds the runs of queries that have several, in order. Grid (4 groups of columns * head blocks, rows), 512 threads: four
// times the threads that wrote, each with 4 of their 16 fragments.
extern "C" __global__ void __launch_bounds__(512) attend_hopper_join(const __grid_constant__ AttentionParams p) {
  __shared__ u32 magnitudes[2][4][TILE / 2];
  __shared__ float2 sums[MOST_RUNS][TILE];
  __shared__ float undo[MOST_RUNS][TILE], factors[TILE];
  wait_for_inputs();
  const u32 group = blockIdx.x % 4, block = blockIdx.x / 4, row = blockIdx.y;
  const u32 thread = threadIdx.x % 128, quarter = threadIdx.x / 128;
  const float2* from = p.part_sums + u64(row) * MAX_SPLITS * p.heads;
  const uint4* part = part_of(p, row, 0, block, group / 2, thread) + (group % 2 * 8 + quarter * 2) * 128;
  const u64 step = u64((p.heads + TILE - 1) / TILE) * PART;
  // what is needed in any case is asked for before the number of runs is known
  constexpr int EARLY = 2;
  uint4 early[EARLY][2];
#pragma unroll
  for (int r = 0; r < EARLY; r++)
#pragma unroll
    for (int i = 0; i < 2; i++) early[r][i] = part[r * step + i * 128];
  const u32 runs = u32(from[RUNS_AT * p.heads].x);
  if (runs == 1) return;
  for (u32 i = threadIdx.x; i < runs * TILE; i += 512) {
    const u32 at = i / TILE * p.heads + min(block * TILE + i % TILE, p.heads - 1);
    sums[i / TILE][i % TILE] = from[at];
    const float2 both = from[FACTORS_AT * p.heads + at];
    undo[i / TILE][i % TILE] = group / 2 ? both.y : both.x;
  }
  __syncthreads();
  const u32 low = thread / 32 * 16 + thread % 32 / 4, head = block * TILE + low;
  if (threadIdx.x < TILE)
    factors[threadIdx.x] = weights_of(p, block * TILE + threadIdx.x, &sums[0][threadIdx.x], TILE, runs,
                                      [&](u32 r, float weight) { sums[r][threadIdx.x].x = weight; });
  __syncthreads();
  float v[16] = {}, weight[2];
  auto weights = [&](u32 r) {
    weight[0] = sums[r][low].x * undo[r][low];
    weight[1] = sums[r][low + 8].x * undo[r][low + 8];
  };
#pragma unroll
  for (int r = 0; r < EARLY; r++) {
    weights(r);
#pragma unroll
    for (int i = 0; i < 2; i++) add_part(v + i * 8, early[r][i], weight);
  }
#pragma unroll 4
  for (u32 r = EARLY; r < runs; r++) {
    weights(r);
#pragma unroll
    for (int i = 0; i < 2; i++) add_part(v + i * 8, part[r * step + i * 128], weight);
  }
  u32 words[2][4];
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int half = 0; half < 2; half++)
      words[half][i] = bf16_pair(v[i * 4 + half * 2] * factors[low + half * 8], v[i * 4 + half * 2 + 1] * factors[low + half * 8]);
  finish(p, words, group, quarter * 4, row, head, [&](u32 bits, int half) {
    const u32 at = thread / 32 * 8 + thread % 32 / 4;
    if (thread % 4 == 0) magnitudes[half][quarter][at] = bits;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) bits = max(bits, magnitudes[half][i][at]);
    return bits;
  });
}
