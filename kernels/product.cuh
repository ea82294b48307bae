// Products y = W x with weights in checkpoint storage, on the matrix units, for a few tokens or many.
//
// Order of sums, the same in every kernel here and in wide.cu, so that an output's bits depend on its two rows alone:
// a block of 128 columns is one chain of m16n8k16 instructions; blocks are scaled and added in order within a slice of
// 512 columns; slices are added in order. How many tokens, rows or slices a thread block takes is therefore free.
//
// A thread reads 16 bytes of a weight row at a time (a unit: the 4 lanes of a quad read 64 neighbouring bytes) and
// decodes them in registers to the A operand: rows lane/4 and lane/4+8 of a 16-row tile. Which column stands at which
// place of an instruction is fixed by the decoding; the inputs, operand B, are taken in the same order.
#pragma once
#include "common.cuh"

constexpr int SLICE = 512;
constexpr int BLOCK = 128;

constexpr u32 E4M3_E8M0 = 0, E4M3_F32 = 1, E2M1_E8M0 = 2, PLAIN_BF16 = 3;

__device__ __forceinline__ u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }
__device__ __forceinline__ u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// UNIT_K: columns of a unit. STEPS: its instructions. X_WORDS: 32-bit words of a thread's inputs for one unit.
struct E4m3 {
  static constexpr bool HAS_TILES = true;  // a scale for each 128x128
  static constexpr int BLOCK_BYTES = 128, UNIT_K = 64, STEPS = 4, X_WORDS = 8;
  static constexpr int WEIGHT_FLIP = 4, STAGES = 2;
  static constexpr bool SHARED_TOTALS = true;
  static constexpr float FACTOR = 1.0f;
  static __device__ __forceinline__ void a(int step, const uint4& lo, const uint4& hi, u32, u32, u32 (&a)[4]) {
    e4m3_pairs(word(lo, step), a[0], a[2]);
    e4m3_pairs(word(hi, step), a[1], a[3]);
  }
  static __device__ __forceinline__ void b(int step, const u32* x, u32& b0, u32& b1) {
    b0 = high_halves(x[2 * step], x[2 * step + 1]);
    b1 = low_halves(x[2 * step], x[2 * step + 1]);
  }
  // place of 16-byte chunk `chunk` of a token's 128 inputs, so that the reads of a unit hit all banks
  static __device__ __forceinline__ int x_place(int chunk, int token) { return chunk ^ (token & 1); }
};

struct E2m1 {
  static constexpr bool HAS_TILES = false;
  static constexpr int BLOCK_BYTES = 64, UNIT_K = 128, STEPS = 8, X_WORDS = 16;
  static constexpr int WEIGHT_FLIP = 0, STAGES = 2;
  static constexpr bool SHARED_TOTALS = true;
  static constexpr float FACTOR = 1152921504606846976.0f;  // 2^60, which `scale` leaves out so that it fits bf16
  static __device__ __forceinline__ u32 scale(u8 code) { return min(u32(code) + 66u, 255u) * 0x00800080u; }
  static __device__ __forceinline__ void a(int step, const uint4& lo, const uint4& hi, u32 s_lo, u32 s_hi, u32 (&a)[4]) {
    const u32 down = step % 2 ? 0 : 8;  // codes 3 and 2 of each half, then 1 and 0
    const u32 l = word(lo, step / 2) >> down, h = word(hi, step / 2) >> down;
    a[0] = pair(l & 0x00F000F0u, 0x0104, s_lo);
    a[1] = pair(h & 0x00F000F0u, 0x0104, s_hi);
    a[2] = pair(l & 0x000F000Fu, 0x1040, s_lo);
    a[3] = pair(h & 0x000F000Fu, 0x1040, s_hi);
  }
  // One product puts a code's sign and, beside it, its other bits in their places in a bfloat16: logical operations are
  // what binds.
  static __device__ __forceinline__ u32 pair(u32 codes, u32 places, u32 scale) {
    return bf16_mul((codes * places) & 0x81C081C0u, scale);
  }
  static __device__ __forceinline__ void b(int step, const u32* x, u32& b0, u32& b1) {
    const u32* w = x + step / 2 * 4;
    const u32 first = step % 2 ? w[0] : w[1], second = step % 2 ? w[2] : w[3];
    b0 = high_halves(first, second);
    b1 = low_halves(first, second);
  }
  static __device__ __forceinline__ int x_place(int chunk, int token) {
    return (chunk & ~3) | ((chunk & 3) ^ (((chunk >> 3) & 1) | ((token & 1) << 1)));
  }
};

