// What the attention kernels for Hopper share (attention_sm90.cu, attention_runs_sm90.cu): how they cut work, decode rows, make
// weights of scores and finish an output.
#pragma once
#include "attention.cuh"
#include "hopper.cuh"

constexpr u32 TILE = 64;                  // keys of a tile, heads of a block
constexpr u32 OPERAND = 8 * BLOCK_BYTES;  // 64 rows of 512 values

// Places in shared memory: queries, two tiles of keys, weights of a tile, what its weights make of those before.
constexpr u32 AT_Q = 0, AT_K = OPERAND, AT_P = 3 * OPERAND, AT_FADES = AT_P + BLOCK_BYTES, AT_OWN = AT_FADES + TILE * 4;

// What the warpgroups are told of a tile: row, block of heads, valid keys and flags, run and number of runs.
constexpr u32 FIRST = 1 << 8;     // of the item
constexpr u32 LAST = 1 << 9;      // of the item
constexpr u32 RUN_ENDS = 1 << 10;
constexpr u32 STOP = 1 << 11;     // no tile, the end

struct HopperParams {
  AttentionParams attention;
  u32 items;   // rows * head blocks * pieces
  u32 pieces;  // blocks that share the runs of a query
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr float SCALE = 0.04419417382415922f;  // 512^-0.5
constexpr float LOG2_E = 1.4426950408889634f;

// Exchanges words of four lanes: word i of lane j becomes word j of lane i.
__device__ __forceinline__ void transpose4(u32 (&w)[4]) {
  const u32 lane = threadIdx.x;
#pragma unroll
  for (int step = 1; step < 4; step *= 2)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i & step) continue;
      const bool upper = lane & step;
      const u32 other = __shfl_xor_sync(ALL, upper ? w[i] : w[i + step], step);
      if (upper)
        w[i] = other;
      else
        w[i + step] = other;
    }
}

__device__ __forceinline__ float2 half_values(u32 pair) {
  float2 v;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
      : "=f"(v.x), "=f"(v.y)
      : "r"(pair));
  return v;
}

// A pair rounded to E4M3 times a scale; NaN stays NaN.
__device__ __forceinline__ u32 round_pair(u32 pair, float scale, float inverse) {
  u16 codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
      : "=h"(codes)
      : "f"(high_value(pair) * inverse), "f"(low_value(pair) * inverse));
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  const float2 v = half_values(halves);
  return bf16_pair(v.x * scale, v.y * scale);
}

// How a thread's columns of a fragment turn, which is one of the last eight of its 128 columns.
__device__ __forceinline__ float2 turn_of(const AttentionParams& p, u32 row, u32 fragment) {
  return p.turns[u64(row) * (ROPE_DIM / 2) + (fragment - 8) * 4 + threadIdx.x % 4];
}

// Finishes columns of 16 heads that a warp holds as TILES fragments of 8 columns, scaled and packed: rotates back, rounds,
// stores. They are columns `group` * 128 + `begin` * 8 and following; `head` is that of the thread's first row, the second
// is 8 further. `turn_at` tells how a fragment turns, `widen` makes the magnitude of a row's fragments that of its 128 columns.
template <int TILES, typename Turn, typename Widen>
__device__ __forceinline__ void finish(const AttentionParams& p, u32 (&words)[2][TILES], u32 group, u32 begin, u32 row,
                                       u32 head, Turn turn_at, Widen widen) {
  const u32 quad = threadIdx.x % 4;
  if (group == 3) {
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      if (begin + t < 8) continue;
      const float2 turn = turn_at(t);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float x = low_value(words[half][t]), y = high_value(words[half][t]);
        words[half][t] = bf16_pair(__fadd_rn(__fmul_rn(x, turn.x), __fmul_rn(y, turn.y)),
                                   __fsub_rn(__fmul_rn(y, turn.x), __fmul_rn(x, turn.y)));
      }
    }
  }
  if (p.quantise) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 bits = 0;
#pragma unroll
      for (int t = 0; t < TILES; t++)
        bits = max(bits, max(magnitude_bits(low_value(words[half][t])), magnitude_bits(high_value(words[half][t]))));
      const float scale = e4m3_scale(__uint_as_float(widen(warp_max<4>(bits), half))), inverse = 1.0f / scale;
