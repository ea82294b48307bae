// Compressors up to the pooled entry, which the caller finishes: token rows pooled to entries
// (src/backend/cpu/compressor.rs), and the state behind the step.
//
// compress4: entry j pools the first-half channels of tokens 4j-4.. and the second-half ones of 4j..; a token before the
// step comes from the state. A block takes a token that completes an entry; others return at once. Behind the tokens' blocks
// there are four a sequence, one a slot of the new state; 128 threads, DIM / 128 neighbouring channels each. compress128: a
// running (max, sum, accumulator) per channel; a block takes a group of 128 tokens, or what the step has of it, and pools with
// one channel a thread. The new state goes to pages of its own, never over the old one, which other blocks still read.
// Tables of the step, which no kernel writes, are read before the kernel in front has ended. Portable.
#pragma once
#include "rows.cuh"

struct CompressParams {
  const float* u;             // [rows, width] values; width is 2 DIM for ratio 4, DIM for ratio 128
  const float* g;             // [rows, width] gates
  const float* ape;           // [ratio, width] added to the gates
  const float* weight;        // [DIM] of the norm
  const float2* turns;        // [rows, 32] of the position of the entry that a row completes
  const u32* sequence;        // [rows]
  const Sequence* sequences;  // [sequences]
  Pages entries;              // where entry j goes
  Pages state;                // before the step
  Pages fresh;                // after it
  u32 count;                  // sequences
  float eps;
};

constexpr int THREADS = 128;

// A compressor's state runs over the pages of its bucket in order; their addresses are looked up once a block.
template <u32 PAGE_BYTES, u32 FLOATS>
struct State {
  static constexpr u32 PER_PAGE = PAGE_BYTES / 4, PAGES = (FLOATS + PER_PAGE - 1) / PER_PAGE;
  u8* pages[PAGES];

  __device__ __forceinline__ void open(const Pages& table, u32 sequence) {
    if (threadIdx.x < PAGES) pages[threadIdx.x] = table.page(sequence, threadIdx.x);
  }
  __device__ __forceinline__ float& operator[](u32 i) const {
    return reinterpret_cast<float*>(pages[i / PER_PAGE])[i % PER_PAGE];
  }
};

// State of ratio 4, in this order: first halves of the previous group (u, g), both halves of the current one (u, g).
template <int DIM>
struct State4 {
  static __device__ __forceinline__ u32 previous(u32 gate, u32 slot, u32 c) { return (gate * 4 + slot) * DIM + c; }
  static __device__ __forceinline__ u32 current(u32 gate, u32 slot, u32 c) {
    return 8 * DIM + (gate * 4 + slot) * 2 * DIM + c;
  }
};

// `finish` takes an entry: find(row, sequence, entry) from tables and weights alone, open() before it is pooled, then
// close(channels of the thread).
template <int DIM, typename Finish>
__device__ __forceinline__ void compress4(const CompressParams& p, Finish& finish) {
  constexpr int CH = DIM / THREADS, WIDTH = 2 * DIM;
  const u32 first_channel = threadIdx.x * CH;
  constexpr u32 PAGE_BYTES = PAGE_ROWS * (DIM == HEAD_DIM ? ROW_BYTES : KEY_BYTES);
  __shared__ State<PAGE_BYTES, 24 * DIM> state, fresh;
  // value and gate of column c of the token at position q, which is in the step
  auto take = [&](const Sequence& s, u32 q, u32 c, float& u, float& g) {
    const u64 at = u64(s.first_row + q - s.start) * WIDTH + c;
    u = p.u[at];
    g = p.g[at] + p.ape[q % 4 * WIDTH + c];
  };

  const u32 rows = gridDim.x - 4 * p.count;
  if (blockIdx.x >= rows) {  // slot of the new state
    const u32 index = (blockIdx.x - rows) / 4, slot = (blockIdx.x - rows) % 4;
    state.open(p.state, index);
    fresh.open(p.fresh, index);
    const Sequence s = p.sequences[index];
    wait_for_inputs();
    __syncthreads();
    if (s.rows == 0) return;  // idle: there is no state
    const u32 end = s.start + s.rows;
    const u32 back = (end + 3 - slot) % 4;  // tokens from the last one of this slot to the last one of all
    const bool fresh_current = back < s.rows;
    const bool moves = end / 4 > s.start / 4;
    const u32 group = end / 4 * 4 - 4 + slot;  // its token in the last complete group
#pragma unroll
    for (int i = 0; i < CH; i++) {
      const u32 c = first_channel + i;
      float u, g;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const u32 at = half * DIM + c;
        if (fresh_current) {
          take(s, end - 1 - back, at, u, g);
        } else {
          u = state[State4<DIM>::current(0, slot, at)];
          g = state[State4<DIM>::current(1, slot, at)];
        }
        fresh[State4<DIM>::current(0, slot, at)] = u;
        fresh[State4<DIM>::current(1, slot, at)] = g;
      }
      if (!moves) {
        u = state[State4<DIM>::previous(0, slot, c)];
        g = state[State4<DIM>::previous(1, slot, c)];
      } else if (group >= s.start) {
        take(s, group, c, u, g);
      } else {
        u = state[State4<DIM>::current(0, slot, c)];
        g = state[State4<DIM>::current(1, slot, c)];
      }
      fresh[State4<DIM>::previous(0, slot, c)] = u;
      fresh[State4<DIM>::previous(1, slot, c)] = g;
    }
    return;
  }

  const u32 row = blockIdx.x, index = p.sequence[row];
  const Sequence s = p.sequences[index];
  const u32 position = s.start + row - s.first_row, entry = position / 4;
  const bool completes = position % 4 == 3;
  if (completes) {
    state.open(p.state, index);
    finish.find(row, index, entry);
  }
  wait_for_inputs();
  if (!completes) return;
  __syncthreads();
  const u32 before = s.start / 4;
  finish.open();
  float pooled[CH];
