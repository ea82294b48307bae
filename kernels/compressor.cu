// Compressors: token rows pooled to entries (compressor.cuh), then norm, rotation, quantisation and storing in the pages, in
// one launch (src/model/deepseek_v4/attention.rs). Portable.
#include "compressor.cuh"

// Norm, rotation and storing of an entry whose channels the threads hold, CH each.
template <int DIM>
__device__ __forceinline__ void finish(const CompressParams& p, float (&v)[DIM / THREADS], const float2* turns, u8* to) {
  constexpr int CH = DIM / THREADS;
  __shared__ float values[DIM];
  __shared__ float scratch[THREADS / 32];
  float squares = 0.0f;
#pragma unroll
  for (int c = 0; c < CH; c++) {
    v[c] = round_bf16(v[c]);
    squares += v[c] * v[c];
  }
  const float scale = 1.0f / sqrtf(block_sum<THREADS / 32>(squares, scratch) / float(DIM) + p.eps);
#pragma unroll
  for (int c = 0; c < CH; c++) {
    const int channel = threadIdx.x * CH + c;
    values[channel] = round_bf16(v[c] * scale * p.weight[channel]);
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x;
  if constexpr (DIM == HEAD_DIM) {
    float row[2][8];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < 8; j++) row[i][j] = values[i * 256 + lane * 8 + j];
    rotate_row(turns, row);
    store_row(to, row);
  } else {
    float key[4];
#pragma unroll
    for (int j = 0; j < 4; j++) key[j] = values[lane * 4 + j];
    rotate_index(turns, key);
    hadamard(key);
    store_key(to, key);
  }
}

// The finish of a compressor whose entries are stored `PER_PAGE` a page.
template <int DIM, u32 PER_PAGE>
struct Store {
  const CompressParams& p;
  __device__ __forceinline__ void operator()(u32 row, u32 sequence, u32 entry, float (&v)[DIM / THREADS]) const {
    constexpr u32 BYTES = DIM == HEAD_DIM ? ROW_BYTES : KEY_BYTES;
    finish<DIM>(p, v, p.turns + u64(row) * (ROPE_DIM / 2), p.entries.row(sequence, entry, PER_PAGE, BYTES));
  }
};

// grid rows + 4 * sequences
extern "C" __global__ void __launch_bounds__(THREADS, 4) compress4_main(const __grid_constant__ CompressParams p) {
  wait_for_inputs();
  compress4<HEAD_DIM>(p, Store<HEAD_DIM, PAGE_ROWS>{p});
}
extern "C" __global__ void __launch_bounds__(THREADS, 4) compress4_index(const __grid_constant__ CompressParams p) {
  wait_for_inputs();
  compress4<INDEX_DIM>(p, Store<INDEX_DIM, PAGE_ROWS>{p});
}

// grid rows, 512 threads
extern "C" __global__ void __launch_bounds__(HEAD_DIM) compress128(const __grid_constant__ CompressParams p) {
  wait_for_inputs();
  compress128_rows(p, Store<HEAD_DIM, NARROW_ROWS>{p});
}
