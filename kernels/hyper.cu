// Hyper-connections: the seam between two sub-layers in two launches (src/backend/cpu/hyper.rs).
//
// `hyper_project` mixes the sub-layer's output into the streams (unless `y` is null) and projects the new streams on the
// mixing basis: a block takes up to 32 tokens and 128 columns of every stream, and leaves a partial sum per token. The
// float32 basis is cut into three bfloat16 parts that add up to it exactly, so the products are exact on the matrix units
// and only the sums round. `hyper_finish` adds the partial sums, eight chains of them, makes the mixing coefficients, collapses
// the streams, normalises, and writes the next sub-layer's input with its E4M3 copy, while a warp of its own makes the
// coefficients that only the next seam needs (Sinkhorn in registers). Portable.
#include "common.cuh"

constexpr int OUTPUTS = STREAMS * (2 + STREAMS);  // rows of the basis; 4 for the final collapse
constexpr int COLUMNS = 128;                      // of a stream a block takes
constexpr int PARTS = OUTPUTS + 1;                // and the sum of squares

struct Mix {
  float pre[STREAMS];
  float post[STREAMS];
  float comb[STREAMS][STREAMS];  // [old][new]
};

struct ProjectParams {
  const u16* x;        // [tokens, STREAMS, width] bf16
  const u16* y;        // [tokens, width] bf16, the sub-layer's output, or null
  const Mix* mixes;    // [tokens] of the sub-layer; used with `y`
  u16* out;            // [tokens, STREAMS, width] bf16, the new streams; used with `y`
  const float* basis;  // [outputs, STREAMS * width]
  float* parts;        // [tokens, width / COLUMNS, PARTS]
  u32 tokens;
  u32 width;
  u32 outputs;  // 24 or 4
};

// parts of w: w0 + w1 + w2 == w
__device__ __forceinline__ void three_parts(float a, float b, u32 (&parts)[3]) {
#pragma unroll
  for (int i = 0; i < 3; i++) {
    parts[i] = bf16_pair(a, b);
    a -= low_value(parts[i]);
    b -= high_value(parts[i]);
  }
}

template <int TILES>
__device__ __forceinline__ void project(const ProjectParams& p) {
  constexpr int TOKENS = TILES * 8, K = STREAMS * COLUMNS, PITCH = K + 8;
  __shared__ u16 streams[TOKENS][PITCH];
  __shared__ float sums[8][TOKENS][32];
  __shared__ float squares[TOKENS];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const u32 first = blockIdx.y * TOKENS, column = blockIdx.x * COLUMNS;

  // the basis is asked for first; each warp takes 64 of the 512 values, rows of tiles (0, low), (0, high), (1, low)
  float4 basis[4][3];
#pragma unroll
  for (int step = 0; step < 4; step++) {
    const int k = warp * 64 + step * 16;  // within one stream
    const u64 at = u64(k / COLUMNS) * p.width + column + k % COLUMNS + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < 3; i++) {
      const u32 row = i * 8 + lane / 4;
      basis[step][i] = make_float4(0, 0, 0, 0);
      if (row < p.outputs) basis[step][i] = *reinterpret_cast<const float4*>(p.basis + u64(row) * STREAMS * p.width + at);
    }
  }

  wait_for_inputs();

  // new streams of 8 columns a thread and step; 16 lanes share a token
  for (int i = thread; i < TOKENS * COLUMNS / 8; i += 256) {
    const int t = i / 16, c = i % 16 * 8;
    const u32 token = first + t;
    float sum = 0.0f;
    if (token < p.tokens) {
      const u64 at = u64(token) * STREAMS * p.width + column + c;
      float old[STREAMS][8];
#pragma unroll
      for (int s = 0; s < STREAMS; s++) unpack8(*reinterpret_cast<const uint4*>(p.x + at + u64(s) * p.width), old[s]);
      if (p.y) {
        float y[8], fresh[8];
        unpack8(*reinterpret_cast<const uint4*>(p.y + u64(token) * p.width + column + c), y);
        const Mix& mix = p.mixes[token];
        float mixed[STREAMS][8];
#pragma unroll
        for (int k = 0; k < STREAMS; k++) {
#pragma unroll
          for (int e = 0; e < 8; e++) {
            float v = 0.0f;
#pragma unroll
            for (int j = 0; j < STREAMS; j++) v += mix.comb[j][k] * old[j][e];
            mixed[k][e] = round_bf16(v + mix.post[k] * y[e]);
          }
        }
#pragma unroll
        for (int k = 0; k < STREAMS; k++) {
#pragma unroll
          for (int e = 0; e < 8; e++) fresh[e] = old[k][e] = mixed[k][e];
          *reinterpret_cast<uint4*>(p.out + at + u64(k) * p.width) = pack8(fresh);
        }
      }
#pragma unroll
      for (int s = 0; s < STREAMS; s++) {
#pragma unroll
        for (int e = 0; e < 8; e++) sum += old[s][e] * old[s][e];
        *reinterpret_cast<uint4*>(&streams[t][s * COLUMNS + c]) = pack8(old[s]);
      }
    } else {
#pragma unroll
      for (int s = 0; s < STREAMS; s++) *reinterpret_cast<uint4*>(&streams[t][s * COLUMNS + c]) = make_uint4(0, 0, 0, 0);
    }
    sum = warp_sum<16>(sum);
    if (lane % 16 == 0) squares[t] = sum;
  }
  __syncthreads();

  // basis rows as operand A (two tiles of 16, of which the last 8 rows are empty), tokens as B
  float acc[2][TILES][4] = {};
