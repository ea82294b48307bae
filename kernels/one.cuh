// Products of one token, bound by the weights' bytes: as few.cuh, with the inputs in shared memory and code that is short,
// because between two launches the instruction caches forget it.
#pragma once
#include "few.cuh"

constexpr int ONE_BYTES = RING_BYTES + FEW_WARPS * SLICE * 2;  // of shared memory, besides the sums

// E4M3 weights that the hardware converts to half precision, for inputs that are as exact in it: the same products, and
// since what is added at once differs by one power of two, the same sums.
struct E4m3Half : E4m3 {
  static __device__ __forceinline__ void a(int step, const uint4& lo, const uint4& hi, u32, u32, u32 (&a)[4]) {
    pairs(word(lo, step), a[0], a[2]);
    pairs(word(hi, step), a[1], a[3]);
  }
  static __device__ __forceinline__ void b(int step, const u32* x, u32& b0, u32& b1) {
    b0 = x[2 * step];
    b1 = x[2 * step + 1];
  }
  static __device__ __forceinline__ void pairs(u32 q, u32& first, u32& second) {
#if __CUDA_ARCH__ >= 890
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
        : "=r"(first), "=r"(second)
        : "r"(q));
#endif
  }
};

#if __CUDA_ARCH__ >= 890
constexpr bool HAS_HALVES = true;
#else
constexpr bool HAS_HALVES = false;
#endif

template <class F>
__device__ __forceinline__ void add_products(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma(c, a, b0, b1);
}
template <>
__device__ __forceinline__ void add_products<E4m3Half>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Inputs in half precision, times a power of two. The largest value becomes one of 2^-97 as a bfloat16: from there on its
// bits, three places further up, are those of a half of 2^112 times the value. Few values are not exact: where it matters
// they are found out, and the slice is left to the other products.
struct Halves {
  u32 up, down;  // bfloat16 pairs of the power and its inverse
  float factor;  // of sums of products
  u32 lost;      // not 0: a value was not exact

  // `most`: bits of the largest magnitude
  __device__ __forceinline__ explicit Halves(u32 most) {
    const u32 exponent = most == 0 ? 127 : most >> 7;
    lost = exponent < 16 || exponent > 156;
    const u32 shift = lost ? 0 : exponent - 30;  // downwards
    up = ((127 - shift) << 7) * 0x10001u;
    down = ((127 + shift) << 7) * 0x10001u;
    factor = __uint_as_float((15 + shift) << 23);
  }
  __device__ __forceinline__ u32 operator()(u32 pair) {
    const u32 y = bf16_mul(pair, up);
    lost |= bf16_mul(y, down) ^ pair;
    return (y & 0x80008000u) | ((y << 3) & 0x7FF87FF8u);
  }
};

__device__ __forceinline__ u32 largest(u32 pair) { return max(pair & 0x7FFFu, pair >> 16 & 0x7FFFu); }

// A warp's part of a slice's inputs: 16 values a lane.
struct Piece {
  uint4 v[2];

  __device__ __forceinline__ Piece(const u16* x, u32 slice, u32 cols) {
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
      const u32 column = slice * SLICE + i * 256 + threadIdx.x % 32 * 8;
      v[i] = make_uint4(0, 0, 0, 0);
      if (column < cols) v[i] = *reinterpret_cast<const uint4*>(x + column);
    }
  }
};

// Leaves a slice's inputs in the warp's `buffer` as F's products take them.
template <class F>
__device__ __forceinline__ void put_inputs(const Piece& piece, uint4* buffer) {
  __syncwarp();
#pragma unroll
  for (u32 i = 0; i < 2; i++) {
    const u32 w[4] = {piece.v[i].x, piece.v[i].y, piece.v[i].z, piece.v[i].w};
    uint4 out;
    F::b(0, w, out.x, out.y);
    F::b(1, w, out.z, out.w);
    buffer[i * 32 + threadIdx.x % 32] = out;
  }
  __syncwarp();
}

