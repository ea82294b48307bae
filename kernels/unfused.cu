// The work of the fused kernels as separate ones, for measuring and checking: no step uses them.
//
// What fusing is worth is measured against these, and the bits must be the same (src/backend/cuda/check). Values go through
// memory as bfloat16, as the fused kernels round them. One warp a row, 8 a block, where not said otherwise. Portable.
#include "compressor.cuh"

struct PoolParams {
  CompressParams compress;
  u16* pooled;  // [rows, DIM] bf16; rows that complete no entry are left alone
};

// The finish of a compressor that leaves the pooled entry in memory.
template <int DIM>
struct Keep {
  u16 *all, *to = nullptr;  // the entries of all rows, and its own
  __device__ __forceinline__ void find(u32 row, u32, u32) { to = all + u64(row) * DIM; }
  __device__ __forceinline__ void open() const {}
  __device__ __forceinline__ void close(float (&v)[DIM / THREADS]) {
    if constexpr (DIM == HEAD_DIM)
      reinterpret_cast<uint2*>(to)[threadIdx.x] = make_uint2(bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]));
    else
      to[threadIdx.x] = bf16_bits(v[0]);
  }
};

// Pooling and the new state; grids as of the fused kernels.
extern "C" __global__ void __launch_bounds__(THREADS, 4) pool4_main(const __grid_constant__ PoolParams p) {
  Keep<HEAD_DIM> keep{p.pooled};
  compress4<HEAD_DIM>(p.compress, keep);
}
extern "C" __global__ void __launch_bounds__(THREADS, 4) pool4_index(const __grid_constant__ PoolParams p) {
  Keep<INDEX_DIM> keep{p.pooled};
  compress4<INDEX_DIM>(p.compress, keep);
}
extern "C" __global__ void __launch_bounds__(HEAD_DIM, 1) pool128(const __grid_constant__ PoolParams p) {
  Keep<HEAD_DIM> keep{p.pooled};
  compress128_groups(p.compress, keep);
}

struct RowsParams {
  u16* x;                     // [rows, heads, width] bf16, in place
  const float* weight;        // [width] of the norm, or null
  const float2* turns;        // [rows, 32]
  const u32* chosen;          // [count] rows that are taken, or null: the first `count`
  u8* staged;                 // [rows, ROW_BYTES] where rows go, or null: to the pages
  const u32* sequence;        // [rows]
  const Sequence* sequences;  // [sequences]
  Pages entries;
  u32 count;
  u32 heads;
  u32 width;     // 512 or 128
  u32 ratio;     // tokens of an entry
  u32 stepwise;  // the norm rounds each step
  u32 back;      // rotate by the opposite angle
  float eps;
};

// Row `i` of all heads, if there is one.
struct Item {
  u32 row;
  u16* x;

  __device__ __forceinline__ bool open(const RowsParams& p, u32 i) {
    if (i >= p.count * p.heads) return false;
    row = p.chosen ? p.chosen[i / p.heads] : i / p.heads;
    x = p.x + (u64(row) * p.heads + i % p.heads) * p.width;
    return true;
  }
  // where its entry of `bytes` bytes goes
  __device__ __forceinline__ u8* entry(const RowsParams& p, u32 per_page, u32 bytes) const {
    const u32 index = p.sequence[row];
    const Sequence s = p.sequences[index];
    return p.entries.row(index, (s.start + row - s.first_row) / p.ratio, per_page, bytes);
  }
};

__device__ __forceinline__ u32 warp_index() { return blockIdx.x * 8 + threadIdx.x / 32; }

// Heads and window rows, as in `insert`.
extern "C" __global__ void __launch_bounds__(256) norm_heads(const __grid_constant__ RowsParams p) {
  wait_for_inputs();
  Item item;
  if (!item.open(p, warp_index())) return;
  float v[2][8];
  load_row(item.x, v);
  norm_row(p.weight, p.eps, p.stepwise, v);
#pragma unroll
  for (int i = 0; i < 2; i++) reinterpret_cast<uint4*>(item.x)[i * 32 + threadIdx.x % 32] = pack8(v[i]);
}