#pragma unroll
      for (int t = 0; t < TILES; t++) words[half][t] = round_pair(words[half][t], scale, inverse);
    }
  }
#pragma unroll
  for (int t = 0; t < TILES; t += 4)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 w[4] = {words[half][t], words[half][t + 1], words[half][t + 2], words[half][t + 3]};
      transpose4(w);
      if (head + half * 8 < p.heads)
        *reinterpret_cast<uint4*>(p.out + (u64(row) * p.heads + head + half * 8) * HEAD_DIM + group * 128 +
                                  (begin + t + quad) * 8) = make_uint4(w[0], w[1], w[2], w[3]);
    }
}

// A factor for E4M3 codes that lie as bfloat16 bits: 2^120 times the scale.
__device__ __forceinline__ u32 code_factor(u32 scale) { return scale * 0x00800080u + 120u * 0x00800080u; }

// whether one of seven scales is beyond 2^7, so that its factor is none
__device__ __forceinline__ bool any_large(u64 scales) {
  const u32 low = u32(scales), high = u32(scales >> 32) & 0x00FFFFFFu;
  return (low & ((low & 0x7F7F7F7Fu) + 0x79797979u) & 0x80808080u) |
         (high & ((high & 0x7F7F7F7Fu) + 0x79797979u) & 0x80808080u);
}

// Eight codes to eight bfloat16: each code goes to the upper byte of its half, then sign and magnitude to their places.
__device__ __forceinline__ uint4 decode(u64 codes, u32 factor) {
  u32 v[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 x = __byte_perm(u32(codes >> (i / 2 * 32)), 0, i % 2 ? 0x3424 : 0x1404);
    v[i] = bf16_mul((x & 0x80008000u) | ((x >> 4) & 0x07F007F0u), factor);
  }
  return make_uint4(v[0], v[1], v[2], v[3]);
}

__device__ __forceinline__ u64 load_word(u64 address) {
  u64 v;
  asm volatile("ld.global.u64 %0, [%1];" : "=l"(v) : "l"(address));
  return v;
}

// Eight threads have a row, in four passes of 16 rows.
struct RowDecoder {
  u64 codes[4][7], ropes[4][2], scales[4];

  __device__ __forceinline__ void load(int pass, u64 row) {
    const u32 j = threadIdx.x % 8;
#pragma unroll
    for (int c = 0; c < 7; c++) codes[pass][c] = load_word(row + c * 64 + j * 8);
#pragma unroll
    for (int c = 0; c < 2; c++) ropes[pass][c] = load_word(row + NOPE_DIM + j * 16 + c * 8);
    scales[pass] = load_word(row + NOPE_DIM + 2 * ROPE_DIM);
  }

  // to the operand's rows of the pass
  __device__ __forceinline__ void store(int pass, u32 operand) const {
    const u32 at = operand + block_offset(threadIdx.x % 128 / 8, threadIdx.x % 8) + pass * 16 * BLOCK_ROW;
    const bool large = any_large(scales[pass]);
    const u64 known = large ? 0x7F7F7F7F7F7F7Full : scales[pass];
#pragma unroll
    for (int c = 0; c < 7; c++)
      store_shared(at + c * BLOCK_BYTES, decode(codes[pass][c], code_factor(u32(known >> (8 * c)) & 0xFF)));
    store_shared(at + 7 * BLOCK_BYTES, make_uint4(u32(ropes[pass][0]), u32(ropes[pass][0] >> 32), u32(ropes[pass][1]),
                                                  u32(ropes[pass][1] >> 32)));
    if (!large) return;
#pragma unroll 1
    for (int c = 0; c < 7; c++) {
      const u32 scale = e8m0_pair(u8(scales[pass] >> (8 * c)));
      const u64 low = load_shared(at + c * BLOCK_BYTES), high = load_shared(at + c * BLOCK_BYTES + 8);
      store_shared(at + c * BLOCK_BYTES, make_uint4(bf16_mul(u32(low), scale), bf16_mul(u32(low >> 32), scale),
                                                    bf16_mul(u32(high), scale), bf16_mul(u32(high >> 32), scale)));
    }
  }
};

