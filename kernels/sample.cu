// Tokens from logits (src/sampler): the highest, the k highest in order, and the whole chain of one draw.
//
// Choices are those of the CPU's sampler, bit for bit: weights are integers, so their sums are exact in any order; what
// comes before them is single IEEE operations in the CPU's order, never fused; ties go to the lower id. The host brings
// the random number.
//
// A block of 1024 threads has a row and passes over it a few times. Top-k and top-p keep the tokens above a key (logit,
// then lower id first): a guess, and halving where that was not it, narrows the range of keys until what lies within fits
// shared memory, where it is sorted. Which range was sorted does not show in the result. Portable.
#include "common.cuh"

constexpr u32 SAMPLE_THREADS = 1024, SAMPLE_WARPS = 32;
constexpr u32 LIST = 4096;    // keys that are sorted at once
constexpr u32 IN_FLIGHT = 8;  // loads of a thread

// A row of logits, and what turns them into weights.
struct Row {
  const float* logits;
  u32 count;
  float top;          // the highest
  float temperature;
  u32 one_bits;       // the highest has the weight 2^one_bits
};

__device__ __forceinline__ u64 key_of(float logit, u32 id) { return u64(rank_of(logit)) << 32 | (ALL - id); }
__device__ __forceinline__ u32 id_of(u64 key) { return ALL - u32(key); }
__device__ __forceinline__ float logit_of(u64 key) {
  const u32 rank = u32(key >> 32);
  return __uint_as_float(rank & 0x80000000u ? rank ^ 0x80000000u : ~rank);
}

// exp(x) for x <= 0 as in src/sampler/weights.rs
__device__ __forceinline__ float exp_of_negative(float x) {
  constexpr float ROUND = 12582912.0f;
  const float clamped = x > -80.0f ? x : -80.0f;
  const float shifted = __fadd_rn(__fmul_rn(clamped, 1.44269504088896340736f), ROUND);
  const float n = __fsub_rn(shifted, ROUND);
  const float r = __fsub_rn(__fsub_rn(clamped, __fmul_rn(n, 0.6933594f)), __fmul_rn(n, -2.1219444e-4f));
  float series = __fadd_rn(1.0f / 120.0f, __fmul_rn(r, 1.0f / 720.0f));
  series = __fadd_rn(1.0f / 24.0f, __fmul_rn(r, series));
  series = __fadd_rn(1.0f / 6.0f, __fmul_rn(r, series));
  series = __fadd_rn(0.5f, __fmul_rn(r, series));
  series = __fadd_rn(1.0f, __fmul_rn(r, series));
  series = __fadd_rn(1.0f, __fmul_rn(r, series));
  const u32 exponent = (__float_as_uint(shifted) & 0x7FFFFFu) - 0x400000u + 127u;
  return x > -80.0f ? __fmul_rn(series, __uint_as_float(exponent << 23)) : 0.0f;
}

__device__ __forceinline__ u64 weight_of(const Row& row, float logit) {
  const float below = __fsub_rn(logit, row.top);
  const u32 raw = __float_as_uint(exp_of_negative(row.temperature == 1.0f ? below : __fdiv_rn(below, row.temperature)));
  const u32 right = 127 - (raw >> 23) + 63 - row.one_bits;
  return right > 63 ? 0 : (u64((raw & 0x7FFFFFu) | 0x800000u) << 40) >> right;
}

// ---- over the block, for all threads ----