// Pooled entries, summed in the order of `Store` in compressor.cu.
template <int DIM>
__device__ __forceinline__ void norm_entry(const RowsParams& p) {
  constexpr int CH = DIM / 128;
  Item item;
  if (!item.open(p, warp_index())) return;
  const int lane = threadIdx.x % 32;
  float v[4][CH], sum = 0.0f;
#pragma unroll
  for (int w = 0; w < 4; w++) {
    if constexpr (CH == 4) {
      const uint2 pairs = reinterpret_cast<const uint2*>(item.x)[w * 32 + lane];
      v[w][0] = low_value(pairs.x), v[w][1] = high_value(pairs.x);
      v[w][2] = low_value(pairs.y), v[w][3] = high_value(pairs.y);
    } else {
      v[w][0] = bf16_value(item.x[w * 32 + lane]);
    }
    float squares = 0.0f;
#pragma unroll
    for (int c = 0; c < CH; c++) squares += v[w][c] * v[w][c];
    sum += warp_sum(squares);
  }
  const float scale = 1.0f / sqrtf(sum / float(DIM) + p.eps);
#pragma unroll
  for (int w = 0; w < 4; w++) {
    const float* weight = p.weight + (w * 32 + lane) * CH;
    if constexpr (CH == 4) {
      const float4 m = *reinterpret_cast<const float4*>(weight);
      const u32 low = bf16_pair(v[w][0] * scale * m.x, v[w][1] * scale * m.y);
      const u32 high = bf16_pair(v[w][2] * scale * m.z, v[w][3] * scale * m.w);
      reinterpret_cast<uint2*>(item.x)[w * 32 + lane] = make_uint2(low, high);
    } else {
      item.x[w * 32 + lane] = bf16_bits(v[w][0] * scale * *weight);
    }
  }
}
extern "C" __global__ void __launch_bounds__(256) norm_entries(const __grid_constant__ RowsParams p) {
  wait_for_inputs();
  if (p.width == HEAD_DIM)
    norm_entry<HEAD_DIM>(p);
  else
    norm_entry<INDEX_DIM>(p);
}

// The last 64 values of each row, 8 a thread; 32 rows a block.
extern "C" __global__ void __launch_bounds__(256) rotate_heads(const __grid_constant__ RowsParams p) {
  wait_for_inputs();
  Item item;
  if (!item.open(p, blockIdx.x * 32 + threadIdx.x / 8)) return;
  const u32 part = threadIdx.x % 8;
  uint4* x = reinterpret_cast<uint4*>(item.x + p.width - ROPE_DIM) + part;
  const float4* turns = reinterpret_cast<const float4*>(p.turns + u64(item.row) * (ROPE_DIM / 2)) + part * 2;
  const float4 a = turns[0], b = turns[1];
  const float sign = p.back ? -1.0f : 1.0f;
  float v[8];
  unpack8(*x, v);
  rotate(make_float2(a.x, a.y * sign), v[0], v[1]);
  rotate(make_float2(a.z, a.w * sign), v[2], v[3]);
  rotate(make_float2(b.x, b.y * sign), v[4], v[5]);
  rotate(make_float2(b.z, b.w * sign), v[6], v[7]);
  *x = pack8(v);
}

// Quantises rows of 512 and stores them where they go.
extern "C" __global__ void __launch_bounds__(256) store_rows(const __grid_constant__ RowsParams p) {
  wait_for_inputs();
  Item item;
  if (!item.open(p, warp_index())) return;
  float v[2][8];
  load_row(item.x, v);
  const u32 per_page = p.ratio == 128 ? NARROW_ROWS : PAGE_ROWS;
  store_row(p.staged ? p.staged + u64(item.row) * ROW_BYTES : item.entry(p, per_page, ROW_BYTES), v);
}

__device__ __forceinline__ void load_key(const u16* x, float (&v)[4]) {
  const uint2 pairs = reinterpret_cast<const uint2*>(x)[threadIdx.x % 32];
  v[0] = low_value(pairs.x), v[1] = high_value(pairs.x);
  v[2] = low_value(pairs.y), v[3] = high_value(pairs.y);
}

extern "C" __global__ void __launch_bounds__(256) hadamard_keys(const __grid_constant__ RowsParams p) {
  wait_for_inputs();
  Item item;
  if (!item.open(p, warp_index())) return;
  float v[4];
  load_key(item.x, v);
  hadamard(v);
  reinterpret_cast<uint2*>(item.x)[threadIdx.x % 32] = make_uint2(bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]));
}

// Quantises keys of 128 and stores them in their pages.
extern "C" __global__ void __launch_bounds__(256) store_keys(const __grid_constant__ RowsParams p) {
  wait_for_inputs();
  Item item;
  if (!item.open(p, warp_index())) return;
  float v[4];
  load_key(item.x, v);
  store_key(item.entry(p, PAGE_ROWS, KEY_BYTES), v);
}
