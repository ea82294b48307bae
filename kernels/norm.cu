// Ends of the trunk and single rows: embedding, RMSNorm with a quantised copy, the quantised copy alone, rotations.
//
// One block of 256 threads a row; a thread holds groups of 8 neighbouring values (16 bytes), so 16 lanes hold one block
// of 128 for the E4M3 copy. Rows of up to 8192 values stay in registers. Portable.
#include "common.cuh"

constexpr int THREADS = 256;
constexpr int GROUPS = 4;  // of 8 values a thread: rows of at most 8192

struct EmbedParams {
  const u16* table;  // [vocab, width] bf16
  const u32* ids;    // [rows]
  u16* streams;      // [rows, STREAMS, width] bf16
  u32 width;
  u32 vocab;
};

// grid rows; an idle row is all zeros, another id outside the vocabulary gives NaN, which the step reports
extern "C" __global__ void __launch_bounds__(THREADS) embed(const __grid_constant__ EmbedParams p) {
  wait_for_inputs();
  const u32 id = p.ids[blockIdx.x];
  const u32 groups = p.width / 8;
  const uint4* from = reinterpret_cast<const uint4*>(p.table + u64(id) * p.width);
  uint4* to = reinterpret_cast<uint4*>(p.streams + u64(blockIdx.x) * STREAMS * p.width);
  const u32 none = id == IDLE ? 0 : 0x7FFF7FFFu;
  for (u32 g = threadIdx.x; g < groups; g += THREADS) {
    const uint4 v = id < p.vocab ? from[g] : make_uint4(none, none, none, none);
#pragma unroll
    for (int s = 0; s < STREAMS; s++) to[s * groups + g] = v;
  }
}

struct NormParams {
  const u16* x;        // [rows, x_stride] bf16, the first `width` of each row
  const float* weight;  // [width]
  u16* out;            // [rows, width] bf16
  u16* quantised;      // [rows, width] bf16 on the E4M3 grid, or null
  u32 width;           // a multiple of 128, at most 8192
  u32 x_stride;
  float eps;
};

// grid rows
extern "C" __global__ void __launch_bounds__(THREADS) rms_norm(const __grid_constant__ NormParams p) {
  wait_for_inputs();
  __shared__ float scratch[THREADS / 32];
  const u64 row = blockIdx.x;
  const uint4* x = reinterpret_cast<const uint4*>(p.x + row * p.x_stride);
  float v[GROUPS][8];
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < GROUPS; i++) {
    const u32 g = threadIdx.x + i * THREADS;
    if (g * 8 < p.width) {
      unpack8(x[g], v[i]);
#pragma unroll
      for (int j = 0; j < 8; j++) squares += v[i][j] * v[i][j];
    }
  }
  const float scale = 1.0f / sqrtf(block_sum<THREADS / 32>(squares, scratch) / float(p.width) + p.eps);
#pragma unroll
  for (int i = 0; i < GROUPS; i++) {
    const u32 g = threadIdx.x + i * THREADS;
    if (g * 8 >= p.width) continue;  // whole blocks of 128, so whole groups of 16 lanes
    const float4* w = reinterpret_cast<const float4*>(p.weight + g * 8);
    const float4 w0 = w[0], w1 = w[1];
    const float weights[8] = {w0.x, w0.y, w0.z, w0.w, w1.x, w1.y, w1.z, w1.w};
#pragma unroll
    for (int j = 0; j < 8; j++) v[i][j] = round_bf16(v[i][j] * scale * weights[j]);
    reinterpret_cast<uint4*>(p.out + row * p.width)[g] = pack8(v[i]);
  }
  if (!p.quantised) return;
#pragma unroll
  for (int i = 0; i < GROUPS; i++) {
    const u32 g = threadIdx.x + i * THREADS;
    const bool inside = g * 8 < p.width;
    if (!inside) {
#pragma unroll
      for (int j = 0; j < 8; j++) v[i][j] = 0.0f;
    }
    round_act_block(v[i]);
    if (inside) reinterpret_cast<uint4*>(p.quantised + row * p.width)[g] = pack8(v[i]);
  }
}

struct QuantiseParams {
  const u16* x;  // [count] bf16
  u16* out;      // [count] bf16 on the E4M3 grid, a power-of-two scale per 128
  u64 count;     // a multiple of 128
};

// grid ceil(count / 2048)
extern "C" __global__ void __launch_bounds__(THREADS) quantise(const __grid_constant__ QuantiseParams p) {
  wait_for_inputs();
  const u64 g = u64(blockIdx.x) * THREADS + threadIdx.x;
  const bool inside = g * 8 < p.count;
  float v[8] = {};
  if (inside) unpack8(reinterpret_cast<const uint4*>(p.x)[g], v);
  round_act_block(v);
  if (inside) reinterpret_cast<uint4*>(p.out)[g] = pack8(v);
}

struct WatchParams {
  const u32* x;  // [words] of two bf16 or one float32
  u32* bad;      // set to 1 if one of them is NaN or infinite
  u64 words;
  u64 is_f32;
};

extern "C" __global__ void __launch_bounds__(THREADS) watch(const __grid_constant__ WatchParams p) {
  wait_for_inputs();
  const u64 first = (u64(blockIdx.x) * THREADS + threadIdx.x) * 4;
  if (first >= p.words) return;
  u32 words[4] = {};
  if (first + 4 <= p.words) {
    const uint4 v = reinterpret_cast<const uint4*>(p.x)[first / 4];
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else {
    for (u32 i = 0; first + i < p.words; i++) words[i] = p.x[first + i];
  }
  bool bad = false;
#pragma unroll
  for (int i = 0; i < 4; i++)
    bad |= (words[i] & 0x7F800000u) == 0x7F800000u || (!p.is_f32 && (words[i] & 0x7F80u) == 0x7F80u);
  if (bad) *p.bad = 1;
}

struct RotationParams {
  const u32* positions;  // [rows]
  const float* plain;    // [32] radians a position, window-only layers
  const float* yarn;     // [32] all others
  float2* turns;         // [4, rows, 32] (cos, sin): plain, yarn, yarn 3 tokens before, yarn 127 tokens before
  u32 rows;
};

// Entry j of ratio r completes at token r j + r - 1 and is rotated to r j: the last two tables. grid rows, 128 threads
extern "C" __global__ void __launch_bounds__(128) rotations(const __grid_constant__ RotationParams p) {
  wait_for_inputs();
  const u32 row = blockIdx.x, table = threadIdx.x / 32, pair = threadIdx.x % 32;
  const u32 back = table == 2 ? 3 : table == 3 ? 127 : 0;
  const u32 here = p.positions[row];
  const float position = float(here >= back ? here - back : 0);
  // the angle is a float32 product, its cosine and sine the nearest float32
  const double angle = double(__fmul_rn(position, (table == 0 ? p.plain : p.yarn)[pair]));
  double s, c;
  sincos(angle, &s, &c);
  p.turns[(u64(table) * p.rows + row) * 32 + pair] = make_float2(float(c), float(s));
}