struct Bf16 {
  static constexpr bool HAS_TILES = true;  // scales of 1: the branch keeps loads of weights ahead of the wait for inputs
  static constexpr int BLOCK_BYTES = 256, UNIT_K = 32, STEPS = 2, X_WORDS = 4;
  static constexpr int WEIGHT_FLIP = 4, STAGES = 2;
  static constexpr bool SHARED_TOTALS = false;
  static constexpr float FACTOR = 1.0f;
  static __device__ __forceinline__ void a(int step, const uint4& lo, const uint4& hi, u32, u32, u32 (&a)[4]) {
    a[0] = word(lo, 2 * step);
    a[1] = word(hi, 2 * step);
    a[2] = word(lo, 2 * step + 1);
    a[3] = word(hi, 2 * step + 1);
  }
  static __device__ __forceinline__ void b(int step, const u32* x, u32& b0, u32& b1) {
    b0 = x[2 * step];
    b1 = x[2 * step + 1];
  }
  static __device__ __forceinline__ int x_place(int chunk, int token) { return chunk ^ ((token & 1) << 2); }
};

// Weights of one matrix, or of one expert.
struct Matrix {
  const u8* data;    // [rows, cols] in storage
  const u8* scales;  // E4M3: [tiles of 128 stored rows, cols/128]; E2M1: [rows, cols/32]
  u32 rows;
  u32 cols;       // a multiple of 128
  u32 first_row;  // stored row of row 0, for the scale tile; a multiple of 16
  u32 format;
};

template <class F>
__device__ __forceinline__ u64 row_bytes(u32 cols) {
  return u64(cols) / BLOCK * F::BLOCK_BYTES;
}

// scale of column block `block` for the 128-row tile that stored row `row` lies in; 1 where the storage has none
__device__ __forceinline__ float tile_scale(const Matrix& m, u32 row, u32 block) {
  if (m.format > E4M3_F32) return 1.0f;
  const u64 i = u64((m.first_row + row) / 128) * (m.cols / BLOCK) + block;
  if (m.format == E4M3_F32) return reinterpret_cast<const float*>(m.scales)[i];
  return e8m0_value(m.scales[i]);
}

// ---- a few tokens: one warp takes 16 rows of one slice ----