#pragma unroll
  for (int step = 0; step < 4; step++) {
    const int k = warp * 64 + step * 16;
    u32 parts[2][4][3] = {};
#pragma unroll
    for (int i = 0; i < 3; i++) {
      three_parts(basis[step][i].x, basis[step][i].y, parts[i / 2][i % 2]);
      three_parts(basis[step][i].z, basis[step][i].w, parts[i / 2][i % 2 + 2]);
    }
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      const uint2 b = *reinterpret_cast<const uint2*>(&streams[t * 8 + lane / 4][k + lane % 4 * 4]);
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int part = 2; part >= 0; part--) {
          const u32 a[4] = {parts[i][0][part], parts[i][1][part], parts[i][2][part], parts[i][3][part]};
          mma(acc[i][t], a, b.x, b.y);
        }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int j = 0; j < 4; j++)
        sums[warp][t * 8 + lane % 4 * 2 + j % 2][i * 16 + lane / 4 + j / 2 * 8] = acc[i][t][j];
  __syncthreads();
  for (int i = thread; i < TOKENS * 32; i += 256) {
    const int t = i / 32, output = i % 32;
    if (first + t >= p.tokens || output >= PARTS) continue;
    float v = 0.0f;
    if (output == OUTPUTS) {
      v = squares[t];
    } else {
#pragma unroll
      for (int w = 0; w < 8; w++) v += sums[w][t][output];
    }
    p.parts[(u64(first + t) * gridDim.x + blockIdx.x) * PARTS + output] = v;
  }
}

// grid (width / 128, ceil(tokens / 8)) and (width / 128, ceil(tokens / 16))
extern "C" __global__ void __launch_bounds__(256) hyper_project8(const __grid_constant__ ProjectParams p) {
  project<1>(p);
}
extern "C" __global__ void __launch_bounds__(256) hyper_project16(const __grid_constant__ ProjectParams p) {
  project<2>(p);
}

struct FinishParams {
  const u16* x;         // [.., STREAMS, width] bf16, the streams
  const u32* rows;      // [grid] row of `x` and `parts` to take, or null for all
  const float* parts;   // of ProjectParams
  const float* scale;   // [3], or [1] for the final collapse
  const float* base;    // [24] or [4]
  const float* weight;  // [width] of the norm behind the collapse
  Mix* mixes;           // [tokens], or null for the final collapse
  u16* out;             // [grid, width] bf16
  u16* quantised;       // [grid, width] bf16 on the E4M3 grid, or null
  u32 width;            // a multiple of 128, at most 8192
  u32 iterations;
  float hc_eps;
  float norm_eps;
};

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// rows and columns of c to sum one: row softmax, column pass, then iterations - 1 of both
__device__ __forceinline__ void sinkhorn(float (&c)[STREAMS][STREAMS], u32 iterations, float eps) {
#pragma unroll
  for (int j = 0; j < STREAMS; j++) {
    const float top = fmaxf(fmaxf(c[j][0], c[j][1]), fmaxf(c[j][2], c[j][3]));
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < STREAMS; k++) sum += c[j][k] = expf(c[j][k] - top);
#pragma unroll
    for (int k = 0; k < STREAMS; k++) c[j][k] = c[j][k] / sum + eps;
  }
  for (u32 i = 0; i < iterations; i++) {
    if (i > 0) {
#pragma unroll
      for (int j = 0; j < STREAMS; j++) {
        const float inverse = __fdividef(1.0f, c[j][0] + c[j][1] + c[j][2] + c[j][3] + eps);
#pragma unroll
        for (int k = 0; k < STREAMS; k++) c[j][k] *= inverse;
      }
    }
#pragma unroll
    for (int k = 0; k < STREAMS; k++) {
      const float inverse = __fdividef(1.0f, c[0][k] + c[1][k] + c[2][k] + c[3][k] + eps);
#pragma unroll
      for (int j = 0; j < STREAMS; j++) c[j][k] *= inverse;
    }
  }
}

