// Sparse attention for Hopper in runs of a query's keys, for decoding: what `attend_split_*` of attention.cu computes, with
// warpgroup products. For sm_90a only.
//
// A block has 64 heads of one query and walks over tiles of 64 keys. Its four warpgroups: one scores, one has the left half
// of the output's columns, one the right half, and one looks up where the rows of coming tiles lie and decodes them to
// bfloat16 in shared memory, two tiles ahead. Blocks are persistent: keys and queries of the next item are on their way while
// the last is finished.
//
// An item is a query, 64 heads, and a piece of its runs. For few queries there are two blocks an item, which find the same
// scores and have half of the columns each: the end of a run takes nearly as long as a tile. Runs are cut by the number of
// tiles alone (`runs_of`), so that bits never depend on the batch: a block that has all runs of its query adds them itself, in
// order, each thread from what it wrote; otherwise `attend_hopper_join` or `attend_hopper_join_few` does, with the same sums.
#include "attention_sm90.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr u32 NOTES = 8;  // tiles that are looked up ahead, and a few that are in use
constexpr u32 MOST_RUNS = 15;
constexpr u32 RUN_TILES = 3;
// What stands where a row's sums have place for MAX_SPLITS: sums of runs, their factors (left and right half), their number.
constexpr u32 FACTORS_AT = MOST_RUNS + 1, RUNS_AT = FACTORS_AT + MOST_RUNS;
static_assert(RUNS_AT < MAX_SPLITS, "all have place");

// Further places in shared memory.
constexpr u32 AT_SUMS = AT_OWN, AT_FACTORS = AT_SUMS + MOST_RUNS * TILE * 8;
constexpr u32 AT_NOTES = AT_FACTORS + 2 * MOST_RUNS * TILE * 4;
constexpr u32 AT_PLAN = AT_NOTES + NOTES * 16, PLAN_BYTES = 128 * 32 + 4 * 80;
constexpr u32 FULL = AT_PLAN + PLAN_BYTES, EMPTY = FULL + 16, P_FULL = EMPTY + 16, P_EMPTY = P_FULL + 8;
constexpr u32 RUNS_BYTES = P_EMPTY + 8;
static_assert(RUNS_BYTES == 225008, "the launcher says the same");

// Runs of a query: about three tiles each, at most 15. Run k begins with tile k * tiles / runs.
__device__ __forceinline__ u32 runs_of(u32 tiles) { return min((tiles + RUN_TILES - 1) / RUN_TILES, MOST_RUNS); }

// Runs are stored as float16, each row of a half's 256 columns brought near 2^14 by a power of two: twelve bits or more of
// its largest value, so that a block's runs stay in the L2 cache.
__device__ __forceinline__ u32 half_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
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
  m.runs = runs_of(m.t.total);
  m.run = piece * m.runs / h.pieces;
  m.begin = m.run * m.t.total / m.runs;
  m.end = (piece + 1) * m.runs / h.pieces * m.t.total / m.runs;
  return m;
}