#pragma unroll
  for (int i = 0; i < CH; i++) {
    const u32 c = first_channel + i;
    float u[8], g[8];
#pragma unroll
    for (u32 slot = 0; slot < 4; slot++) {
      const u32 q = entry * 4 - 4 + slot;  // wraps for entry 0, which takes the initial state
      if (entry > before && q >= s.start) {
        take(s, q, c, u[slot], g[slot]);
      } else if (entry > before) {
        u[slot] = state[State4<DIM>::current(0, slot, c)];
        g[slot] = state[State4<DIM>::current(1, slot, c)];
      } else {
        u[slot] = state[State4<DIM>::previous(0, slot, c)];
        g[slot] = state[State4<DIM>::previous(1, slot, c)];
      }
      if (entry * 4 + slot >= s.start) {
        take(s, entry * 4 + slot, DIM + c, u[4 + slot], g[4 + slot]);
      } else {
        u[4 + slot] = state[State4<DIM>::current(0, slot, DIM + c)];
        g[4 + slot] = state[State4<DIM>::current(1, slot, DIM + c)];
      }
    }
    float top = minus_infinity(), sum = 0.0f, acc = 0.0f;
#pragma unroll
    for (int k = 0; k < 8; k++) top = g[k] > top ? g[k] : top;
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const float e = expf(g[k] - top);
      sum += e;
      acc += e * u[k];
    }
    pooled[i] = acc / sum;
  }
  finish.close(pooled);
}

// Blocks of a step: the first group of each sequence, then the last of each, then the group that the step has whole around
// each 128th row, which no other block takes. With one row a sequence the first ones are enough.
struct Group {
  static constexpr u32 RATIO = 128;
  Sequence s;
  u32 sequence, index;  // of the sequence in the step, of the group in the sequence
  bool is_last;

  // false where a block has none
  __device__ __forceinline__ bool open(const CompressParams& p) {
    const u32 b = blockIdx.x, row = b < 2 * p.count ? 0 : (b - 2 * p.count) * RATIO;
    sequence = b < 2 * p.count ? b % p.count : p.sequence[row];
    s = p.sequences[sequence];
    const u32 first = s.start / RATIO, last = (s.start + s.rows - 1) / RATIO;
    index = b < p.count ? first : b < 2 * p.count ? last : (s.start + row - s.first_row) / RATIO;
    is_last = index == last;
    if (s.rows == 0) return false;  // idle
    return b < p.count || (b < 2 * p.count ? first < last : first < index && index < last);
  }
  __device__ __forceinline__ u32 row(u32 position) const { return s.first_row + position - s.start; }
};

template <typename Finish>
__device__ __forceinline__ void compress128_groups(const CompressParams& p, Finish& finish) {
  constexpr int DIM = HEAD_DIM, CH = DIM / THREADS, RATIO = Group::RATIO;
  Group group;
  if (!group.open(p)) return wait_for_inputs();
  __shared__ State<NARROW_ROWS * ROW_BYTES, 3 * DIM> state, fresh;
  state.open(p.state, group.sequence);
  fresh.open(p.fresh, group.sequence);
  const u32 first = max(group.index * RATIO, group.s.start);
  const u32 end = min(group.index * RATIO + RATIO, group.s.start + group.s.rows);
  const bool goes_on = first % RATIO != 0, completes = end % RATIO == 0;
  const bool finishes = completes && threadIdx.x < THREADS;
  if (finishes) finish.find(group.row(end - 1), group.sequence, group.index);
  wait_for_inputs();
  if (finishes) finish.open();
  __syncthreads();
  const u32 c = threadIdx.x;
  float top = goes_on ? state[c] : minus_infinity();
  float sum = goes_on ? state[DIM + c] : 0.0f;
  float acc = goes_on ? state[2 * DIM + c] : 0.0f;
  auto feed = [&](float u, float g) {
    const bool rises = g > top;
    const float e = expf(rises ? top - g : g - top);
    sum = rises ? sum * e + 1.0f : sum + e;
    acc = rises ? acc * e + u : acc + e * u;
    top = rises ? g : top;
  };
  const float* u = p.u + u64(group.row(first)) * DIM + c;
  const float* g = p.g + u64(group.row(first)) * DIM + c;
  const float* ape = p.ape + first % RATIO * DIM + c;
  const u32 tokens = end - first;
  constexpr u32 BATCH = 16;  // tokens that are on their way together; nothing may stand between their loads
  u32 i = 0;
  for (; i + BATCH <= tokens; i += BATCH) {
    float value[BATCH], gate[BATCH], add[BATCH];
#pragma unroll
    for (u32 j = 0; j < BATCH; j++) {
      value[j] = u[(i + j) * DIM];
      gate[j] = g[(i + j) * DIM];
      add[j] = ape[(i + j) * DIM];
    }
#pragma unroll
    for (u32 j = 0; j < BATCH; j++) feed(value[j], gate[j] + add[j]);
  }
  for (; i < tokens; i++) feed(u[i * DIM], g[i * DIM] + ape[i * DIM]);
  if (group.is_last) {
    fresh[c] = completes ? minus_infinity() : top;
    fresh[DIM + c] = completes ? 0.0f : sum;
    fresh[2 * DIM + c] = completes ? 0.0f : acc;
  }
  if (!completes) return;
  __shared__ float pooled[DIM];
  pooled[c] = acc / sum;
  __syncthreads();
  if (threadIdx.x >= THREADS) return;
  float mine[CH];
#pragma unroll
  for (int k = 0; k < CH; k++) mine[k] = pooled[threadIdx.x * CH + k];
  finish.close(mine);
}
