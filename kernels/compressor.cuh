// Compressors up to the pooled entry, which the caller finishes: token rows pooled to entries
// (src/backend/cpu/compressor.rs), and the state behind the step.
//
// compress4: entry j pools the first-half channels of tokens 4j-4.. and the second-half ones of 4j..; a token before the
// step comes from the state. A block takes a token that completes an entry; others return at once. Behind the tokens' blocks
// there are four a sequence, one a slot of the new state. compress128: a running (max, sum, accumulator) per channel; a block takes the last token of
// a group within the step. 128 threads, DIM / 128 neighbouring channels each; compress128 pools with one channel a thread. The new state goes to pages of its own,
// never over the old one, which other blocks still read. Portable.
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

// finish(row, sequence, entry, channels of the thread)
template <int DIM, typename Finish>
__device__ __forceinline__ void compress4(const CompressParams& p, Finish finish) {
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
    __syncthreads();
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
  const u32 position = s.start + row - s.first_row;
  if (position % 4 != 3) return;
  state.open(p.state, index);
  __syncthreads();
  const u32 entry = position / 4, before = s.start / 4;
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
  finish(row, index, entry, pooled);
}

template <typename Finish>
__device__ __forceinline__ void compress128_rows(const CompressParams& p, Finish finish) {
  constexpr int DIM = HEAD_DIM, CH = DIM / THREADS, RATIO = 128;
  const u32 row = blockIdx.x, index = p.sequence[row];
  const Sequence s = p.sequences[index];
  const u32 position = s.start + row - s.first_row;
  const bool is_last = row + 1 == s.first_row + s.rows, completes = position % RATIO == RATIO - 1;
  if (!is_last && !completes) return;
  __shared__ State<NARROW_ROWS * ROW_BYTES, 3 * DIM> state, fresh;
  state.open(p.state, index);
  fresh.open(p.fresh, index);
  __syncthreads();
  const u32 c = threadIdx.x, group = position / RATIO * RATIO;
  const bool goes_on = group < s.start;
  float top = goes_on ? state[c] : minus_infinity();
  float sum = goes_on ? state[DIM + c] : 0.0f;
  float acc = goes_on ? state[2 * DIM + c] : 0.0f;
  constexpr u32 BATCH = 16;  // tokens that are on their way together
  for (u32 first = goes_on ? s.start : group; first <= position; first += BATCH) {
    float u[BATCH], g[BATCH];
#pragma unroll
    for (u32 i = 0; i < BATCH; i++) {
      const u32 q = first + i;
      if (q > position) continue;
      const u64 at = u64(s.first_row + q - s.start) * DIM + c;
      u[i] = p.u[at];
      g[i] = p.g[at] + p.ape[q % RATIO * DIM + c];
    }
#pragma unroll
    for (u32 i = 0; i < BATCH; i++) {
      if (first + i > position) continue;
      const bool rises = g[i] > top;
      const float e = expf(rises ? top - g[i] : g[i] - top);
      sum = rises ? sum * e + 1.0f : sum + e;
      acc = rises ? acc * e + u[i] : acc + e * u[i];
      top = rises ? g[i] : top;
    }
  }
  if (is_last) {
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
  for (int i = 0; i < CH; i++) mine[i] = pooled[threadIdx.x * CH + i];
  finish(row, index, position / RATIO, mine);
}