__device__ __forceinline__ void copy_index(u32* to, const u32* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void prefetch(u64 address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// Which tile comes next.
struct Cursor {
  u32 row, block, start, first_row, first, in_window, entries, window_tiles, ring, table;  // of the item
  u32 runs, run, total, begin, end, run_end;
  u32 number, tile, count, stop;  // the item's number, its next tile; tiles so far, and in all once that is known
};

// Looks up where rows of coming tiles lie, in steps of which each needs what the one before has asked for: the row's number,
// its page, its address, and a tile later its bytes, which are in the L2 cache by then. Each warp of the decoding warpgroup
// does this for its own 16 rows of a tile, rows 16 * pass + 4 * warp + i, one a lane (twice). Everything lies in shared
// memory, and what is asked for comes there: a load to a register would be waited for with the rows'.
struct Planner {
  static constexpr u32 STAGED = 0, RING = 1, WIDE = 2, NARROW = 3;
  u32 at[128], kind[128], table[128];     // rows' numbers of a tile, where they lie, the first page's place
  u32 page[128], offset[128], paged[128];  // of the tile before: pages and places in them
  u64 next[128];                           // of the one before that: addresses
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
      c.runs = m.runs, c.run = m.run, c.total = m.t.total, c.begin = m.begin, c.end = m.end;
      c.run_end = (m.run + 1) * m.t.total / m.runs;
      c.tile = m.begin;
      return;
    }
    c.stop = c.count;
  }

  __device__ __forceinline__ void start(const HopperParams& h, uint4* notes) {
    const u32 thread = threadIdx.x % 128;
    at[thread] = offset[thread] = 0;
    kind[thread] = paged[thread] = STAGED;
    next[thread] = u64(h.attention.staged);
    Cursor c = {};
    c.number = blockIdx.x;
    c.stop = ~0u;
    begin(h, c);
    if (c.stop != ~0u && thread == 0) notes[c.stop] = make_uint4(0, 0, STOP, 0);
    if (thread % 32 == 0) cursors[thread / 32] = c;
    __syncwarp();
  }

  // Returns the address of the lane's row of the tile three before that which the cursor is at, and tiles in all.
  __device__ __forceinline__ u64 step(const HopperParams& h, uint4* notes, u32& stop) {
    const AttentionParams& p = h.attention;
    const u32 thread = threadIdx.x % 128;
    wait_copies<0>();
    const u64 row = next[thread];
    // addresses
    u64 address = u64(p.staged) + offset[thread];
    if (paged[thread] == RING)
      address = u64(p.ring.base) + u64(page[thread]) * p.ring.page_bytes + offset[thread];
    else if (paged[thread] != STAGED)
      address = u64(p.entries.base) + u64(page[thread]) * p.entries.page_bytes + offset[thread];
    next[thread] = address;
    const u32 odd = thread / 16 % 2;
    prefetch(address + odd * 128);
    prefetch(address + 256 + odd * 128);
    prefetch(address + 512 + odd * (ROW_BYTES - 513));
    // pages
    const u32 known = kind[thread], number = at[thread];
    paged[thread] = known;
    if (known == STAGED) {
      offset[thread] = number * ROW_BYTES;
    } else {
      const u32 shift = known == NARROW ? 1 : 6;
      offset[thread] = (number & ((1 << shift) - 1)) * ROW_BYTES;
      copy_index(&page[thread], (known == RING ? p.ring.ids : p.entries.ids) + u64(table[thread]) + (number >> shift));
    }
    // numbers; behind the end, those of the last tile stay
    Cursor c = cursors[thread / 32];
    __syncwarp();
    stop = c.stop;
    if (stop != ~0u) {
      commit_copies();
      return row;
    }
    const u32 mine = thread % 16 / 4 * 16 + thread / 32 * 4 + thread % 4;
    const bool in_window = c.tile < c.window_tiles;
    const u32 first = (in_window ? c.tile : c.tile - c.window_tiles) * TILE;
    const u32 valid = min((in_window ? c.in_window : c.entries) - first, TILE);
    const u32 i = first + min(mine, valid - 1);  // rows behind the last repeat it: their weights are zero
    if (in_window) {
      const u32 q = c.first + i;
      const bool staged = q >= c.start;
      kind[thread] = staged ? STAGED : RING;
      at[thread] = staged ? c.first_row + q - c.start : q % p.window;
      table[thread] = c.ring;
    } else {
      kind[thread] = p.ratio == 4 ? WIDE : NARROW;
      table[thread] = c.table;
      if (p.selected)
        copy_index(&at[thread], p.selected + u64(c.row) * p.width + i);
      else
        at[thread] = i;
    }
    commit_copies();
    const bool run_ends = c.tile + 1 == c.run_end;
    if (thread == 0) {
      const u32 flags = (c.tile == c.begin ? FIRST : 0) | (c.tile + 1 == c.end ? LAST : 0) | (run_ends ? RUN_ENDS : 0);
      notes[c.count % NOTES] = make_uint4(c.row, c.block, valid | flags, c.run | c.runs << 16);
    }
    c.count++;
    if (run_ends) {
      c.run++;
      c.run_end = (c.run + 1) * c.total / c.runs;
    }
    if (++c.tile == c.end) {
      c.number += gridDim.x;
      begin(h, c);
      stop = c.stop;
      if (stop != ~0u && thread == 0) notes[stop % NOTES] = make_uint4(0, 0, STOP, 0);
    }
    if (thread % 32 == 0) cursors[thread / 32] = c;
    __syncwarp();
    return row;
  }
};
static_assert(sizeof(Planner) == PLAN_BYTES, "it has its place");