// acc[t] += slice k0.. of rows `row`+[0,16) times the tokens of x[t]; x[t]: inputs of token 8 t + lane/4, or null.
// Everything is latency: the weights of AHEAD blocks are asked for before anything else, and before `ready()`, which
// waits for the kernel that makes the inputs; inputs come one unit ahead.
template <class F, int TILES, class Ready>
__device__ __forceinline__ void slice_product(const Matrix& m, u32 row, u32 k0, const u16* const (&x)[TILES],
                                              float (&acc)[TILES][4], Ready ready) {
  constexpr int UNITS = BLOCK / F::UNIT_K;  // of a block
  constexpr int AHEAD = F::BLOCK_BYTES == 128 ? (TILES == 1 ? 4 : 2) : F::BLOCK_BYTES == 64 || TILES == 1 ? 2 : 1;
  // of E2M1 a block beyond the slice is multiplied too and counts for nothing: without a branch its loads stay ahead
  constexpr bool PADS = F::UNIT_K == 128;
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const u32 last = m.rows - 1;
  const u32 r0 = min(row + lane / 4, last), r1 = min(row + lane / 4 + 8, last);
  const u32 first = k0 / BLOCK, end = min(k0 + SLICE, m.cols) / BLOCK;
  const u64 bytes = row_bytes<F>(m.cols);
  const u8* lo = m.data + r0 * bytes + first * F::BLOCK_BYTES + quad * 16;
  const u8* hi = m.data + r1 * bytes + first * F::BLOCK_BYTES + quad * 16;
  const u8* lo_scales = m.scales + u64(r0) * (m.cols / 32) + first * 4 + quad;  // E2M1
  const u8* hi_scales = m.scales + u64(r1) * (m.cols / 32) + first * 4 + quad;

  auto inputs = [&](u32 unit, u32 (&in)[TILES][F::X_WORDS]) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int w = 0; w < F::X_WORDS; w += 4) {
        const u16* from = x[t] + (unit * F::UNIT_K + quad * (F::X_WORDS * 2)) + 2 * w;
        const uint4 v = x[t] ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
        in[t][w] = v.x;
        in[t][w + 1] = v.y;
        in[t][w + 2] = v.z;
        in[t][w + 3] = v.w;
      }
  };

  for (u32 b = first; b < end; b += AHEAD) {
    uint4 wl[AHEAD][UNITS], wh[AHEAD][UNITS];
    u32 sl[AHEAD] = {}, sh[AHEAD] = {};
    float scales[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const u32 at = min(u32(i), end - 1 - b);
#pragma unroll
      for (int u = 0; u < UNITS; u++) {
        wl[i][u] = load_weights(lo + at * F::BLOCK_BYTES + u * 64);
        wh[i][u] = load_weights(hi + at * F::BLOCK_BYTES + u * 64);
      }
      if constexpr (F::UNIT_K == 128) {  // E2M1: a thread's unit has one scale a row
        sl[i] = lo_scales[at * 4];
        sh[i] = hi_scales[at * 4];
      }
      scales[i] = F::HAS_TILES ? tile_scale(m, row, b + at) : 1.0f;
      if (PADS && b + i >= end) scales[i] = 0.0f;
    }
    lo += AHEAD * F::BLOCK_BYTES;
    hi += AHEAD * F::BLOCK_BYTES;
    lo_scales += AHEAD * 4;
    hi_scales += AHEAD * 4;
    if (b == first) ready();
    u32 in[2][TILES][F::X_WORDS];
    inputs(b * UNITS, in[0]);
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      if (!PADS && b + i >= end) break;
      if constexpr (F::UNIT_K == 128) {
        sl[i] = F::scale(u8(sl[i]));
        sh[i] = F::scale(u8(sh[i]));
      }
      float part[TILES][4] = {};
#pragma unroll
      for (int u = 0; u < UNITS; u++) {
        const int unit = i * UNITS + u;
        if (unit + 1 < AHEAD * UNITS) inputs(min(b * UNITS + unit + 1, end * UNITS - 1), in[(unit + 1) % 2]);
#pragma unroll
        for (int s = 0; s < F::STEPS; s++) {
          u32 a[4];
          F::a(s, wl[i][u], wh[i][u], sl[i], sh[i], a);
#pragma unroll
          for (int t = 0; t < TILES; t++) {
            u32 b0, b1;
            F::b(s, in[unit % 2][t], b0, b1);
            mma(part[t], a, b0, b1);
          }
        }
      }
#pragma unroll
      for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int j = 0; j < 4; j++) acc[t][j] = fmaf(part[t][j], scales[i], acc[t][j]);
    }
  }
}

// Sums of one slice to shared memory: [8 TILES tokens, 16 rows].
template <int TILES>
__device__ __forceinline__ void store_slice(float* to, const float (&acc)[TILES][4], float factor) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int token = t * 8 + lane % 4 * 2 + j % 2, row = lane / 4 + j / 2 * 8;
      to[token * 16 + row] = acc[t][j] * factor;
    }
}

// How the 8 warps of a block share `slices` slices: `lanes` of them on each of 8/lanes tiles of 16 rows.
__host__ __device__ constexpr u32 slice_lanes(u32 slices) { return slices > 4 ? 8 : slices > 2 ? 4 : slices > 1 ? 2 : 1; }