constexpr int WARPS = 8;  // that collapse; one more makes what only the next seam needs

// grid tokens
extern "C" __global__ void __launch_bounds__(32 * (WARPS + 1)) hyper_finish(const __grid_constant__ FinishParams p) {
  constexpr int GROUPS = 4;
  __shared__ float sums[WARPS][32];
  __shared__ float scratch[WARPS];
  const u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const u32 blocks = p.width / COLUMNS;
  const bool is_head = !p.mixes;
  // lane i has output i, the last one the sum of squares
  const float base = lane < (is_head ? STREAMS : OUTPUTS) ? p.base[lane] : 0.0f;
  const float factor = p.scale[is_head || lane < STREAMS ? 0 : lane < 2 * STREAMS ? 1 : 2];
  for (u32 i = thread * 32; i < p.width; i += blockDim.x * 32) prefetch(p.weight + i);

  wait_for_inputs();
  const u32 token = blockIdx.x, row = p.rows ? p.rows[token] : token;
  // asked for before the coefficients are made
  const u16* x = p.x + u64(row) * STREAMS * p.width;
  uint4 streams[GROUPS][STREAMS];
  if (warp < WARPS) {
    float part = 0.0f;
    const float* parts = p.parts + u64(row) * blocks * PARTS + min(lane, u32(PARTS - 1));
#pragma unroll 4
    for (u32 b = warp; b < blocks; b += WARPS) part += parts[b * PARTS];
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
#pragma unroll
      for (int s = 0; s < STREAMS; s++) {
        const u32 g = thread + i * 32 * WARPS;
        if (g * 8 < p.width) streams[i][s] = reinterpret_cast<const uint4*>(x + u64(s) * p.width)[g];
      }
    sums[warp][lane] = part;
  }
  __syncthreads();
  float m = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) m += sums[w][lane];
  m *= 1.0f / sqrtf(__shfl_sync(ALL, m, OUTPUTS) / float(STREAMS * p.width) + p.norm_eps);
  m = m * factor + base;
  const float pre_or_post = lane < STREAMS ? sigmoid(m) + p.hc_eps : 2.0f * sigmoid(m);
  if (warp == WARPS) {
    if (is_head) return;
    float comb[STREAMS][STREAMS];
#pragma unroll
    for (int j = 0; j < STREAMS; j++)
#pragma unroll
      for (int k = 0; k < STREAMS; k++) comb[j][k] = __shfl_sync(ALL, m, 2 * STREAMS + j * STREAMS + k);
    sinkhorn(comb, p.iterations, p.hc_eps);
    float* const mix = p.mixes[row].pre;
    if (lane < 2 * STREAMS) mix[lane] = pre_or_post;
#pragma unroll
    for (int j = 0; j < STREAMS; j++)
#pragma unroll
      for (int k = 0; k < STREAMS; k++)
        if (lane == 0) p.mixes[row].comb[j][k] = comb[j][k];
    return;
  }
  float pre[STREAMS];
#pragma unroll
  for (int s = 0; s < STREAMS; s++) pre[s] = __shfl_sync(ALL, pre_or_post, s);

  float v[GROUPS][8] = {};
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < GROUPS; i++) {
    const u32 g = thread + i * 32 * WARPS;
    if (g * 8 >= p.width) continue;
#pragma unroll
    for (int s = 0; s < STREAMS; s++) {
      float stream[8];
      unpack8(streams[i][s], stream);
#pragma unroll
      for (int j = 0; j < 8; j++) v[i][j] += pre[s] * stream[j];
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
      v[i][j] = round_bf16(v[i][j]);
      squares += v[i][j] * v[i][j];
    }
  }
  squares = warp_sum(squares);
  if (lane == 0) scratch[warp] = squares;
  asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory");  // without the last warp
  squares = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) squares += scratch[w];
  const float scale = 1.0f / sqrtf(squares / float(p.width) + p.norm_eps);
#pragma unroll
  for (int i = 0; i < GROUPS; i++) {
    const u32 g = thread + i * 32 * WARPS;
    const bool inside = g * 8 < p.width;
    if (inside) {
      const float4* w = reinterpret_cast<const float4*>(p.weight + g * 8);
      const float4 w0 = w[0], w1 = w[1];
      const float weights[8] = {w0.x, w0.y, w0.z, w0.w, w1.x, w1.y, w1.z, w1.w};
#pragma unroll
      for (int j = 0; j < 8; j++) v[i][j] = round_bf16(v[i][j] * scale * weights[j]);
      reinterpret_cast<uint4*>(p.out + u64(token) * p.width)[g] = pack8(v[i]);
    }
    if (!p.quantised) continue;
    round_act_block(v[i]);
    if (inside) reinterpret_cast<uint4*>(p.quantised + u64(token) * p.width)[g] = pack8(v[i]);
  }
}