// The decoding warpgroup. A tile is loaded while the others are at work.
__device__ __forceinline__ void decode_rows(const HopperParams& h, u8* shared) {
  u32 base = shared_address(shared);
  asm volatile("" : "+r"(base));  // kept, not found again at each use
  uint4* const notes = reinterpret_cast<uint4*>(shared + AT_NOTES);
  RowDecoder decoder;
  Planner& planner = *reinterpret_cast<Planner*>(shared + AT_PLAN);
  planner.start(h, notes);
  u32 stop;
#pragma unroll 1
  for (int i = 0; i < 3; i++) planner.step(h, notes, stop);
#pragma unroll 1
  for (u32 tile = 0;; tile++) {
    // nothing is held in registers meanwhile
    const u64 rows = planner.step(h, notes, stop);
#pragma unroll
    for (int pass = 0; pass < 4; pass++) decoder.load(pass, __shfl_sync(ALL, rows, pass * 4 + threadIdx.x % 32 / 8));
    const u32 buffer = tile % 2;
    barrier_wait(base + EMPTY + buffer * 8, tile / 2 % 2 ^ 1);
    if (tile == stop) break;
#pragma unroll
    for (int pass = 0; pass < 4; pass++) decoder.store(pass, base + AT_K + buffer * OPERAND);
    release(base + FULL + buffer * 8);
  }
  release(base + FULL + stop % 2 * 8);
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
  finish_half(p, o, factor, half, note.x, head);
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
  Softmax softmax;
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
    begin_scores(s, q_blocks, keys);
    products_wait<0>();
    if (flags & LAST) {
      const uint4 next = notes[(count + 1) % NOTES];
      meet();
      row = next.x;
      block = next.y;
      if (!(next.z & STOP)) fetch(row, block);
    }

    float fade[2];
    softmax.weigh(s, flags & 0xFF, fresh, fade);
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
      softmax.add_up();
#pragma unroll
      for (int half = 0; half < 2; half++) {
        if (quad != 0) continue;
        const u32 row = low + half * 8, head = note.y * TILE + row;
        const float2 mine = make_float2(softmax.top[half] * SCALE, softmax.sum[half]);
        sums[run * TILE + row] = mine;
        if (h.pieces > 1 && head < p.heads && blockIdx.y == 0) {
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
__device__ __forceinline__ void add_half(const HopperParams& h, u8* shared, u32 half) {
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
    if (!fresh) fade_out(o, fade);
    const u32 place = AT_K + buffer * OPERAND + half * (OPERAND / 2), values = uniform(along_rows(base + place));
    add_values(o, weights, values);
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

// What the warpgroup does whose half of the columns another block has.
__device__ __forceinline__ void look_on(u8* shared) {
  const u32 base = shared_address(shared);
  const uint4* notes = reinterpret_cast<const uint4*>(shared + AT_NOTES);
  for (u32 count = 0;; count++) {
    const u32 buffer = count % 2;
    barrier_wait(base + FULL + buffer * 8, count / 2 % 2);
    if (notes[count % NOTES].z & STOP) break;
    barrier_wait(base + P_FULL, count % 2);
    release(base + P_EMPTY);
    release(base + EMPTY + buffer * 8);
  }
}

// Grid (at most one block a multiprocessor, 1 or, for few queries, 2 halves of the output's columns), 512 threads. Shared
// memory: RUNS_BYTES.
extern "C" __global__ void __launch_bounds__(512, 1) attend_hopper_runs(const __grid_constant__ HopperParams h) {
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
    if (gridDim.y == 2 && blockIdx.y != group - 1)
      look_on(shared);
    else
      add_half(h, shared, group - 1);
  } else {
    give_registers<112>();
    decode_rows(h, shared);
  }
}

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
  finish(
      p, words, group, quarter * 4, row, head, [&](u32 t) { return turn_of(p, row, quarter * 4 + t); },
      [&](u32 bits, int half) {
        const u32 at = thread / 32 * 8 + thread % 32 / 4;
        if (thread % 4 == 0) magnitudes[half][quarter][at] = bits;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 4; i++) bits = max(bits, magnitudes[half][i][at]);
        return bits;
      });
}

// The same sums for few queries, in blocks of 16 heads: what one multiprocessor reads at a time would bound larger ones, and
// all that is needed is asked for before anything is waited for. Grid (4 groups of columns for every 16 heads, rows), 128
// threads: a warp has a quarter of the columns.
extern "C" __global__ void __launch_bounds__(128) attend_hopper_join_few(const __grid_constant__ AttentionParams p) {
  constexpr u32 HEADS = 16;
  constexpr u32 AHEAD = 12, ANYHOW = 4;  // runs asked for at once, and before their number is known
  __shared__ u32 magnitudes[2][4][HEADS / 2];
  __shared__ float2 sums[MOST_RUNS][HEADS];
  __shared__ float undo[MOST_RUNS][HEADS], shares[MOST_RUNS][HEADS];
  wait_for_inputs();
  const u32 group = blockIdx.x % 4, quarter = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.y;
  const u32 first = blockIdx.x / 4 * HEADS, low = lane / 4, begin = quarter * 4, writer = first % TILE * 2 + lane;
  const float2* from = p.part_sums + u64(row) * MAX_SPLITS * p.heads;
  const u32 runs = u32(from[RUNS_AT * p.heads].x);
  const uint4* part = part_of(p, row, 0, first / TILE, group / 2, writer) + (group % 2 * 8 + quarter * 2) * 128;
  const u64 step = u64((p.heads + TILE - 1) / TILE) * PART;
  uint4 parts[AHEAD][2];
  auto ask = [&](u32 r) {
#pragma unroll
    for (int i = 0; i < 2; i++) parts[r % AHEAD][i] = part[r * step + i * 128];
  };
#pragma unroll
  for (u32 r = 0; r < ANYHOW; r++) ask(r);
  for (u32 i = threadIdx.x; i < MOST_RUNS * HEADS; i += 128) {
    const u32 at = i / HEADS * p.heads + min(first + i % HEADS, p.heads - 1);
    sums[i / HEADS][i % HEADS] = from[at];
    const float2 both = from[FACTORS_AT * p.heads + at];
    undo[i / HEADS][i % HEADS] = group / 2 ? both.y : both.x;
  }
  float sinks[2];
#pragma unroll
  for (int i = 0; i < 2; i++) sinks[i] = p.sink[min(first + low + i * 8, p.heads - 1)];
  float2 turns[4];
  if (group == 3 && begin >= 8) {
#pragma unroll
    for (u32 t = 0; t < 4; t++) turns[t] = turn_of(p, row, begin + t);
  }
  if (runs == 1) return;
#pragma unroll
  for (u32 r = ANYHOW; r < AHEAD; r++)
    if (r < runs) ask(r);
  __syncthreads();
  auto highest = [&](u32 head) {
    float x = minus_infinity();
    for (u32 r = 0; r < runs; r++) x = fmaxf(x, sums[r][head].x);
    return x;
  };
  for (u32 i = threadIdx.x; i < runs * HEADS; i += 128)
    shares[i / HEADS][i % HEADS] = expf(sums[i / HEADS][i % HEADS].x - highest(i % HEADS));
  __syncthreads();
  float v[16] = {}, factor[2];
#pragma unroll
  for (u32 i = 0; i < 2; i++) {
    float total = 0.0f;
    for (u32 r = 0; r < runs; r++) total = fmaf(sums[r][low + i * 8].y, shares[r][low + i * 8], total);
    factor[i] = 1.0f / (total + expf(sinks[i] - highest(low + i * 8)));
  }
#pragma unroll
  for (u32 r = 0; r < MOST_RUNS; r++) {
    if (r >= runs) break;
    const float weight[2] = {shares[r][low] * undo[r][low], shares[r][low + 8] * undo[r][low + 8]};
#pragma unroll
    for (int i = 0; i < 2; i++) add_part(v + i * 8, parts[r % AHEAD][i], weight);
    if (r + AHEAD < runs) ask(r + AHEAD);
  }
  u32 words[2][4];
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int half = 0; half < 2; half++)
      words[half][i] = bf16_pair(v[i * 4 + half * 2] * factor[half], v[i * 4 + half * 2 + 1] * factor[half]);
  finish(
      p, words, group, begin, row, first + low, [&](u32 t) { return turns[t]; },
      [&](u32 bits, int half) {
        if (lane % 4 == 0) magnitudes[half][quarter][low] = bits;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 4; i++) bits = max(bits, magnitudes[half][i][low]);
        return bits;
      });
}

#endif  // sm_90a