// A block's tiles, all slices: leaves the slices' sums in `parts` [row tiles, slices, 8 TILES, 16].
template <class F, int TILES, class Ready>
__device__ __forceinline__ void few_tokens(const Matrix& m, u32 first_row, const u16* const (&x)[TILES], float* parts,
                                           Ready ready) {
  const u32 slices = (m.cols + SLICE - 1) / SLICE, lanes = slice_lanes(slices);
  const u32 warp = threadIdx.x / 32, tile = warp / lanes;
  const u32 row = first_row + tile * 16;
  if (row >= m.rows) return ready();
  for (u32 s = warp % lanes; s < slices; s += lanes) {
    float acc[TILES][4] = {};
    slice_product<F, TILES>(m, row, s * SLICE, x, acc, ready);
    store_slice<TILES>(parts + u64(tile * slices + s) * TILES * 128, acc, F::FACTOR);
  }
}

// ---- many tokens: a block takes 128 rows times 64 tokens ----

constexpr int TILE_ROWS = 128, TILE_TOKENS = 64;

template <class F>
__host__ __device__ constexpr int stage_bytes() {
  return TILE_ROWS * F::BLOCK_BYTES + TILE_TOKENS * 256 + (F::UNIT_K == 128 ? TILE_ROWS * 4 : 0);
}
template <class F>
__host__ __device__ constexpr int tiled_bytes() {
  return F::STAGES * stage_bytes<F>() + (F::SHARED_TOTALS ? TILE_ROWS * TILE_TOKENS * 4 : 0);
}

// total = rows first_row + [0,128) times the tokens, slices [first_slice, end_slice). `x_row` of threads below 64: row of
// x, `stride` values apart, of that token of the tile, or NO_TOKEN. 8 warps: 4 of 32 rows, 2 of 32 tokens.
constexpr u32 NO_TOKEN = ALL;

template <class F>
__device__ __forceinline__ void many_tokens(const Matrix& m, u32 first_row, const u16* x, u32 stride,
                                            u32 x_row, u32 first_slice, u32 end_slice, u8* shared,
                                            float (&total)[2][4][4]) {
  constexpr int UNITS = BLOCK / F::UNIT_K, STAGES = F::STAGES, BYTES = stage_bytes<F>();
  constexpr int W_CHUNKS = F::BLOCK_BYTES / 16;  // of a row
  const int thread = threadIdx.x, lane = thread % 32, quad = lane % 4, group = lane / 4;
  const int warp_row = thread / 32 % 4 * 32, warp_token = thread / 128 * 32;
  const u64 bytes = row_bytes<F>(m.cols);
  const u32 first = first_slice * (SLICE / BLOCK), end = min(end_slice * u32(SLICE / BLOCK), m.cols / BLOCK);
  const u32 base = shared_address(shared);
  __shared__ u32 x_rows[TILE_TOKENS];
  if (thread < TILE_TOKENS) x_rows[thread] = x_row;
  __syncthreads();

  auto fill = [&](u32 block) {
    const u32 stage = base + (block - first) % STAGES * BYTES;
#pragma unroll 1
    for (int i = thread; i < TILE_ROWS * W_CHUNKS; i += 256) {
      const int row = i / W_CHUNKS, chunk = i % W_CHUNKS;
      const u32 r = first_row + row;
      const u8* from = m.data + (r < m.rows ? r : 0) * bytes + u64(block) * F::BLOCK_BYTES + chunk * 16;
      const int place = chunk ^ (F::WEIGHT_FLIP * (row & 1));
      copy_async(stage + row * F::BLOCK_BYTES + place * 16, from, r < m.rows);
    }
    const u32 inputs = stage + TILE_ROWS * F::BLOCK_BYTES;
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
      const int token = thread / 16 + 16 * i, chunk = thread % 16;
      const u32 row = x_rows[token];
      const bool valid = row != NO_TOKEN;
      const u16* from = x + (valid ? u64(row) * stride + block * BLOCK + chunk * 8 : 0);
      copy_async(inputs + token * 256 + F::x_place(chunk, token) * 16, from, valid);
    }
    if constexpr (F::UNIT_K == 128) {
      if (thread < TILE_ROWS) {
        const u32 r = min(first_row + thread, m.rows - 1);
        const u32 to = stage + TILE_ROWS * F::BLOCK_BYTES + TILE_TOKENS * 256 + thread * 4;
        const u8* from = m.scales + u64(r) * (m.cols / 32) + block * 4;
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from));
      }
    }
  };

