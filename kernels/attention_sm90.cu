// Sparse attention for Hopper, all keys of a query in order, for prompts: what `attend_*` of attention.cu computes, with
// warpgroup products. Compiled for sm_90a only.
//
// A block has 64 heads of one query and walks over tiles of 64 keys. Its four warpgroups: one plans, that is looks up where
// the rows of coming tiles lie, and fetches queries; one decodes rows to bfloat16 in shared memory, two tiles ahead; one
// takes scores, weights and the left half of the output's columns; one the right half. Blocks are persistent: keys and
// queries of the next item are on their way while the last is finished. An item is a query and 64 heads.
#include "attention_sm90.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr u32 NOTES = 8;  // tiles that are planned ahead, and a few that are in use

// Further places in shared memory.
constexpr u32 AT_ROWS = AT_OWN, AT_NOTES = AT_ROWS + NOTES * TILE * 8;
constexpr u32 FULL = AT_NOTES + NOTES * 16, EMPTY = FULL + 16, Q_FULL = EMPTY + 16, Q_EMPTY = Q_FULL + 8;
constexpr u32 P_FULL = Q_EMPTY + 8, P_EMPTY = P_FULL + 8, PLANNED = P_EMPTY + 8, UNPLANNED = PLANNED + NOTES * 8;
constexpr u32 WHOLE_BYTES = UNPLANNED + NOTES * 8;
static_assert(WHOLE_BYTES == 209472, "the launcher says the same");

// A query and 64 heads.
struct Item {
  u32 row, block, index;
  u32 start, first_row;  // of the sequence
  Tiles t;
};

__device__ __forceinline__ Item item_of(const AttentionParams& p, u32 number) {
  const u32 blocks = (p.heads + TILE - 1) / TILE;
  Item m;
  m.row = number / blocks;
  m.block = number % blocks;
  m.index = p.sequence[m.row];
  const Sequence s = p.sequences[m.index];
  m.start = s.start;
  m.first_row = s.first_row;
  m.t = tiles_of<TILE>(p, m.row, s.start + m.row - s.first_row);
  return m;
}

// Where row `at` of the window or of the entries lies.
__device__ __forceinline__ u64 row_of(const AttentionParams& p, const Item& m, bool in_window, u32 at) {
  if (in_window) {
    const u32 q = m.t.first + at;
    if (q >= m.start) return u64(p.staged) + u64(m.first_row + q - m.start) * ROW_BYTES;
    return u64(p.ring.row(m.index, q % p.window, PAGE_ROWS, ROW_BYTES));
  }
  const u32 entry = p.selected ? p.selected[u64(m.row) * p.width + at] : at;
  if (p.ratio == 4) return u64(p.entries.row(m.index, entry, PAGE_ROWS, ROW_BYTES));
  return u64(p.entries.row(m.index, entry, NARROW_ROWS, ROW_BYTES));
}

// Two warps look up the rows of coming tiles; each thread has one.
__device__ __forceinline__ void plan(const HopperParams& h, u8* shared) {
  const AttentionParams& p = h.attention;
  const u32 base = shared_address(shared), thread = threadIdx.x % 128;
  uint4* const notes = reinterpret_cast<uint4*>(shared + AT_NOTES);
  u64* const rows = reinterpret_cast<u64*>(shared + AT_ROWS) + thread;
  u32 count = 0;
  u64 row = 0;
  for (u32 number = blockIdx.x; number < h.items; number += gridDim.x) {
    const Item m = item_of(p, number);
    for (u32 tile = 0; tile < m.t.total; tile++, count++) {
      const bool in_window = tile < m.t.window_tiles;
      const u32 first = (in_window ? tile : tile - m.t.window_tiles) * TILE;
      const u32 valid = min((in_window ? m.t.in_window : m.t.entries) - first, TILE);
      // rows behind the last repeat it: their weights are zero
      row = row_of(p, m, in_window, first + min(thread, valid - 1));
      if (count >= NOTES) barrier_wait(base + UNPLANNED + count % NOTES * 8, count / NOTES % 2 ^ 1);
      rows[count % NOTES * TILE] = row;
      if (thread == 0) {
        const u32 flags = (tile == 0 ? FIRST : 0) | (tile + 1 == m.t.total ? LAST : 0);
        notes[count % NOTES] = make_uint4(m.row, m.block, valid | flags, 0);
      }
      release(base + PLANNED + count % NOTES * 8);
    }
  }
  if (count >= NOTES) barrier_wait(base + UNPLANNED + count % NOTES * 8, count / NOTES % 2 ^ 1);
  rows[count % NOTES * TILE] = row;
  if (thread == 0) notes[count % NOTES] = make_uint4(0, 0, STOP, 0);
  release(base + PLANNED + count % NOTES * 8);
}

