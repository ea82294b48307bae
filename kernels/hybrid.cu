// Experts that are shared out between the device and the host (src/engine/gpu/host.rs). Portable.
//
// Assignments to experts that are not here become nobody's before they are grouped (kernels/moe.cu), so their places lie
// behind all others, in order of assignment. The host writes their outputs there, and the sum takes a token's experts in
// order of id, wherever they were computed.
#include "common.cuh"

constexpr int MAX_TOP_K = 16;

struct DivideParams {
  const u32* ids;  // [count] expert of each assignment
  const u8* here;  // [experts] 1 where the device has the expert's weights
  u32* own;        // [count] the same, with `experts` for those that are not here
  u32 count;
  u32 experts;
};

// grid count / 256
extern "C" __global__ void __launch_bounds__(256) divide(const __grid_constant__ DivideParams p) {
  wait_for_inputs();
  const u32 i = blockIdx.x * 256 + threadIdx.x;
  if (i >= p.count) return;
  const u32 id = p.ids[i];
  p.own[i] = id < p.experts && p.here[id] ? id : p.experts;
}

struct CombineAllParams {
  const u16* routed;  // [places, width] bf16
  const u16* shared;  // [tokens, width] bf16
  const u32* ids;     // [tokens, top_k] expert of each assignment; `experts` and above: nobody's
  const u32* places;  // [tokens, top_k] place of each assignment
  u16* out;           // [tokens, width] bf16
  u32 width;
  u32 top_k;
  u32 experts;
  u32 pad;
};

// grid tokens
extern "C" __global__ void __launch_bounds__(256) combine_all(const __grid_constant__ CombineAllParams p) {
  wait_for_inputs();
  __shared__ u32 sorted[MAX_TOP_K];
  __shared__ u32 counted;
  const u64 token = blockIdx.x;
  if (threadIdx.x == 0) counted = 0;
  __syncthreads();
  if (threadIdx.x < p.top_k) {
    const u32* ids = p.ids + token * p.top_k;
    const u32 mine = ids[threadIdx.x];
    u32 rank = 0;
    for (u32 i = 0; i < p.top_k; i++) rank += ids[i] < mine || (ids[i] == mine && i < threadIdx.x);
    sorted[rank] = p.places[token * p.top_k + threadIdx.x];
    if (mine < p.experts) atomicAdd(&counted, 1u);
  }
  __syncthreads();
  const u32 count = counted;
  for (u32 g = threadIdx.x; g < p.width / 8; g += 256) {
    float sum[8] = {}, v[8];
    for (u32 i = 0; i < count; i++) {
      unpack8(reinterpret_cast<const uint4*>(p.routed + u64(sorted[i]) * p.width)[g], v);
#pragma unroll
      for (int j = 0; j < 8; j++) sum[j] += v[j];
    }
    unpack8(reinterpret_cast<const uint4*>(p.shared + token * p.width)[g], v);
#pragma unroll
    for (int j = 0; j < 8; j++) sum[j] += v[j];
    reinterpret_cast<uint4*>(p.out + token * p.width)[g] = pack8(sum);
  }
}