#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    if (first + i < end) fill(first + i);
    commit_copies();
  }
  float* const totals = reinterpret_cast<float*>(shared + STAGES * BYTES);  // each thread's own
  bool is_first = true;
  float acc[2][4][4] = {};
  for (u32 block = first; block < end; block++) {
    wait_copies<STAGES - 2>();
    __syncthreads();
    if (block + STAGES - 1 < end) fill(block + STAGES - 1);
    commit_copies();
    const u8* stage = shared + (block - first) % STAGES * BYTES;
    const u8* inputs = stage + TILE_ROWS * F::BLOCK_BYTES;
    float part[2][4][4] = {};
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
      uint4 wl[2], wh[2];
      u32 sl[2] = {}, sh[2] = {};
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int row = warp_row + i * 16 + group;
        const int chunk = (u * 4 + quad) ^ (F::WEIGHT_FLIP * (row & 1));
        wl[i] = *reinterpret_cast<const uint4*>(stage + row * F::BLOCK_BYTES + chunk * 16);
        wh[i] = *reinterpret_cast<const uint4*>(stage + (row + 8) * F::BLOCK_BYTES + chunk * 16);
        if constexpr (F::UNIT_K == 128) {
          const u8* scales = inputs + TILE_TOKENS * 256;
          sl[i] = F::scale(scales[row * 4 + quad]);
          sh[i] = F::scale(scales[(row + 8) * 4 + quad]);
        }
      }
      // inputs 16 bytes at a time: X_WORDS/4 groups of 4 words, each feeding STEPS * 4 / X_WORDS instructions
      constexpr int PER = F::STEPS * 4 / F::X_WORDS;
#pragma unroll
      for (int w = 0; w < F::X_WORDS / 4; w++) {
        u32 in[4][4];
#pragma unroll
        for (int t = 0; t < 4; t++) {
          const int token = warp_token + t * 8 + group;
          const int chunk = F::x_place((u * 4 + quad) * (F::X_WORDS / 4) + w, token);
          const uint4 v = *reinterpret_cast<const uint4*>(inputs + token * 256 + chunk * 16);
          in[t][0] = v.x;
          in[t][1] = v.y;
          in[t][2] = v.z;
          in[t][3] = v.w;
        }
#pragma unroll
        for (int s = 0; s < PER; s++) {
          u32 a[2][4];
#pragma unroll
          for (int i = 0; i < 2; i++) F::a(w * PER + s, wl[i], wh[i], sl[i], sh[i], a[i]);
#pragma unroll
          for (int t = 0; t < 4; t++) {
            u32 b0, b1;
            F::b(s, in[t], b0, b1);
#pragma unroll
            for (int i = 0; i < 2; i++) mma(part[i][t], a[i], b0, b1);
          }
        }
      }
    }
    const float scale = F::HAS_TILES ? tile_scale(m, first_row + warp_row, block) : 1.0f;
    const bool slice_ends = (block + 1) % (SLICE / BLOCK) == 0 || block + 1 == end;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int t = 0; t < 4; t++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float sum = fmaf(part[i][t][j], scale, acc[i][t][j]);
          acc[i][t][j] = sum;
          if (!slice_ends) continue;
          float& held = F::SHARED_TOTALS ? totals[((i * 4 + t) * 4 + j) * 256 + thread] : total[i][t][j];
          const float before = F::SHARED_TOTALS && is_first ? 0.0f : held;
          held = __fadd_rn(before, __fmul_rn(sum, F::FACTOR));
          acc[i][t][j] = 0.0f;
        }
    if (slice_ends) is_first = false;
  }
  wait_copies<0>();
  if constexpr (F::SHARED_TOTALS) {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int t = 0; t < 4; t++)
#pragma unroll
        for (int j = 0; j < 4; j++) total[i][t][j] = totals[((i * 4 + t) * 4 + j) * 256 + thread];
  }
}
