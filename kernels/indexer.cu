// The lightning indexer: queries, scores over E2M1 pages, exact top-k (src/backend/cpu/indexer.rs).
//
// index_query: rotation, Hadamard and E2M1 rounding of the queries in place, and the head weights' factor; a warp a head.
// index_scores: a block takes 256 keys of one sequence and up to 16 of its rows. A warp decodes 32 keys once, to operand
// A, and keeps them in registers while the rows' queries pass through shared memory.
// top_k: a block takes 16384 values of a row into shared memory, finds the k-th highest in three radix passes, and writes
// the chosen entries in ascending order; equal values go to the lower entry. Longer rows leave candidates, from which
// top_k_merge chooses in the same way: the result is exact and depends on the scores alone. Portable.
#include "indexer.cuh"
#include "product.cuh"

struct IndexQueryParams {
  u16* q;               // [rows, heads, 128] bf16, in place
  u16* weights;         // [rows, heads] bf16, in place: times `factor`
  const float2* turns;  // [rows, 32]
  u32 heads;
  float factor;
  u32 fp4;  // round to E2M1
};

// grid (ceil(heads / 8), rows)
extern "C" __global__ void __launch_bounds__(256) index_query(const __grid_constant__ IndexQueryParams p) {
  wait_for_inputs();
  const u32 head = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (head >= p.heads) return;
  const u64 at = u64(blockIdx.y) * p.heads + head;
  uint2* q = reinterpret_cast<uint2*>(p.q + at * INDEX_DIM) + lane;
  const uint2 packed = *q;
  float v[4] = {low_value(packed.x), high_value(packed.x), low_value(packed.y), high_value(packed.y)};
  rotate_index(p.turns + u64(blockIdx.y) * (ROPE_DIM / 2), v);
  hadamard(v);
  if (p.fp4) {
    const float scale = index_scale(v), inverse = 1.0f / scale;
#pragma unroll
    for (int j = 0; j < 4; j++) v[j] = e2m1_value(e2m1_code(clamp_to(v[j] * inverse, 6.0f))) * scale;
  }
  *q = make_uint2(bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]));
  if (lane == 0) p.weights[at] = bf16_bits(bf16_value(p.weights[at]) * p.factor);
}

constexpr int SCORE_KEYS = 256;

// grid (ceil(most visible keys / 256), groups); shared memory 2 * heads * 256 bytes
extern "C" __global__ void __launch_bounds__(256) index_scores(const __grid_constant__ ScoreParams p) {
  wait_for_inputs();
  extern __shared__ __align__(128) u8 shared[];
  const Group group = p.groups[blockIdx.y];
  const u32 visible = (group.position + group.rows) / 4;  // of the last row
  if (blockIdx.x * SCORE_KEYS >= visible) return;
  const int thread = threadIdx.x, lane = thread % 32, quad = lane % 4;
  const u32 first_key = blockIdx.x * SCORE_KEYS + thread / 32 * 32;
  const u32 bytes = p.heads * 256, base = shared_address(shared);

  auto fill = [&](u32 i) {
    const u16* from = p.q + u64(group.first_row + i) * p.heads * INDEX_DIM;
    for (u32 c = thread; c < p.heads * 16; c += 256) {
      const u32 head = c / 16, chunk = c % 16;
      copy_async(base + i % 2 * bytes + head * 256 + E2m1::x_place(chunk, head) * 16, from + c * 8, true);
    }
    commit_copies();
  };
  fill(0);

  u32 keys[2][8][4];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 first = first_key + i * 16 + lane / 4;
    const u8* row[2] = {p.keys.row(group.sequence, min(first, visible - 1), PAGE_ROWS, KEY_BYTES),
                        p.keys.row(group.sequence, min(first + 8, visible - 1), PAGE_ROWS, KEY_BYTES)};
    uint4 codes[2];
    u32 scales[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32* words = reinterpret_cast<const u32*>(row[half]) + quad * 4;
      codes[half] = make_uint4(words[0], words[1], words[2], words[3]);
      scales[half] = E2m1::scale(row[half][INDEX_DIM / 2 + quad]);
    }
#pragma unroll
    for (int step = 0; step < 8; step++) E2m1::a(step, codes[0], codes[1], scales[0], scales[1], keys[i][step]);
  }

  for (u32 i = 0; i < group.rows; i++) {
    const u32 row = group.first_row + i, seen = (group.position + i + 1) / 4;
    if (i + 1 < group.rows) {
      fill(i + 1);
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncthreads();
    const u8* q = shared + i % 2 * bytes;
    const u16* weights = p.weights + u64(row) * p.heads;
    float sum[2][2] = {};
    for (u32 h = 0; h < p.heads; h += 8) {
      float acc[2][4] = {};
#pragma unroll
      for (int w = 0; w < 4; w++) {
        const int head = h + lane / 4;
        const uint4 v = *reinterpret_cast<const uint4*>(q + head * 256 + E2m1::x_place(quad * 4 + w, head) * 16);
        const u32 in[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int s = 0; s < 2; s++) {
          u32 b0, b1;
          E2m1::b(s, in, b0, b1);
          mma(acc[0], keys[0][2 * w + s], b0, b1);
          mma(acc[1], keys[1][2 * w + s], b0, b1);
        }
      }
      const u32 pair = *reinterpret_cast<const u32*>(weights + h + quad * 2);
      const float weight[2] = {low_value(pair), high_value(pair)};
#pragma unroll
      for (int k = 0; k < 2; k++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float product = acc[k][j] * E2m1::FACTOR;
          const float relu = product < 0.0f ? 0.0f : product;  // NaN passes
          const float term = p.stepwise ? round_bf16(round_bf16(relu) * weight[j % 2]) : relu * weight[j % 2];
          sum[k][j / 2] += term;
        }
    }
#pragma unroll
    for (int k = 0; k < 2; k++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float s = warp_sum<4>(sum[k][half]);
        const u32 key = first_key + k * 16 + half * 8 + lane / 4;
        if (quad != 0 || key >= seen) continue;
        p.scores[u64(row - p.first_row) * p.pitch + key] = p.stepwise ? round_bf16(s) : s;
        if (magnitude_bits(s) >= 0x7F800000u && p.bad) *p.bad = 1;
      }
    __syncthreads();
  }
}