__device__ __forceinline__ u64 block_total(u64 v) {
  __shared__ u64 parts[SAMPLE_WARPS];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(ALL, v, step);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  v = parts[threadIdx.x % 32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(ALL, v, step);
  return v;
}

__device__ __forceinline__ u64 block_highest(u64 v) {
  __shared__ u64 parts[SAMPLE_WARPS];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v = max(v, __shfl_xor_sync(ALL, v, step));
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  v = parts[threadIdx.x % 32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v = max(v, __shfl_xor_sync(ALL, v, step));
  return v;
}

// sum of the threads in front
__device__ __forceinline__ u64 block_before(u64 v) {
  __shared__ u64 parts[SAMPLE_WARPS];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u64 running = v;
#pragma unroll
  for (u32 step = 1; step < 32; step *= 2) {
    const u64 other = __shfl_up_sync(ALL, running, step);
    if (lane >= step) running += other;
  }
  __syncthreads();
  if (lane == 31) parts[warp] = running;
  __syncthreads();
  for (u32 w = 0; w < warp; w++) running += parts[w];
  return running - v;
}

// ---- over a row ----

// Calls f(id, logit) for first, first + stride, .. below `end`.
template <class F>
__device__ __forceinline__ void each(const float* logits, u32 first, u32 stride, u32 end, F f) {
  for (u32 at = first; at < end; at += IN_FLIGHT * stride) {
    float v[IN_FLIGHT];
#pragma unroll
    for (u32 n = 0; n < IN_FLIGHT; n++) v[n] = at + n * stride < end ? logits[at + n * stride] : 0.0f;
#pragma unroll
    for (u32 n = 0; n < IN_FLIGHT; n++)
      if (at + n * stride < end) f(at + n * stride, v[n]);
  }
}

template <class F>
__device__ __forceinline__ void each(const Row& row, F f) {
  each(row.logits, threadIdx.x, SAMPLE_THREADS, row.count, f);
}

constexpr u32 IS_BAD = 1, IS_LOW = 2;  // NaN or plus infinity, minus infinity

// The highest key of the row, the thread's own highest in `mine`, and in `flags` what was met.
__device__ __forceinline__ u64 highest(const Row& row, u64& mine, u32& flags) {
  u64 best = 0;
  u32 seen = 0;
  each(row, [&](u32 id, float v) {
    if (magnitude_bits(v) >= 0x7F800000u) seen |= v == minus_infinity() ? IS_LOW : IS_BAD;
    best = max(best, key_of(v, id));
  });
  mine = best;
  flags = (__syncthreads_or(seen & IS_BAD) ? IS_BAD : 0) | (__syncthreads_or(seen & IS_LOW) ? IS_LOW : 0);
  return block_highest(best);
}

// Sorts `count` keys, at most LIST, falling; behind them are zeros up to the next power of two, which it returns.
__device__ __forceinline__ u32 sort(u64* list, u32 count) {
  u32 size = 2;
  while (size < count) size *= 2;
  for (u32 i = count + threadIdx.x; i < size; i += SAMPLE_THREADS) list[i] = 0;
  __syncthreads();
  for (u32 run = 2; run <= size; run *= 2)
    for (u32 step = run / 2; step > 0; step /= 2) {
      for (u32 i = threadIdx.x; i < size / 2; i += SAMPLE_THREADS) {
        const u32 a = i / step * 2 * step + i % step, b = a + step;
        const u64 x = list[a], y = list[b];
        if ((x < y) == ((a & run) == 0)) {
          list[a] = y;
          list[b] = x;
        }
      }
      __syncthreads();
    }
  return size;
}

// Sorts the keys of [low, high) that count, at most LIST.
template <class Measure>
__device__ __forceinline__ u32 gather(const Row& row, u64 low, u64 high, u64* list, Measure measure) {
  __shared__ u32 listed;
  __syncthreads();
  if (threadIdx.x == 0) listed = 0;
  __syncthreads();
  each(row, [&](u32 id, float v) {
    const u64 key = key_of(v, id);
    if (key >= low && key < high && measure(v) > 0) list[atomicAdd(&listed, 1u)] = key;  // in any order
  });
  __syncthreads();
  return sort(list, listed);
}

// The key at which the summed measures of the keys from `low` on, highest first, reach `target`; 0 if they do not.
// `most` bounds how many count, `guess` is where to look first. The list is scratch.
template <class Measure>
__device__ __forceinline__ u64 find_cut(const Row& row, u64 low, u64 guess, u64 target, u32 most, u64* list,
                                        Measure measure) {
  u64 high = ~0ull, above = 0, middle = guess;
  for (u32 probe = 0; most > LIST; probe++) {
    u64 sum = 0, members = 0;
    each(row, [&](u32 id, float v) {
      const u64 key = key_of(v, id);
      if (key < middle || key >= high) return;
      const u64 m = measure(v);
      sum += m;
      members += m > 0;
    });
    sum = block_total(sum);
    members = block_total(members);
    const bool reaches = above + sum >= target;
    if (reaches) {
      low = middle;
      most = u32(members);
    } else {
      if (middle == low) return 0;
      high = middle;
      above += sum;
      most -= u32(members);
    }
    // after a wrong guess: how many there are at all
    middle = probe == 0 && !reaches ? low : low + (high - low) / 2;
  }
  const u32 size = gather(row, low, high, list, measure);
  const u32 share = (size + SAMPLE_THREADS - 1) / SAMPLE_THREADS, first = threadIdx.x * share;
  __shared__ u64 cut;
  if (threadIdx.x == 0) cut = 0;
  u64 mine = 0;
  for (u32 i = first; i < min(first + share, size); i++) mine += list[i] ? measure(logit_of(list[i])) : 0;
  u64 running = above + block_before(mine);
  for (u32 i = first; i < min(first + share, size); i++) {
    const u64 m = list[i] ? measure(logit_of(list[i])) : 0;
    if (running < target && running + m >= target) cut = list[i];
    running += m;
  }
  __syncthreads();
  return cut;
}

// A key that at least k keys reach, if k <= 1024: the k-th of the threads' own highest, which are disjoint.
__device__ __forceinline__ u64 guess_top_k(u64 mine, u32 k, u64* list) {
  list[threadIdx.x] = mine;
  sort(list, SAMPLE_THREADS);
  const u64 guess = list[min(k, SAMPLE_THREADS) - 1];
  __syncthreads();
  return guess;
}

struct ArgmaxParams {
  const float* logits;  // [rows, count]
  u32* ids;             // [rows] highest logit, ties to the lower id; all ones if a logit is NaN or infinite
  float* values;        // [rows] that logit
  u32 count;
};

// grid rows
extern "C" __global__ void __launch_bounds__(1024) argmax(const __grid_constant__ ArgmaxParams p) {
  wait_for_inputs();
  Row row = {p.logits + u64(blockIdx.x) * p.count, p.count};
  u64 mine;
  u32 flags;
  const u32 id = id_of(highest(row, mine, flags));
  if (threadIdx.x > 0) return;
  p.ids[blockIdx.x] = flags ? ALL : id;
  p.values[blockIdx.x] = row.logits[id];
}

struct TopLogitsParams {
  const float* logits;  // [rows, count]
  u32* ids;             // [rows, k] highest first, ties to the lower id; all ones if a logit is NaN or infinite, and
                        // behind the last
  float* values;        // [rows, k] those logits; not written where the id is all ones
  u32 count;
  u32 k;  // at most 1024
};

// grid rows
extern "C" __global__ void __launch_bounds__(1024) top_logits(const __grid_constant__ TopLogitsParams p) {
  wait_for_inputs();
  __shared__ u64 list[LIST];
  Row row = {p.logits + u64(blockIdx.x) * p.count, p.count};
  u64 mine;
  u32 flags;
  highest(row, mine, flags);
  u32 size = 0;
  if (!flags) {
    auto one = [](float) { return u64(1); };
    const u64 guess = guess_top_k(mine, p.k, list);
    const u64 cut = find_cut(row, 0, guess, p.k, p.count, list, one);
    size = gather(row, cut, ~0ull, list, one);
  }
  for (u32 i = threadIdx.x; i < p.k; i += SAMPLE_THREADS) {
    const u64 key = i < size ? list[i] : 0;
    const u64 at = u64(blockIdx.x) * p.k + i;
    p.ids[at] = key ? id_of(key) : ALL;
    if (key) p.values[at] = row.logits[id_of(key)];
  }
}

// A change of one logit before the choice: the penalties of an accepted token, then its bias.
struct Edit {
  u32 id;
  float repetition;
  float subtract;
  float add;
};

// One choice, as src/sampler/draw.rs describes it.
struct Draw {
  u64 random;
  u64 min_weight;  // of a candidate, at least 1
  float temperature;
  float top_p;  // 1 keeps all
  u32 top_k;    // 0 keeps all
  u32 one_bits;
  u32 greedy;
  u32 row;  // of the logits
  u32 first_edit;
  u32 edits;
};

struct SampleParams {
  float* logits;      // [rows, count]; rows that are drawn from are changed by their edits
  const Draw* draws;  // [grid]
  const Edit* edits;
  u32* tokens;  // [grid]; all ones where the CPU's sampler finds an error
  u32 count;
};

// The token that the random number means among those that have a key from `cut` on and at least `min_weight`.
__device__ __forceinline__ u32 draw_token(const Row& row, u64 cut, u64 min_weight, u64 random) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  auto weight = [&](u32 id, float v) {
    const u64 w = key_of(v, id) >= cut ? weight_of(row, v) : 0;
    return w >= min_weight ? w : 0;
  };
  // a warp has neighbouring ids, then the block those of the warp that is drawn
  const u32 share = (row.count + SAMPLE_WARPS - 1) / SAMPLE_WARPS;
  const u32 begin = min(warp * share, row.count), end = min(begin + share, row.count);
  u64 sum = 0;
  each(row.logits, begin + lane, 32, end, [&](u32 id, float v) { sum += weight(id, v); });
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
  const u64 left = __umul64hi(random, block_total(lane == 0 ? sum : 0));
  const u64 before = block_before(lane == 0 ? sum : 0);
  __shared__ u64 before_drawn;
  __shared__ u32 drawn, token;
  __syncthreads();
  if (lane == 0 && before <= left && left - before < sum) {
    before_drawn = before;
    drawn = warp;
  }
  if (threadIdx.x == 0) token = ALL;
  __syncthreads();
  const u32 part_begin = drawn * share, part_end = min(part_begin + share, row.count);
  const u32 own = (share + SAMPLE_THREADS - 1) / SAMPLE_THREADS;
  const u32 first = min(part_begin + threadIdx.x * own, part_end), last = min(first + own, part_end);
  u64 mine = 0;
  for (u32 id = first; id < last; id++) mine += weight(id, row.logits[id]);
  u64 running = before_drawn + block_before(mine);
  for (u32 id = first; id < last; id++) {
    const u64 w = weight(id, row.logits[id]);
    if (running <= left && left - running < w) token = id;
    running += w;
  }
  __syncthreads();
  return token;
}

// grid draws
extern "C" __global__ void __launch_bounds__(1024) sample(const __grid_constant__ SampleParams p) {
  wait_for_inputs();
  __shared__ u64 list[LIST];
  const Draw& draw = p.draws[blockIdx.x];
  float* logits = p.logits + u64(draw.row) * p.count;
  for (u32 i = threadIdx.x; i < draw.edits; i += SAMPLE_THREADS) {
    const Edit e = p.edits[draw.first_edit + i];
    float v = logits[e.id];
    if (v != minus_infinity()) {
      v = v > 0.0f ? __fdiv_rn(v, e.repetition) : __fmul_rn(v, e.repetition);
      v = __fsub_rn(v, e.subtract);
    }
    logits[e.id] = __fadd_rn(v, e.add);
  }
  __syncthreads();

  Row row = {logits, p.count, 0.0f, draw.temperature, draw.one_bits};
  u64 mine;
  u32 flags;
  const u64 best = highest(row, mine, flags);
  row.top = logit_of(best);
  if ((flags & IS_BAD) || row.top == minus_infinity() || draw.greedy) {
    if (threadIdx.x == 0) p.tokens[blockIdx.x] = (flags & IS_BAD) || row.top == minus_infinity() ? ALL : id_of(best);
    return;
  }
  auto weight = [&](float v) { return weight_of(row, v); };
  u64 cut = 0;
  if (draw.top_k > 0) {
    const u64 guess = guess_top_k(mine, draw.top_k, list);
    cut = find_cut(row, 0, guess, draw.top_k, p.count, list, [&](float v) { return u64(weight_of(row, v) > 0); });
  }
  if (draw.top_p < 1.0f) {
    u64 total = 0;
    each(row, [&](u32 id, float v) { total += key_of(v, id) >= cut ? weight_of(row, v) : 0; });
    total = block_total(total);
    const u64 target = min(max(u64(ceil(__dmul_rn(double(draw.top_p), __ull2double_rn(total)))), u64(1)), total);
    // tokens below a mean share of what may be dropped weigh less than that together
    const float floor = (1.0f - draw.top_p) * float(total) / float(p.count) * 0.99f;
    const float share = max(floor, 1.0f) / float(1ull << draw.one_bits);
    const u64 guess = u64(rank_of(row.top + row.temperature * logf(share))) << 32;
    cut = find_cut(row, cut, max(guess, cut), target, cut ? draw.top_k : p.count, list, weight);
  }
  const u64 least = cut ? max(draw.min_weight, weight_of(row, logit_of(cut))) : draw.min_weight;
  const u32 token = draw_token(row, cut, least, draw.random);
  if (threadIdx.x == 0) p.tokens[blockIdx.x] = token;
}