// The same in half precision; false if not exact. `factor`: of sums.
__device__ __forceinline__ bool put_halves(const Piece& piece, uint4* buffer, float& factor) {
  u32 most = 0;
#pragma unroll
  for (int i = 0; i < 2; i++)
    most = max(max(max(largest(piece.v[i].x), largest(piece.v[i].y)), max(largest(piece.v[i].z), largest(piece.v[i].w))), most);
  Halves halves(warp_max(most));
  Piece converted = piece;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint4 v = piece.v[i];
    converted.v[i] = make_uint4(halves(v.x), halves(v.y), halves(v.z), halves(v.w));
  }
  factor = halves.factor;
  if (!__all_sync(ALL, halves.lost == 0)) return false;
  put_inputs<E4m3Half>(converted, buffer);
  return true;
}

// Sums of one tile and slice, from the ring; `inputs`: address of the slice's. Only column 0 of the products counts.
template <class F, class Copies>
__device__ __forceinline__ void tile_of_one(Copies& ring, u32& slot, u32 base, const Matrix& m, u32 slice, u32 inputs,
                                            u32 row, u32 codes, float (&acc)[4]) {
  constexpr u32 STAGE_COLS = 2 * F::UNIT_K, UNIT_BYTES = F::UNIT_K * 2;
  const u32 lane = threadIdx.x % 32, quad = lane % 4, group = lane / 4;
  const u32 at = group * 128 + (quad ^ (4 * (group & 1))) * 16, end = min(m.cols - slice * SLICE, u32(SLICE));
  u32 x = inputs + lane * (UNIT_BYTES / 4);  // of the first four lanes
  float part[4] = {};
#pragma unroll 1
  for (u32 column = 0, block = 0; column < end; column += STAGE_COLS) {
    wait_copies<RING_STAGES - 1>();
    __syncwarp();
    float scale = 1.0f;
    if constexpr (F::UNIT_K == 64) {
      scale = m.format == E4M3_F32 ? tile_scale(m, row, slice * (SLICE / BLOCK) + block) : e8m0_value(u8(codes >> 8 * block));
      block++;
    }
#pragma unroll (F::UNIT_K == 128 ? 1 : 2)
    for (u32 u = 0; u < 2; u++) {
      const uint4 wl = load_shared16(slot + (at ^ 64 * u)), wh = load_shared16(slot + (at ^ 64 * u) + 1024);
      u32 sl = 0, sh = 0;
      if constexpr (F::UNIT_K == 128) {
        sl = F::scale(load_shared1(slot + STAGE_WEIGHTS + group * 8 + u * 4 + quad));
        sh = F::scale(load_shared1(slot + STAGE_WEIGHTS + 64 + group * 8 + u * 4 + quad));
      }
      u32 in[F::X_WORDS] = {};
      if (lane < 4) {
#pragma unroll
        for (int i = 0; i < F::X_WORDS; i += 4) {
          const uint4 v = load_shared16(x + i * 4);
          in[i] = v.x, in[i + 1] = v.y, in[i + 2] = v.z, in[i + 3] = v.w;
        }
      }
      x += UNIT_BYTES;
#pragma unroll
      for (int s = 0; s < F::STEPS; s++) {
        u32 a[4];
        F::a(s, wl, wh, sl, sh, a);
        add_products<F>(part, a, in[2 * s], in[2 * s + 1]);
      }
      // a block of 128 columns ends
      if (F::UNIT_K == 128 || (u == 1 && (F::UNIT_K == 64 || column / STAGE_COLS % 2 == 1))) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
          acc[j] = fmaf(part[j], scale, acc[j]);
          part[j] = 0.0f;
        }
      }
    }
    __syncwarp();
    ring.fill(slot);
    slot = slot == base + (RING_STAGES - 1) * RING_STAGE ? base : slot + RING_STAGE;
  }
}

