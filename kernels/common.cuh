// What all kernels share: number formats, rotations, reductions and matrix-unit fragments.
//
// Everything compiles for sm_80 and newer, with nvcc and with NVRTC, so no header of the toolkit is included. The number
// formats are those of src/tensor/format.rs, bit for bit. Every kernel takes one struct by value; its mirror stands in
// the launcher of the same name (src/backend/cuda/ops), and each pointer carries its shape.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 ALL = 0xFFFFFFFFu;
constexpr u32 IDLE = ALL;  // token of a row that fills a captured step up: zeros all the way, and nobody's work

// Dimensions that every release and every test model shares; the launchers refuse others.
constexpr int HEAD_DIM = 512;  // values of a KV row
constexpr int ROPE_DIM = 64;   // rotary values at its end
constexpr int NOPE_DIM = HEAD_DIM - ROPE_DIM;
constexpr int KV_BLOCK = 64;     // values per E4M3 scale of a KV row
constexpr int ROW_BYTES = 584;   // 448 codes, 64 bf16, 7 scales, 1 unused
constexpr int INDEX_DIM = 128;   // values of an index key
constexpr int KEY_BYTES = 68;    // 64 bytes of E2M1 pairs, 4 scales
constexpr int PAGE_ROWS = 64;    // rows of a wide page, keys of an index page
constexpr int NARROW_ROWS = 2;   // rows of a narrow page
constexpr int ACT_BLOCK = 128;   // values per E4M3 scale of a linear's input
constexpr int STREAMS = 4;       // residual streams

// Kernels are launched before the one in front has ended, where the device can (sm_90 and newer). Nothing that another
// kernel of the stream writes may be read, and nothing written, before this returns; weights may be asked for earlier.
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000u); }

// ---- bfloat16 ----

__device__ __forceinline__ float bf16_value(u16 bits) { return __uint_as_float(u32(bits) << 16); }

__device__ __forceinline__ u16 bf16_bits(float x) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

__device__ __forceinline__ float round_bf16(float x) { return bf16_value(bf16_bits(x)); }

// two values in one register, `low` in the lower half
__device__ __forceinline__ u32 bf16_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ float low_value(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_value(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// product of two pairs; subnormal values stay what they are
__device__ __forceinline__ u32 bf16_mul(u32 a, u32 b) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
  return d;
}

__device__ __forceinline__ void unpack8(uint4 packed, float (&v)[8]) {
  const u32 w[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    v[2 * i] = low_value(w[i]);
    v[2 * i + 1] = high_value(w[i]);
  }
}

__device__ __forceinline__ uint4 pack8(const float (&v)[8]) {
  return make_uint4(bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]), bf16_pair(v[4], v[5]), bf16_pair(v[6], v[7]));
}

// ---- E4M3, E2M1, E8M0 ----

// nearest E4M3 code of |x| <= 448, ties to even; NaN gives the NaN code
__device__ __forceinline__ u8 e4m3_code(float x) {
  const u32 bits = __float_as_uint(x);
  const u32 magnitude = bits & 0x7FFFFFFFu, sign = (bits >> 24) & 0x80u;
  if (magnitude > 0x7F800000u) return 0x7F;
  if (magnitude < 0x3C800000u)  // below 2^-6: multiples of 2^-9
    return u8(sign | (__float_as_uint(__uint_as_float(magnitude) + 16384.0f) - 0x46800000u));
  return u8(sign | (((magnitude + 0x7FFFFu + ((magnitude >> 20) & 1)) >> 20) - (120u << 3)));
}

// nearest E4M3 value of |x| <= 448
__device__ __forceinline__ float round_e4m3(float x) {
  const u32 bits = __float_as_uint(x);
  const float normal = __uint_as_float((bits + 0x7FFFFu + ((bits >> 20) & 1)) & 0xFFF00000u);
  const float subnormal = copysignf(__fsub_rn(__fadd_rn(x, 24576.0f), 24576.0f), x);
  return fabsf(x) < 0.015625f ? subnormal : normal;
}

// smallest power of two not below a positive normal x
__device__ __forceinline__ float ceil_pow2(float x) {
  const u32 bits = __float_as_uint(x);
  return __uint_as_float(((bits >> 23) + ((bits & 0x7FFFFFu) != 0)) << 23);
}

// fmaxf drops a NaN; these scales keep it
__device__ __forceinline__ float e4m3_scale(float amax) {
  return amax != amax ? amax : ceil_pow2(__fmul_rn(fmaxf(amax, 1e-4f), 1.0f / 448.0f));
}
__device__ __forceinline__ float e2m1_scale(float amax) {
  return amax != amax ? amax : ceil_pow2(__fmul_rn(fmaxf(amax, 6.0f * 1.17549435e-38f), 1.0f / 6.0f));
}

// magnitude as an integer that orders like it, NaN last
__device__ __forceinline__ u32 magnitude_bits(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }

// an integer that orders like the value; NaN and minus infinity are equally low, and above 0
__device__ __forceinline__ u32 rank_of(float v) {
  if (v != v) v = minus_infinity();
  const u32 bits = __float_as_uint(v + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// byte of a power of two, 255 for NaN
__device__ __forceinline__ u8 e8m0_code(float scale) { return u8((__float_as_uint(scale) >> 23) & 0xFF); }

__device__ __forceinline__ float e8m0_value(u8 code) {
  if (code == 0) return __uint_as_float(0x00400000u);
  if (code == 255) return __uint_as_float(0x7FC00000u);
  return __uint_as_float(u32(code) << 23);
}

// the same as a pair of bfloat16
__device__ __forceinline__ u32 e8m0_pair(u8 code) {
  const u32 one = code == 0 ? 0x0040u : code == 255 ? 0x7FC0u : u32(code) << 7;
  return one * 0x10001u;
}

__device__ __forceinline__ float clamp_to(float x, float limit) {
  return x > limit ? limit : x < -limit ? -limit : x;  // NaN passes
}

// nearest E2M1 code of |x| <= 6, ties to the even code
__device__ __forceinline__ u32 e2m1_code(float x) {
  const float m = fabsf(x);
  const u32 code = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.0f);
  return code | ((__float_as_uint(x) >> 28) & 8u);
}

__device__ __forceinline__ float e2m1_value(u32 code) {
  // exponent and mantissa at their bfloat16 places are worth 2^-126 of the value
  return __fmul_rn(__uint_as_float(((code & 8u) << 28) | ((code & 7u) << 22)), __uint_as_float(253u << 23));
}

// Four E4M3 codes to bfloat16 pairs: bytes 1 and 3 in `odd`, bytes 0 and 2 in `even`. Exact for finite codes; the two
// NaN codes, which no checkpoint and no cache row may contain unscaled, give 480.
__device__ __forceinline__ void e4m3_pairs(u32 q, u32& odd, u32& even) {
  constexpr u32 TWO_120 = 0x7B807B80u;  // the exponent biases differ by 120
  const u32 low = q << 8;
  odd = bf16_mul((q & 0x80008000u) | ((q >> 4) & 0x07F007F0u), TWO_120);
  even = bf16_mul((low & 0x80008000u) | ((low >> 4) & 0x07F007F0u), TWO_120);
}

// Eight E2M1 codes times `scale` to bfloat16 pairs: pair i holds codes 3-i and 7-i.
__device__ __forceinline__ void e2m1_pairs(u32 q, u32 scale, u32 (&pairs)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 s = q << (4 * i);
    pairs[i] = bf16_mul((s & 0x80008000u) | ((s >> 6) & 0x01C001C0u), scale);
  }
}

// ---- reductions, in one fixed order ----

template <int WIDTH = 32>
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int step = WIDTH / 2; step > 0; step /= 2) v += __shfl_xor_sync(ALL, v, step);
  return v;
}

template <int WIDTH = 32>
__device__ __forceinline__ u32 warp_max(u32 v) {
#pragma unroll
  for (int step = WIDTH / 2; step > 0; step /= 2) v = max(v, __shfl_xor_sync(ALL, v, step));
  return v;
}

// sum over a block of WARPS warps, for all threads; `scratch` has WARPS floats and may be reused after the next barrier
template <int WARPS>
__device__ __forceinline__ float block_sum(float v, float* scratch) {
  v = warp_sum(v);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) sum += scratch[w];
  return sum;
}

// ---- a quantised copy of eight neighbouring values; 16 lanes hold a block of 128 ----

__device__ __forceinline__ void round_act_block(float (&v)[8]) {
  u32 bits = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) bits = max(bits, magnitude_bits(v[i]));
  const float scale = e4m3_scale(__uint_as_float(warp_max<16>(bits)));
  const float inverse = 1.0f / scale;
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = round_e4m3(clamp_to(v[i] * inverse, 448.0f)) * scale;
  if (scale != scale) {
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = scale;
  }
}

// ---- rotations ----

// Rotates a pair by (cos, sin) and stores it as bfloat16 values; without fused operations, as on the CPU.
__device__ __forceinline__ void rotate(float2 turn, float& a, float& b) {
  const float x = a, y = b;
  a = round_bf16(__fsub_rn(__fmul_rn(x, turn.x), __fmul_rn(y, turn.y)));
  b = round_bf16(__fadd_rn(__fmul_rn(x, turn.y), __fmul_rn(y, turn.x)));
}

// ---- matrix units ----

// c += a b, a 16x16 (rows lane/4 and lane/4+8), b 16x8 (column lane/4), c 16x8
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// ---- shared memory by its address ----

__device__ __forceinline__ uint4 load_shared16(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
__device__ __forceinline__ u32 load_shared4(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ u32 load_shared1(u32 address) {
  u32 v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

// ---- asynchronous copies ----

// Asks for the line of an address, which will be read later, by any block.
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// 16 bytes to shared memory; zeros if !valid
__device__ __forceinline__ void copy_async(u32 to, const void* from, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
// 4 bytes, both addresses multiples of 4
__device__ __forceinline__ void copy_word(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING));
}

// 16 bytes of weights: read once, so they should not displace what is read again
__device__ __forceinline__ uint4 load_weights(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