constexpr u32 CHUNK = 16384, SELECT_THREADS = 1024, PER_THREAD = CHUNK / SELECT_THREADS;

// place of value i in shared memory: a thread's 16 neighbours then lie in different banks than those of others
__device__ __forceinline__ u32 place_of(u32 i) { return i ^ (i >> 4 & 15); }

// Calls emit(n, i) for the n-th chosen of the values i < count; those above the k-th and the first equal ones.
template <class Value, class Emit>
__device__ __forceinline__ void select(u32 count, u32 k, u32* ranks, Value value, Emit emit) {
  constexpr u32 BINS = 2048;
  __shared__ u32 histogram[BINS];
  __shared__ u32 warp_totals[32];
  __shared__ u32 found[2];  // bin, values wanted within it
  const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
#pragma unroll
  for (u32 n = 0; n < PER_THREAD; n++) {
    const u32 i = n * SELECT_THREADS + thread;
    ranks[place_of(i)] = i < count ? rank_of(value(i)) : 0;
  }
  // digits of 11, 11 and 10 bits, highest first; those found stand in `prefix`
  u32 prefix = 0, wanted = k;
#pragma unroll
  for (int pass = 0; pass < 3; pass++) {
    const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;
    const u32 mask = pass == 2 ? 1023 : 2047;
    histogram[thread] = 0;
    histogram[thread + SELECT_THREADS] = 0;
    __syncthreads();
#pragma unroll
    for (u32 n = 0; n < PER_THREAD; n++) {
      const u32 r = ranks[n * SELECT_THREADS + thread];  // in any order
      const bool fits = pass == 0 ? r > 0 : (pass == 1 ? (r ^ prefix) >> 21 : (r ^ prefix) >> 10) == 0;
      if (fits) atomicAdd(&histogram[(r >> shift) & mask], 1u);
    }
    __syncthreads();
    // thread t has bins BINS-1-2t and the one below; running count from the highest
    const u32 high = histogram[BINS - 1 - 2 * thread], low = histogram[BINS - 2 - 2 * thread];
    u32 running = high + low;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
      const u32 other = __shfl_up_sync(ALL, running, step);
      if (lane >= step) running += other;
    }
    if (lane == 31) warp_totals[warp] = running;
    __syncthreads();
    for (u32 w = 0; w < warp; w++) running += warp_totals[w];
    const u32 before = running - high - low;
    if (before < wanted && before + high >= wanted) {
      found[0] = BINS - 1 - 2 * thread;
      found[1] = wanted - before;
    } else if (before + high < wanted && running >= wanted) {
      found[0] = BINS - 2 - 2 * thread;
      found[1] = wanted - before - high;
    }
    __syncthreads();
    prefix |= found[0] << shift;
    wanted = found[1];
  }

  // a thread's 16 neighbours: how many are above and equal, then where its own go
  const u32 first = thread * PER_THREAD;
  u32 mine = 0;  // above in the lower half, equal in the upper: at most 16384 each
