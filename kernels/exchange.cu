// What device and host tell each other in the middle of a step that is queued as a whole (src/engine/gpu/host.rs). Portable.
//
// Both sides write to pinned memory, and then a flag there that the other side looks at until it is set. So a step needs no
// launch and no copy of the host's between two layers. The host sets every flag to 0 before the step, and always answers.
#include "common.cuh"

constexpr u32 ANSWERED = 1;

__device__ inline void store_release(u32* p, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

__device__ inline u32 load_acquire(const u32* p) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

struct AskParams {
  const u32* ids;        // [count] expert of each assignment
  const u32* own;        // [count] the same where the device has it, `experts` and above otherwise
  const float* weights;  // [count]
  const uint4* x;        // [vectors] rows of the experts' inputs
  u32* host_ids;         // pinned from here on; `experts` where the host has nothing to do
  float* host_weights;
  uint4* host_x;
  u32* asked;  // [blocks] 1 when a block has written its share
  u32 count;
  u32 experts;
  u32 vectors;
  u32 pad;
};

// grid: as many blocks as there are flags
extern "C" __global__ void __launch_bounds__(512) ask(const __grid_constant__ AskParams p) {
  wait_for_inputs();
  const u32 first = blockIdx.x * 512 + threadIdx.x, step = gridDim.x * 512;
  for (u32 i = first; i < p.count; i += step) {
    p.host_ids[i] = p.own[i] < p.experts ? p.experts : p.ids[i];
    p.host_weights[i] = p.weights[i];
  }
  for (u32 i = first; i < p.vectors; i += step) p.host_x[i] = p.x[i];
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) store_release(p.asked + blockIdx.x, 1);
}

struct FetchParams {
  const u32* answered;  // pinned: ANSWERED, or something else but 0 if there is no answer; then the number of rows
  const uint4* from;    // pinned: the rows
  uint4* to;            // [places, row_vectors] whose last rows they become
  u32* bad;             // set if there is no answer
  u32 places;
  u32 row_vectors;
};

// grid: any number of blocks
extern "C" __global__ void __launch_bounds__(512) fetch(const __grid_constant__ FetchParams p) {
  wait_for_inputs();
  __shared__ u32 rows;
  if (threadIdx.x == 0) {
    u32 state;
    while ((state = load_acquire(p.answered)) == 0) {
    }
    rows = state == ANSWERED ? min(__ldcv(p.answered + 1), p.places) : 0;
    if (state != ANSWERED && blockIdx.x == 0) *p.bad = 1;
  }
  __syncthreads();
  const u64 count = u64(rows) * p.row_vectors;
  uint4* to = p.to + u64(p.places - rows) * p.row_vectors;
  for (u64 i = blockIdx.x * 512 + threadIdx.x; i < count; i += gridDim.x * 512) to[i] = __ldcv(p.from + i);
}