// store(row, sum) for rows of tiles first_tile + [0, tiles); m.rows is a multiple of 16. `ready()` waits for the inputs x.
// `shared`: ONE_BYTES, and the rest of the block's for sums.
template <class F, class Ready, class Store>
__device__ __forceinline__ void stream_one(const Matrix& m, u32 first_tile, u32 tiles, const u16* x, u8* shared, Ready ready,
                                           Store store) {
  const Deal deal(tiles, m.cols, 1, dynamic_shared_bytes() - ONE_BYTES);
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, at_once = FEW_WARPS / deal.lanes;
  const u32 base = shared_address(shared) + warp * (RING_STAGES * RING_STAGE);
  uint4* const inputs = reinterpret_cast<uint4*>(shared + RING_BYTES + warp * (SLICE * 2));
  float* const sums = reinterpret_cast<float*>(shared + ONE_BYTES);

  Ring<F> ring(m, deal, first_tile);
#pragma unroll 1
  for (u32 i = 0; i < RING_STAGES; i++) ring.fill(base + i * RING_STAGE);
  u32 slot = base;
  ready();
  for (u32 begin = 0; begin < deal.turns; begin += deal.batch) {
    const u32 end = min(deal.end(begin) * at_once, tiles);
    for (u32 slice = ring.own_slice; slice < deal.slices; slice += deal.lanes) {
      auto each_tile = [&](auto kind, float factor) {
        u32 tile = begin * at_once + ring.own_tile;
        u32 next = tile < end ? slice_codes(m, (first_tile + tile) * TILE_HEIGHT, slice) : 0;
#pragma unroll 1
        for (; tile < end; tile += at_once) {
          const u32 row = (first_tile + tile) * TILE_HEIGHT, codes = next;
          if (tile + at_once < end) next = slice_codes(m, row + at_once * TILE_HEIGHT, slice);
          float acc[4] = {};
          tile_of_one<decltype(kind)>(ring, slot, base, m, slice, shared_address(inputs), row, codes, acc);
          float* to = sums + ((tile - begin * at_once) * deal.slices + slice) * TILE_HEIGHT + group;
          if (lane % 4 == 0) to[0] = acc[0] * (F::FACTOR * factor), to[8] = acc[2] * (F::FACTOR * factor);
        }
      };
      const Piece piece(x, slice, m.cols);
      float factor = 1.0f;
      if constexpr (HAS_HALVES && F::UNIT_K == 64) {
        if (put_halves(piece, inputs, factor)) {
          each_tile(E4m3Half(), factor);
          continue;
        }
      }
      put_inputs<F>(piece, inputs);
      each_tile(F(), 1.0f);
    }
    __syncthreads();
    const u32 tile0 = begin * at_once;
    add_slices(sums, end - tile0, deal.slices, TILE_HEIGHT,
               [&](u32 tile, u32 output, float sum) { store((first_tile + tile0 + tile) * TILE_HEIGHT + output, sum); });
    __syncthreads();
  }
}

struct Job {
  Matrix weight;
  const u16* x;  // [tokens, x_stride] bf16
  void* y;       // [tokens, y_stride] bf16 or float32
  u32 x_stride;
  u32 y_stride;
  u32 y_f32;
  u32 first_tile;  // number of row tiles, or blocks, of the jobs before
};

__device__ __forceinline__ void store(const Job& job, u32 token, u32 row, float v) {
  const u64 at = u64(token) * job.y_stride + row;
  if (job.y_f32)
    static_cast<float*>(job.y)[at] = v;
  else
    static_cast<u16*>(job.y)[at] = bf16_bits(v);
}

// Block `block` of the `blocks` that have a job of one token.
__device__ __forceinline__ void stream_job(const Job& job, u32 block, u32 blocks, u8* shared) {
  const u32 tiles = job.weight.rows / TILE_HEIGHT;
  const u32 first = u64(tiles) * block / blocks, count = u64(tiles) * (block + 1) / blocks - first;
  const auto ready = [] { wait_for_inputs(); };
  const auto put = [&](u32 row, float v) { store(job, 0, row, v); };
  if (job.weight.format <= E4M3_F32)
    stream_one<E4m3>(job.weight, first, count, job.x, shared, ready, put);
  else
    stream_one<Bf16>(job.weight, first, count, job.x, shared, ready, put);
}
