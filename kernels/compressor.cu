// Compressors: token rows pooled to entries (compressor.cuh), then norm, rotation, quantisation and storing in the pages, in
// one launch (src/model/deepseek_v4/attention.rs). Portable.
#include "compressor.cuh"

// Norm, rotation and storing of an entry in pages of `PER_PAGE`. What does not depend on the pooled entry is asked for before
// it is pooled, and not touched: to compute with a load is to wait for it.
template <int DIM, u32 PER_PAGE>
struct Store {
  static constexpr int CH = DIM / THREADS;  // channels of a thread
  const CompressParams& p;
  float weight[CH];
  float2 turn;  // lane `i` of a warp has rotation i
  u32 row, entry, page;

  __device__ __forceinline__ explicit Store(const CompressParams& p) : p(p) {}

  __device__ __forceinline__ void find(u32 row, u32 sequence, u32 entry) {
#pragma unroll
    for (int c = 0; c < CH; c++) weight[c] = p.weight[threadIdx.x * CH + c];
    this->row = row;
    this->entry = entry;
    page = p.entries.ids[u64(sequence) * p.entries.pitch + entry / PER_PAGE];
  }
  __device__ __forceinline__ void open() { turn = p.turns[u64(row) * (ROPE_DIM / 2) + threadIdx.x % 32]; }

  __device__ __forceinline__ void close(float (&v)[CH]) {
    __shared__ float values[DIM];
    __shared__ float2 turns[32];
    __shared__ float scratch[THREADS / 32];
    float squares = 0.0f;
#pragma unroll
    for (int c = 0; c < CH; c++) {
      v[c] = round_bf16(v[c]);
      squares += v[c] * v[c];
    }
    const float scale = 1.0f / sqrtf(block_sum<THREADS / 32>(squares, scratch) / float(DIM) + p.eps);
#pragma unroll
    for (int c = 0; c < CH; c++) values[threadIdx.x * CH + c] = round_bf16(v[c] * scale * weight[c]);
    if (threadIdx.x < 32) turns[threadIdx.x] = turn;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    const int lane = threadIdx.x;
    constexpr u32 BYTES = DIM == HEAD_DIM ? ROW_BYTES : KEY_BYTES;
    u8* to = p.entries.base + u64(page) * p.entries.page_bytes + entry % PER_PAGE * BYTES;
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
};

// grid rows + 4 * sequences
extern "C" __global__ void __launch_bounds__(THREADS, 4) compress4_main(const __grid_constant__ CompressParams p) {
  Store<HEAD_DIM, PAGE_ROWS> store(p);
  compress4<HEAD_DIM>(p, store);
}
extern "C" __global__ void __launch_bounds__(THREADS, 4) compress4_index(const __grid_constant__ CompressParams p) {
  Store<INDEX_DIM, PAGE_ROWS> store(p);
  compress4<INDEX_DIM>(p, store);
}

// grid sequences with one row each, else 2 * sequences + rows / 128, rounded up; 512 threads
extern "C" __global__ void __launch_bounds__(HEAD_DIM, 1) compress128(const __grid_constant__ CompressParams p) {
  Store<HEAD_DIM, NARROW_ROWS> store(p);
  compress128_groups(p, store);
}
