// Cache rows and index keys: how a warp holds, finishes and stores one, and where it lies in pages.
#pragma once
#include "common.cuh"

// One sequence of a step.
struct Sequence {
  u32 start;      // position of its first new token
  u32 first_row;  // row of that token in the step
  u32 rows;       // new tokens; 0 for an idle row, which is a sequence without pages
  u32 unused;
};

// Pages of one kind of one layer: page i of sequence s lies at base + ids[s * pitch + i] * page_bytes.
struct Pages {
  u8* base;        // first page of the bucket
  const u32* ids;  // [sequences, pitch]
  u32 pitch;
  u32 page_bytes;

  __device__ __forceinline__ u8* page(u32 sequence, u32 i) const {
    return base + u64(ids[u64(sequence) * pitch + i]) * page_bytes;
  }
  // row j of a kind with `per_page` rows of `bytes` bytes a page
  __device__ __forceinline__ u8* row(u32 sequence, u32 j, u32 per_page, u32 bytes) const {
    return page(sequence, j / per_page) + j % per_page * bytes;
  }
};

// A warp holds a row of 512 as v[i][j] = value 256 i + 8 lane + j; lanes 24.. of i = 1 hold the rotary values.

__device__ __forceinline__ void rotate_row(const float2* turns, float (&v)[2][8]) {
  const int lane = threadIdx.x % 32;
  if (lane < 24) return;
#pragma unroll
  for (int j = 0; j < 4; j++) rotate(turns[(lane - 24) * 4 + j], v[1][2 * j], v[1][2 * j + 1]);
}

// Loads a row of 512 bf16 values.
__device__ __forceinline__ void load_row(const u16* row, float (&v)[2][8]) {
#pragma unroll
  for (int i = 0; i < 2; i++) unpack8(reinterpret_cast<const uint4*>(row)[i * 32 + threadIdx.x % 32], v[i]);
}

// Root-mean-square norm, rounded to bf16. `weight` may be null; `stepwise` rounds each step, as the official code does for
// heads.
__device__ __forceinline__ void norm_row(const float* weight, float eps, bool stepwise, float (&v)[2][8]) {
  const int lane = threadIdx.x % 32;
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float square = v[i][j] * v[i][j];
      squares += stepwise ? round_bf16(square) : square;
    }
  const float mean = warp_sum(squares) / float(HEAD_DIM);
  const float scale = stepwise ? round_bf16(1.0f / sqrtf(round_bf16(round_bf16(mean) + eps))) : 1.0f / sqrtf(mean + eps);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float weights[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    if (weight) {
      const float4* w = reinterpret_cast<const float4*>(weight + i * 256 + lane * 8);
      const float4 w0 = w[0], w1 = w[1];
      weights[0] = w0.x, weights[1] = w0.y, weights[2] = w0.z, weights[3] = w0.w;
      weights[4] = w1.x, weights[5] = w1.y, weights[6] = w1.z, weights[7] = w1.w;
    }
#pragma unroll
    for (int j = 0; j < 8; j++) v[i][j] = round_bf16(v[i][j] * scale * weights[j]);
  }
}

// Stores a row as 448 E4M3 codes, 64 bf16, 7 scales and a zero; `row` is 8-byte aligned.
__device__ __forceinline__ void store_row(u8* row, const float (&v)[2][8]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    u32 bits = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) bits = max(bits, magnitude_bits(v[i][j]));
    const float scale = e4m3_scale(__uint_as_float(warp_max<8>(bits)));
    if (i == 1 && lane >= 24) {
      u64* rope = reinterpret_cast<u64*>(row + NOPE_DIM) + (lane - 24) * 2;
      const uint4 packed = pack8(v[i]);
      rope[0] = packed.x | u64(packed.y) << 32;
      rope[1] = packed.z | u64(packed.w) << 32;
      if (lane == 24) row[ROW_BYTES - 1] = 0;
      continue;
    }
    const float inverse = 1.0f / scale;
    u64 codes = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) codes |= u64(e4m3_code(clamp_to(v[i][j] * inverse, 448.0f))) << (8 * j);
    *reinterpret_cast<u64*>(row + i * 256 + lane * 8) = codes;
    if (lane % 8 == 0) row[NOPE_DIM + 2 * ROPE_DIM + i * 4 + lane / 8] = e8m0_code(scale);
  }
}

// A warp holds an index vector of 128 as v[j] = value 4 lane + j; lanes 16.. hold the rotary values.

__device__ __forceinline__ void rotate_index(const float2* turns, float (&v)[4]) {
  const int lane = threadIdx.x % 32;
  if (lane < 16) return;
#pragma unroll
  for (int j = 0; j < 2; j++) rotate(turns[(lane - 16) * 2 + j], v[2 * j], v[2 * j + 1]);
}

// Walsh-Hadamard transform in natural order times 128^-0.5, stored as bf16
__device__ __forceinline__ void hadamard(float (&v)[4]) {
  const int lane = threadIdx.x % 32;
  const float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
  v[0] = a + c;
  v[1] = b + d;
  v[2] = a - c;
  v[3] = b - d;
#pragma unroll
  for (int step = 1; step < 32; step *= 2)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float other = __shfl_xor_sync(ALL, v[j], step);
      v[j] = lane & step ? other - v[j] : v[j] + other;
    }
#pragma unroll
  for (int j = 0; j < 4; j++) v[j] = round_bf16(v[j] * 0.08838834764831845f);
}

// scale of the 32 values that 8 lanes hold
__device__ __forceinline__ float index_scale(const float (&v)[4]) {
  u32 bits = 0;
#pragma unroll
  for (int j = 0; j < 4; j++) bits = max(bits, magnitude_bits(v[j]));
  return e2m1_scale(__uint_as_float(warp_max<8>(bits)));
}

// Stores an index key as 64 bytes of E2M1 pairs and 4 scales; `key` is 4-byte aligned.
__device__ __forceinline__ void store_key(u8* key, const float (&v)[4]) {
  const int lane = threadIdx.x % 32;
  const float scale = index_scale(v), inverse = 1.0f / scale;
  u32 codes = 0;
#pragma unroll
  for (int j = 0; j < 4; j++) codes |= e2m1_code(clamp_to(v[j] * inverse, 6.0f)) << (4 * j);
  *reinterpret_cast<u16*>(key + lane * 2) = u16(codes);
  if (lane % 8 == 0) key[INDEX_DIM / 2 + lane / 8] = e8m0_code(scale);
}