// Scores of 64 heads and 64 keys, which must be there. Waits for nothing.
__device__ __forceinline__ void begin_scores(float (&s)[32], u32 queries, u32 keys) {
  products_begin();
#pragma unroll
  for (int k = 0; k < 32; k++) {
    const u32 step = k / 4 * (BLOCK_BYTES >> 4) + k % 4 * 2;
    product_64(s, queries + step, keys + step, k > 0);
  }
  products_commit();
}

// Online softmax of a thread's two heads, 8 apart.
struct Softmax {
  float top[2], sum[2];

  // Makes scores weights and tells by what the output so far fades; `fresh` if there is none.
  __device__ __forceinline__ void weigh(float (&s)[32], u32 valid, bool fresh, float (&fade)[2]) {
    if (valid < TILE) {
      const u32 quad = threadIdx.x % 4;
#pragma unroll
      for (int i = 0; i < 32; i++)
        if (i / 4 * 8 + quad * 2 + i % 2 >= valid) s[i] = minus_infinity();
    }
    if (fresh) top[0] = top[1] = minus_infinity(), sum[0] = sum[1] = 0.0f;
    float highest[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float pairs[8];
#pragma unroll
      for (int i = 0; i < 8; i++) pairs[i] = fmaxf(s[i * 4 + half * 2], s[i * 4 + half * 2 + 1]);
#pragma unroll
      for (int step = 4; step > 0; step /= 2)
#pragma unroll
        for (int i = 0; i < step; i++) pairs[i] = fmaxf(pairs[i], pairs[i + step]);
      highest[half] = fmaxf(top[half], pairs[0]);
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
#pragma unroll
      for (int half = 0; half < 2; half++)
        highest[half] = fmaxf(highest[half], __shfl_xor_sync(ALL, highest[half], step));
    float part[2][4] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
      // weights up to 2^8 do no harm and save rescaling the output
      const bool rises = fresh || (highest[half] - top[half]) * (SCALE * LOG2_E) > 8.0f;
      fade[half] = rises ? exp2_of((top[half] - highest[half]) * (SCALE * LOG2_E)) : 1.0f;
      top[half] = rises ? highest[half] : top[half];
      const float offset = top[half] * (SCALE * LOG2_E);
#pragma unroll
      for (int i = 0; i < 16; i++) {
        float& x = s[i / 2 * 4 + half * 2 + i % 2];
        x = exp2_of(fmaf(x, SCALE * LOG2_E, -offset));
        part[half][i % 4] += x;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
      sum[half] = fmaf(sum[half], fade[half], (part[half][0] + part[half][1]) + (part[half][2] + part[half][3]));
  }

  // the sums of whole heads
  __device__ __forceinline__ void add_up() {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      sum[half] += __shfl_xor_sync(ALL, sum[half], 1);
      sum[half] += __shfl_xor_sync(ALL, sum[half], 2);
    }
  }
};

__device__ __forceinline__ void fade_out(float (&o)[128], const float (&fade)[2]) {
  if (!__any_sync(ALL, fade[0] != 1.0f || fade[1] != 1.0f)) return;
#pragma unroll
  for (int i = 0; i < 128; i++) o[i] *= fade[i / 2 % 2];
}

// Adds weights from shared memory times half of the columns of a tile, from `values`.
__device__ __forceinline__ void add_values(float (&o)[128], u32 weights, u32 values) {
  products_begin();
#pragma unroll
  for (int step = 0; step < 4; step++) {
    product_128<0>(o, weights + step * 2, values + step * (16 * BLOCK_ROW >> 4));
    product_128<64>(o, weights + step * 2, values + (2 * BLOCK_BYTES + step * 16 * BLOCK_ROW >> 4));
  }
  products_commit();
  products_wait<0>();
}

// Finishes half of the columns; `head` is the thread's first.
__device__ __forceinline__ void finish_half(const AttentionParams& p, const float (&o)[128], const float (&factor)[2], u32 half,
                                            u32 row, u32 head) {
#pragma unroll
  for (int group = 0; group < 2; group++) {
    u32 words[2][16];
#pragma unroll
    for (int t = 0; t < 16; t++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        words[i][t] = bf16_pair(o[group * 64 + t * 4 + i * 2] * factor[i], o[group * 64 + t * 4 + i * 2 + 1] * factor[i]);
    finish(
        p, words, half * 2 + group, 0, row, head, [&](u32 t) { return turn_of(p, row, t); }, [](u32 bits, int) { return bits; });
  }
}

#endif  // sm_90a