// Two warps fetch the queries of coming items.
__device__ __forceinline__ void fetch_queries(const HopperParams& h, u8* shared) {
  const AttentionParams& p = h.attention;
  const u32 base = shared_address(shared), thread = threadIdx.x % 64, blocks = (p.heads + TILE - 1) / TILE;
  u32 count = 0;
  for (u32 number = blockIdx.x; number < h.items; number += gridDim.x, count++) {
    if (count > 0) barrier_wait(base + Q_EMPTY, (count - 1) % 2);
    const u32 row = number / blocks, first = number % blocks * TILE, heads = min(p.heads - first, TILE);
    const u16* q = p.q + (u64(row) * p.heads + first) * HEAD_DIM;
#pragma unroll 4
    for (u32 head = 0; head < TILE; head++)
      copy_async(base + AT_Q + thread / 8 * BLOCK_BYTES + block_offset(head, thread % 8),
                 q + (head < heads ? head * HEAD_DIM + thread * 8 : 0), head < heads);
    commit_copies();
    wait_copies<0>();
    release(base + Q_FULL);
  }
}

// The decoding warpgroup: while a tile is stored, the next is loaded.
__device__ __forceinline__ void decode_rows(u8* shared) {
  u32 base = shared_address(shared);
  asm volatile("" : "+r"(base));  // kept, not found again at each use
  RowDecoder decoder;
  auto load = [&](int pass, u32 tile) {
    decoder.load(pass, load_shared(base + AT_ROWS + (tile % NOTES * TILE + pass * 16 + threadIdx.x % 128 / 8) * 8));
  };
  // whether there is such a tile
  auto planned = [&](u32 tile) -> bool {
    barrier_wait(base + PLANNED + tile % NOTES * 8, tile / NOTES % 2);
    return u32(load_shared(base + AT_NOTES + tile % NOTES * 16 + 8)) != STOP;
  };

  u32 tile = 0;
  bool more = planned(0);
  if (more) {
#pragma unroll
    for (int pass = 0; pass < 4; pass++) load(pass, 0);
  }
  for (; more; tile++) {
    more = planned(tile + 1);
    const u32 buffer = tile % 2;
    barrier_wait(base + EMPTY + buffer * 8, tile / 2 % 2 ^ 1);
    // the others have left that tile for good
    if (tile >= 3) release(base + UNPLANNED + (tile - 3) % NOTES * 8);
#pragma unroll
    for (int pass = 0; pass < 4; pass++) {
      decoder.store(pass, base + AT_K + buffer * OPERAND);
      load(pass, tile + 1);  // behind the last tile stands a copy of its rows
    }
    release(base + FULL + buffer * 8);
  }
  barrier_wait(base + EMPTY + tile % 2 * 8, tile / 2 % 2 ^ 1);
  release(base + FULL + tile % 2 * 8);
}

// Finishes half of the columns of an item and forgets them.
__device__ __forceinline__ void end_item(const AttentionParams& p, float (&o)[128], const uint4& note, u32 half, const u8* shared) {
  const u32 thread = threadIdx.x % 128, low = thread / 32 * 16 + thread % 32 / 4;
  const float* factors = reinterpret_cast<const float*>(shared + AT_FADES);
  __syncwarp();  // the scoring warps read what their own lanes wrote
  const float factor[2] = {factors[low], factors[low + 8]};
  finish_half(p, o, factor, half, note.x, note.y * TILE + low);
#pragma unroll
  for (int i = 0; i < 128; i++) o[i] = 0.0f;
}