#pragma unroll
  for (u32 n = 0; n < PER_THREAD; n++) {
    const u32 r = ranks[place_of(first + n)];
    mine += r > prefix ? 1u : r == prefix ? 1u << 16 : 0u;
  }
  u32 running = mine;
#pragma unroll
  for (u32 step = 1; step < 32; step *= 2) {
    const u32 other = __shfl_up_sync(ALL, running, step);
    if (lane >= step) running += other;
  }
  if (lane == 31) warp_totals[warp] = running;
  __syncthreads();
  for (u32 w = 0; w < warp; w++) running += warp_totals[w];
  u32 above = (running - mine) & 0xFFFF, equal = (running - mine) >> 16;
#pragma unroll
  for (u32 n = 0; n < PER_THREAD; n++) {
    const u32 r = ranks[place_of(first + n)];
    if (r > prefix || (r == prefix && equal < wanted)) emit(above + min(equal, wanted), first + n);
    above += r > prefix;
    equal += r == prefix;
  }
}

// grid (chunks, rows); shared memory 4 * CHUNK bytes
extern "C" __global__ void __launch_bounds__(1024, 1) top_k(const __grid_constant__ TopKParams p) {
  wait_for_inputs();
  extern __shared__ u32 ranks[];
  const u64 row = blockIdx.y;
  const u32 n = p.positions ? (p.positions[row] + 1) / p.ratio : p.count;
  const u32 first = blockIdx.x * CHUNK;
  if (first > 0 && first >= n) return;
  const u32 count = min(n - first, CHUNK), k = min(p.k, count);
  const float* scores = p.scores + row * p.pitch + first;
  const bool is_last_step = n <= CHUNK || n <= p.k;
  u32* ids = is_last_step ? p.ids + row * p.k : p.part_ids + (row * p.chunks + blockIdx.x) * p.k;
  float* values = p.part_scores + (row * p.chunks + blockIdx.x) * p.k;
  if (is_last_step && blockIdx.x == 0 && threadIdx.x == 0) p.counts[row] = min(n, p.k);
  if (count <= k) {  // all of them
    for (u32 i = threadIdx.x; i < count; i += SELECT_THREADS) {
      ids[is_last_step ? first + i : i] = first + i;
      if (!is_last_step) values[i] = scores[i];
    }
    return;
  }
  auto value = [&](u32 i) { return scores[i]; };
  select(count, k, ranks, value, [&](u32 at, u32 i) {
    ids[at] = first + i;
    if (!is_last_step) values[at] = scores[i];
  });
}

// grid rows; shared memory 4 * CHUNK bytes
extern "C" __global__ void __launch_bounds__(1024, 1) top_k_merge(const __grid_constant__ TopKParams p) {
  wait_for_inputs();
  extern __shared__ u32 ranks[];
  const u64 row = blockIdx.x;
  const u32 n = p.positions ? (p.positions[row] + 1) / p.ratio : p.count;
  if (n <= CHUNK || n <= p.k) return;
  const u32 chunks = (n + CHUNK - 1) / CHUNK;
  // all chunks but the last are full, so their candidates stand side by side
  const u32 count = (chunks - 1) * p.k + min(p.k, n - (chunks - 1) * CHUNK);
  const float* scores = p.part_scores + row * p.chunks * p.k;
  const u32* from = p.part_ids + row * p.chunks * p.k;
  u32* ids = p.ids + row * p.k;
  if (threadIdx.x == 0) p.counts[row] = p.k;
  auto value = [&](u32 i) { return scores[i]; };
  select(count, p.k, ranks, value, [&](u32 at, u32 i) { ids[at] = from[i]; });
}
