// Dense products: several matrices in one launch (those that share an input, or the groups of the output projection).
//
// one: one token, bound by the weights' bytes; grid = the blocks that the launcher gives the jobs, by their bytes.
// few: up to 16 tokens, likewise; grid = row tiles of all jobs, of 16 to 128 rows.
// many: grid (row tiles of 128 of all jobs, token tiles of 64, slices or 1); with slices in the grid, the sums go to
// `parts` and `join` adds them in order. Portable; shared memory: few [row tiles, slices, tokens, 16] floats, many
// tiled_bytes of the widest format.
#include "one.cuh"

constexpr int MAX_JOBS = 16;

struct LinearParams {
  Job jobs[MAX_JOBS];
  float* parts;  // many with slices: [row tiles, token tiles, slices, 64, 128]
  u32 count;
  u32 tokens;
};

__device__ __forceinline__ const Job& job_of(const LinearParams& p, u32 tile) {
  u32 i = p.count - 1;
  while (i > 0 && p.jobs[i].first_tile > tile) i--;
  return p.jobs[i];
}

extern "C" __global__ void __launch_bounds__(32 * FEW_WARPS, 2) linear_one(const __grid_constant__ LinearParams p) {
  extern __shared__ __align__(128) u8 shared[];
  u32 i = p.count - 1;
  while (i > 0 && p.jobs[i].first_tile > blockIdx.x) i--;
  const u32 first = p.jobs[i].first_tile, end = i + 1 < p.count ? p.jobs[i + 1].first_tile : gridDim.x;
  stream_job(p.jobs[i], blockIdx.x - first, end - first, shared);
}

template <int TILES>
__device__ __forceinline__ void few(const LinearParams& p) {
  extern __shared__ float parts[];
  const Job& job = job_of(p, blockIdx.x);
  const Matrix& m = job.weight;
  const u32 slices = (m.cols + SLICE - 1) / SLICE, rows = 8 / slice_lanes(slices) * 16;
  const u32 first_row = (blockIdx.x - job.first_tile) * rows;
  const u16* x[TILES];
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    const u32 token = t * 8 + threadIdx.x % 32 / 4;
    x[t] = token < p.tokens ? job.x + u64(token) * job.x_stride : nullptr;
  }
  if (m.format <= E4M3_F32)
    few_tokens<E4m3, TILES>(m, first_row, x, parts, [] { wait_for_inputs(); });
  else
    few_tokens<Bf16, TILES>(m, first_row, x, parts, [] { wait_for_inputs(); });
  __syncthreads();
  for (u32 i = threadIdx.x; i < rows * p.tokens; i += 256) {
    const u32 token = i / rows, row = first_row + i % rows;
    if (row >= m.rows) continue;
    const float* from = parts + u64(i % rows / 16) * slices * TILES * 128 + token * 16 + i % 16;
    float sum = 0.0f;
#pragma unroll 8
    for (u32 s = 0; s < slices; s++) sum = __fadd_rn(sum, from[u64(s) * TILES * 128]);
    store(job, token, row, sum);
  }
}

extern "C" __global__ void __launch_bounds__(256, 2) linear_few8(const __grid_constant__ LinearParams p) { few<1>(p); }
extern "C" __global__ void __launch_bounds__(256, 2) linear_few16(const __grid_constant__ LinearParams p) { few<2>(p); }

template <class F>
__device__ __forceinline__ void many(const LinearParams& p, const Job& job, u8* shared) {
  const Matrix& m = job.weight;
  const u32 first_row = (blockIdx.x - job.first_tile) * TILE_ROWS, first_token = blockIdx.y * TILE_TOKENS;
  const u32 slices = (m.cols + SLICE - 1) / SLICE;
  const bool split = gridDim.z > 1;
  if (split && blockIdx.z >= slices) return;
  const u32 token = first_token + threadIdx.x % TILE_TOKENS, x_row = token < p.tokens ? token : NO_TOKEN;
  float total[2][4][4] = {};
  many_tokens<F>(m, first_row, job.x, job.x_stride, x_row, split ? blockIdx.z : 0, split ? blockIdx.z + 1 : slices, shared, total);
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 32, warp_token = threadIdx.x / 128 * 32;
  const u64 block = (u64(blockIdx.x) * gridDim.y + blockIdx.y) * gridDim.z + blockIdx.z;
  float* parts = p.parts + block * (TILE_ROWS * TILE_TOKENS);
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int t = 0; t < 4; t++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const u32 row = warp_row + i * 16 + lane / 4 + j / 2 * 8;
        const u32 token = warp_token + t * 8 + lane % 4 * 2 + j % 2;
        if (split)
          parts[token * TILE_ROWS + row] = total[i][t][j];
        else if (first_row + row < m.rows && first_token + token < p.tokens)
          store(job, first_token + token, first_row + row, total[i][t][j]);
      }
}

// all jobs of a launch have one kind of storage
extern "C" __global__ void __launch_bounds__(256, 2) linear_many_e4m3(const __grid_constant__ LinearParams p) {
  wait_for_inputs();
  extern __shared__ __align__(128) u8 shared[];
  many<E4m3>(p, job_of(p, blockIdx.x), shared);
}
extern "C" __global__ void __launch_bounds__(256, 1) linear_many_bf16(const __grid_constant__ LinearParams p) {
  wait_for_inputs();
  extern __shared__ __align__(128) u8 shared[];
  many<Bf16>(p, job_of(p, blockIdx.x), shared);
}

// grid as `linear_many` without slices; gridDim.z = slices of the launch before, in p.parts
struct JoinParams {
  LinearParams linear;
  u32 slices;
};

extern "C" __global__ void __launch_bounds__(256) linear_join(const __grid_constant__ JoinParams q) {
  wait_for_inputs();
  const LinearParams& p = q.linear;
  const Job& job = job_of(p, blockIdx.x);
  const u32 first_row = (blockIdx.x - job.first_tile) * TILE_ROWS, first_token = blockIdx.y * TILE_TOKENS;
  const u32 slices = (job.weight.cols + SLICE - 1) / SLICE;
  const float* parts = p.parts + (u64(blockIdx.x) * gridDim.y + blockIdx.y) * q.slices * (TILE_ROWS * TILE_TOKENS);
  for (u32 i = threadIdx.x + blockIdx.z * 256; i < TILE_ROWS * TILE_TOKENS; i += 256 * gridDim.z) {
    const u32 row = first_row + i % TILE_ROWS, token = first_token + i / TILE_ROWS;
    if (row >= job.weight.rows || token >= p.tokens) continue;
    float sum = 0.0f;
    for (u32 s = 0; s < slices; s++) sum = __fadd_rn(sum, parts[u64(s) * (TILE_ROWS * TILE_TOKENS) + i]);
    store(job, token, row, sum);
  }
}