// Scores, weights and the left half of the output.
__device__ __forceinline__ void score(const HopperParams& h, u8* shared) {
  const AttentionParams& p = h.attention;
  const u32 base = shared_address(shared), thread = threadIdx.x, lane = thread % 32, quad = lane % 4;
  const u32 low = thread / 32 * 16 + lane / 4;  // first of the thread's two heads; the other is 8 further
  const uint4* notes = reinterpret_cast<const uint4*>(shared + AT_NOTES);
  float* const fades = reinterpret_cast<float*>(shared + AT_FADES);
  const u32 q_blocks = along_columns(base + AT_Q);
  const u32 p_address = base + AT_P + block_offset(thread / 32 * 16 + lane % 16, lane / 16);

  float o[128] = {};
  Softmax softmax;
  u32 queries = 0, messages = 0;
  bool fresh = true;
  for (u32 count = 0;; count++) {
    const u32 buffer = count % 2;
    barrier_wait(base + FULL + buffer * 8, count / 2 % 2);
    const u32 flags = notes[count % NOTES].z;
    if (flags & STOP) return;
    if (flags & FIRST) barrier_wait(base + Q_FULL, queries++ % 2);
    acquire();
    float s[32];
    begin_scores(s, q_blocks, uniform(along_columns(base + AT_K + buffer * OPERAND)));
    products_wait<0>();
    if (flags & LAST) release(base + Q_EMPTY);

    float fade[2];
    softmax.weigh(s, flags & 0xFF, fresh, fade);
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

    if (!fresh) fade_out(o, fade);
    const u32 values = uniform(along_rows(base + AT_K + buffer * OPERAND));
    products_begin();
#pragma unroll
    for (int step = 0; step < 4; step++) {
      product_128<0>(o, weights[step], values + step * (16 * BLOCK_ROW >> 4));
      product_128<64>(o, weights[step], values + (2 * BLOCK_BYTES + step * 16 * BLOCK_ROW >> 4));
    }
    products_commit();
    products_wait<0>();
    const uint4 note = notes[count % NOTES];
    release(base + EMPTY + buffer * 8);
    fresh = flags & LAST;
    if (!fresh) continue;
    barrier_wait(base + P_EMPTY, messages % 2 ^ 1);
    softmax.add_up();
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32 head = min(note.y * TILE + low + half * 8, p.heads - 1);
      if (quad == 0)
        fades[low + half * 8] = 1.0f / (softmax.sum[half] + expf(p.sink[head] - softmax.top[half] * SCALE));
    }
    release(base + P_FULL);
    messages++;
    end_item(p, o, note, 0, shared);
  }
}

// The right half of the output.
__device__ __forceinline__ void add_right(const HopperParams& h, u8* shared) {
  const u32 base = shared_address(shared), thread = threadIdx.x % 128;
  const u32 low = thread / 32 * 16 + thread % 32 / 4;
  const uint4* notes = reinterpret_cast<const uint4*>(shared + AT_NOTES);
  const float* fades = reinterpret_cast<const float*>(shared + AT_FADES);
  const u32 weights = along_columns(base + AT_P);

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
    if (!fresh) fade_out(o, fade);
    add_values(o, weights, uniform(along_rows(base + AT_K + buffer * OPERAND + OPERAND / 2)));
    const uint4 note = notes[count % NOTES];
    release(base + P_EMPTY);
    release(base + EMPTY + buffer * 8);
    fresh = flags & LAST;
    if (!fresh) continue;
    barrier_wait(base + P_FULL, messages++ % 2);
    end_item(h.attention, o, note, 1, shared);
    release(base + P_EMPTY);
  }
}

// Grid: at most one block a multiprocessor, 512 threads. Shared memory: WHOLE_BYTES.
extern "C" __global__ void __launch_bounds__(512, 1) attend_hopper(const __grid_constant__ HopperParams h) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = shared_address(shared);
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < 2; i++) {
      barrier_init(base + FULL + i * 8, 4 * WARP);
      barrier_init(base + EMPTY + i * 8, 8 * WARP);
    }
    barrier_init(base + Q_FULL, 2 * WARP);
    barrier_init(base + Q_EMPTY, 4 * WARP);
    barrier_init(base + P_FULL, 4 * WARP);
    barrier_init(base + P_EMPTY, 4 * WARP);
    for (u32 i = 0; i < NOTES; i++) {
      barrier_init(base + PLANNED + i * 8, 2 * WARP);
      barrier_init(base + UNPLANNED + i * 8, 4 * WARP);
    }
  }
  __syncthreads();
  wait_for_inputs();
  const u32 group = threadIdx.x / 128;
  if (group == 0) {
    take_registers<208>();
    score(h, shared);
  } else if (group == 1) {
    take_registers<160>();
    add_right(h, shared);
  } else if (group == 2) {
    give_registers<112>();
    decode_rows(shared);
  } else {
    give_registers<32>();
    if (threadIdx.x % 128 < 64)
      plan(h, shared);
    else
      fetch_queries(h, shared);
  }
}

#endif  // sm_90a
