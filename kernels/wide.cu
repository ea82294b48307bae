// Products of many tokens on Hopper's asynchronous matrix unit (wgmma). Exists for sm_90a alone.
//
// The sums are those of product.cuh, step by step: the same 16 columns in a step, the same eight steps a block, the same
// slices. So the bits are those of the portable kernels, and a launcher may take either. That is possible as the unit
// adds the 16 products of a step as one, in no order, as mma.sync does there; the self-test would notice.
//
// arrange: writes the inputs in the order in which the steps take them, as images: [64 tokens, 128 columns] of 16 KB as
// 8 groups of 8 tokens, [8 steps, 2 halves, 8 tokens, 8 columns] each, which one copy brings to shared memory.
// linear_wide, expert_wide: one block a multiprocessor walks over tiles of 128 rows and up to 128 tokens. One warpgroup
// copies weights as they are stored, one thread images; two warpgroups of 64 rows each decode weights to registers
// (operand A) while the unit works on the steps before.
#include "wide.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// ---- inputs ----

// Where the matrices of a storage take the columns of a block: thread j of a token reads 8 columns for each lane q of a
// quad and fills steps 2 j and 2 j + 1.
__device__ __forceinline__ u32 image_column(u32 format, u32 j, u32 q) {
  if (format <= E4M3_F32) return j / 2 * 64 + q * 16 + j % 2 * 8;
  return format == E2M1_E8M0 ? q * 32 + j * 8 : j * 32 + q * 8;
}

// One token's share: `from` its 128 columns or null, `to` its place in the image.
template <class F>
__device__ __forceinline__ void arrange_token(u32 format, const u16* from, u8* to, u32 j) {
  u32 in[4][4];
#pragma unroll
  for (int q = 0; q < 4; q++) {
    const uint4 v = from ? *reinterpret_cast<const uint4*>(from + image_column(format, j, q)) : make_uint4(0, 0, 0, 0);
    in[q][0] = v.x;
    in[q][1] = v.y;
    in[q][2] = v.z;
    in[q][3] = v.w;
  }
#pragma unroll
  for (int s = 0; s < 2; s++) {
    u32 half[2][4];
#pragma unroll
    for (int q = 0; q < 4; q++) F::b(s, in[q], half[0][q], half[1][q]);
#pragma unroll
    for (int h = 0; h < 2; h++)
      *reinterpret_cast<uint4*>(to + (2 * j + s) * STEP_BYTES + h * HALF_BYTES) =
          make_uint4(half[h][0], half[h][1], half[h][2], half[h][3]);
  }
}

__device__ __forceinline__ void arrange_token(u32 format, const u16* from, u8* image) {
  const u32 token = threadIdx.x / 4, j = threadIdx.x % 4;
  u8* to = image + token / 8 * GROUP_BYTES + token % 8 * 16;
  if (format <= E4M3_F32)
    arrange_token<E4m3>(format, from, to, j);
  else if (format == E2M1_E8M0)
    arrange_token<E2m1>(format, from, to, j);
  else
    arrange_token<Bf16>(format, from, to, j);
}

struct Arranged {
  const u16* x;  // [tokens, stride] bf16
  u8* image;     // [tokens / 64 rounded up to even, cols / 128, IMAGE_BYTES]
  u32 stride;
  u32 cols;
  u32 format;
  u32 unused;
};

struct ArrangeParams {
  Arranged inputs[MAX_JOBS];
  u32 tokens;
  u32 unused;
};

// grid (images of tokens, the most column blocks, inputs)
extern "C" __global__ void __launch_bounds__(256) arrange(const __grid_constant__ ArrangeParams p) {
  wait_for_inputs();
  const Arranged& input = p.inputs[blockIdx.z];
  const u32 blocks = input.cols / BLOCK, block = blockIdx.y;
  if (block >= blocks) return;
  const u32 token = blockIdx.x * IMAGE_TOKENS + threadIdx.x / 4;
  const u16* from = token < p.tokens ? input.x + u64(token) * input.stride + block * BLOCK : nullptr;
  arrange_token(input.format, from, input.image + (u64(blockIdx.x) * blocks + block) * IMAGE_BYTES);
}

struct ArrangeExpertsParams {
  const u16* x;            // [tokens, cols] with `order`, else [places, cols]
  const u32* order;        // [places] assignment of a place, or null
  const u32* bounds;       // of GroupParams
  const u32* tile_expert;
  const u32* tile_first;
  const u32* totals;
  u8* image;               // [tiles of 64 places, cols / 128, IMAGE_BYTES]
  u32 cols;
  u32 top_k;
  u32 format;
  u32 unused;
};

// grid (tiles of 64 places, column blocks)
extern "C" __global__ void __launch_bounds__(256) arrange_experts(const __grid_constant__ ArrangeExpertsParams p) {
  wait_for_inputs();
  const u32 tile = blockIdx.x, block = blockIdx.y;
  if (tile >= p.totals[1]) return;
  const u32 place = p.tile_first[tile] + threadIdx.x / 4;
  const bool is_inside = place < p.bounds[p.tile_expert[tile] + 1];
  const u32 row = !is_inside ? 0 : p.order ? p.order[place] / p.top_k : place;
  const u16* from = is_inside ? p.x + u64(row) * p.cols + block * BLOCK : nullptr;
  arrange_token(p.format, from, p.image + (u64(tile) * (p.cols / BLOCK) + block) * IMAGE_BYTES);
}

// ---- a tile ----

// Shared memory: rings of weights and of inputs, and the totals.
template <class F>
struct Wide {
  static constexpr int SCALES_AT = TILE_ROWS * F::BLOCK_BYTES;  // of groups of 32, 4 a row
  static constexpr int WEIGHTS = SCALES_AT + (F::UNIT_K == 128 ? TILE_ROWS * 4 : 0);
  static constexpr int SCALE_AT = 2 * IMAGE_BYTES;  // of the tile of weights, float32
  static constexpr int INPUTS = SCALE_AT + 128;
  static constexpr int WEIGHT_STAGES = F::BLOCK_BYTES == 64 ? 7 : 512 / F::BLOCK_BYTES, INPUT_STAGES = 3;
  static constexpr int INPUTS_AT = WEIGHT_STAGES * WEIGHTS, TOTALS_AT = INPUTS_AT + INPUT_STAGES * INPUTS;
  static constexpr int TOTALS = TILE_ROWS * WIDE_TOKENS * 4;
  static constexpr int BARRIERS_AT = TOTALS_AT + TOTALS;
  static constexpr int BYTES = BARRIERS_AT + 16 * (WEIGHT_STAGES + INPUT_STAGES);
  static_assert(BYTES <= 227 << 10, "a block has no more");
};

// A tile: rows `row`.. of `m`, `count` tokens.
struct Tile {
  Matrix m;
  const u8* image;  // of the first 64 tokens; those of the next follow
  void* y;          // of row 0 and the tile's first token
  u64 y_stride;
  u32 row;
  u32 count;
  u32 y_f32;
};

// one thread
template <class F>
__device__ __forceinline__ void feed_inputs(const Tile& tile, u32 base, Ring<Wide<F>::INPUT_STAGES>& ring) {
  using W = Wide<F>;
  const u32 blocks = tile.m.cols / BLOCK, images = tile.count > IMAGE_TOKENS ? 2 : 1;
  float scale = tile_scale(tile.m, tile.row, 0);
  for (u32 block = 0; block < blocks; block++, ring.advance()) {
    const u32 stage = base + W::INPUTS_AT + ring.stage * W::INPUTS;
    ring.wait_empty();
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(stage + W::SCALE_AT), "f"(scale) : "memory");
    arrive_expecting(ring.full(), images * IMAGE_BYTES);
    for (u32 i = 0; i < images; i++)
      copy_bulk(stage + i * IMAGE_BYTES, tile.image + (u64(i) * blocks + block) * IMAGE_BYTES, IMAGE_BYTES,
                ring.full());
    if (block + 1 < blocks) scale = tile_scale(tile.m, tile.row, block + 1);
  }
}

// one warpgroup; rows beyond the matrix are copies of the last
template <class F>
__device__ __forceinline__ void feed_weights(const Tile& tile, u32 base, Ring<Wide<F>::WEIGHT_STAGES>& ring) {
  using W = Wide<F>;
  constexpr u32 CHUNKS = F::BLOCK_BYTES / 16, ROWS = 128 / CHUNKS;  // of a row; at a time
  const u32 thread = threadIdx.x % 128, row = thread / CHUNKS, chunk = thread % CHUNKS, last = tile.m.rows - 1;
  const u64 bytes = row_bytes<F>(tile.m.cols);
  const u8* from = tile.m.data + u64(min(tile.row + row, last)) * bytes + chunk * 16;
  const u64 stride = tile.row + TILE_ROWS <= tile.m.rows ? ROWS * bytes : 0;
  const u8* scales = tile.m.scales + u64(min(tile.row + thread, last)) * (tile.m.cols / 32);
  const u32 to = base + row * F::BLOCK_BYTES + (chunk ^ (F::WEIGHT_FLIP * (row & 1))) * 16;
  const u32 blocks = tile.m.cols / BLOCK;
  for (u32 block = 0; block < blocks; block++, ring.advance()) {
    const u32 stage = ring.stage * W::WEIGHTS;
    ring.wait_empty();
    const u8* p = from;
#pragma unroll
    for (u32 i = 0; i < CHUNKS; i++) {
      if (stride == 0)
        p = tile.m.data + u64(min(tile.row + row + i * ROWS, last)) * bytes + chunk * 16 + block * F::BLOCK_BYTES;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + stage + i * (ROWS * F::BLOCK_BYTES)), "l"(p));
      p += stride;
    }
    from += F::BLOCK_BYTES;
    if constexpr (F::UNIT_K == 128) {
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(base + stage + W::SCALES_AT + thread * 4),
                   "l"(scales));
      scales += 4;
    }
    arrive_with_copies(ring.full());
  }
}

// 16 bytes of two weight rows as they are stored, and their scales: F::STEPS steps of a thread
struct Unit {
  uint4 low, high;
  u32 low_scale, high_scale;
};

// unit `unit` of a block for rows `row` and `row` + 8
template <class F>
__device__ __forceinline__ void load_unit(const u8* stage, u32 row, int unit, Unit& u) {
  const u32 quad = threadIdx.x % 4, chunk = (unit * 4 + quad) ^ (F::WEIGHT_FLIP * (row & 1));
  const u8* from = stage + row * F::BLOCK_BYTES + chunk * 16;
  u.low = *reinterpret_cast<const uint4*>(from);
  u.high = *reinterpret_cast<const uint4*>(from + 8 * F::BLOCK_BYTES);
  if constexpr (F::UNIT_K == 128) {
    const u8* scales = stage + Wide<F>::SCALES_AT + row * 4 + quad;
    u.low_scale = F::scale(scales[0]);
    u.high_scale = F::scale(scales[32]);
  }
}

// N tokens. Each step's weights are decoded two steps ahead, while the unit is at work. `again` describes the tile once
// more, so that no register holds it through the loop.
template <class F, int N, class Again>
__device__ __forceinline__ void consume(u32 blocks, u8* shared, u32 base, Ring<Wide<F>::WEIGHT_STAGES>& weights,
                                        Ring<Wide<F>::INPUT_STAGES>& inputs, Again again) {
  using W = Wide<F>;
  constexpr int VALUES = N / 2, STEPS = BLOCK / 16, AHEAD = 2;  // values of a thread, steps of a block
  const u32 thread = threadIdx.x % 128, lane = thread % 32, group = threadIdx.x / 128;
  const u32 row = group * 64 + thread / 32 * 16 + lane / 4;
  float* totals = reinterpret_cast<float*>(shared + W::TOTALS_AT) + group * (W::TOTALS / 8) + thread;
  float acc[VALUES], part[VALUES];
#pragma unroll
  for (int i = 0; i < VALUES; i++) acc[i] = part[i] = 0.0f;
  u32 a[2 * AHEAD][4];
  Unit unit;
  auto decode = [&](int step) {
    F::a(step % F::STEPS, unit.low, unit.high, unit.low_scale, unit.high_scale, a[step % (2 * AHEAD)]);
  };
  auto load = [&](int which) { load_unit<F>(shared + weights.stage * W::WEIGHTS, row, which, unit); };
  weights.wait_full();
  load(0);
#pragma unroll
  for (int s = 0; s < AHEAD; s++) {
    decode(s);
    if ((s + 1) % F::STEPS == 0) load((s + 1) / F::STEPS);
  }
  auto one_block = [&](u32 block, bool is_last) {
    inputs.wait_full();
    const u32 stage = W::INPUTS_AT + inputs.stage * W::INPUTS, empty = inputs.empty();
    const float scale = *reinterpret_cast<const float*>(shared + stage + W::SCALE_AT);
    const u64 b = step_inputs(base + stage);
    inputs.advance();
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      products_begin();
      step(part, a[s % (2 * AHEAD)], b + s * (STEP_BYTES >> 4), s > 0);
      products_commit();
      const int next = (s + AHEAD) % STEPS;
      if (is_last && s + AHEAD >= STEPS) continue;
      products_wait<AHEAD>();
      decode(next);
      if ((next + 1) % F::STEPS) continue;
      if (next + 1 == STEPS) {
        release(weights.empty());
        weights.advance();
        if (is_last) continue;
        weights.wait_full();
      }
      load((next + 1) % STEPS / F::STEPS);
    }
    products_wait<0>();
    release(empty);
#pragma unroll
    for (int i = 0; i < VALUES; i++) acc[i] = fmaf(part[i], scale, acc[i]);
    if (is_last || block % (SLICE / BLOCK) == SLICE / BLOCK - 1) {
      const bool is_first = block < SLICE / BLOCK;
#pragma unroll
      for (int i = 0; i < VALUES; i++) {
        const float sum = __fadd_rn(is_first ? 0.0f : totals[i * 128], __fmul_rn(acc[i], F::FACTOR));
        if (!is_last) totals[i * 128] = sum;
        acc[i] = is_last ? sum : 0.0f;
      }
    }
  };
  for (u32 block = 0; block + 1 < blocks; block++) one_block(block, false);
  one_block(blocks - 1, true);

  Tile tile;
  again(tile);
  // acc[4 t + 2 h + j]: row `row` + 8 h, token 8 t + 2 (lane%4) + j
  const u32 rows = tile.m.rows - min(tile.row, tile.m.rows);
  u16* const narrow = static_cast<u16*>(tile.y);
  const bool is_plain = tile.y_f32 || tile.y_stride % 8 || reinterpret_cast<u64>(tile.y) % 16 || rows % 8;
  if (is_plain) {
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
      const u32 r = row + i / 2 % 2 * 8, token = i / 4 * 8 + lane % 4 * 2 + i % 2;
      if (r >= rows || token >= tile.count) continue;
      const u64 at = token * tile.y_stride + tile.row + r;
      if (tile.y_f32)
        static_cast<float*>(tile.y)[at] = acc[i];
      else
        narrow[at] = bf16_bits(acc[i]);
    }
    return;
  }
  // [N tokens, 64 rows] in the place of the totals, 16-byte chunks turned by token
  u8* const staging = shared + W::TOTALS_AT + group * (W::TOTALS / 2);
  const u32 staged = shared_address(staging);
  meet(group);
#pragma unroll
  for (int t = 0; t < N / 8; t += 2) {
    const u32 token = (t + lane / 16) * 8 + lane % 8, chunk = thread / 32 * 2 + lane / 8 % 2;
    const float* v = acc + 4 * t;
    store_transposed(staged + token * 128 + (chunk ^ (token & 7)) * 16, bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]),
                     bf16_pair(v[4], v[5]), bf16_pair(v[6], v[7]));
  }
  meet(group);
#pragma unroll
  for (int i = 0; i < N / 16; i++) {
    const u32 token = i * 16 + thread / 8, chunk = thread % 8, r = group * 64 + chunk * 8;
    const uint4 v = *reinterpret_cast<const uint4*>(staging + token * 128 + (chunk ^ (token & 7)) * 16);
    if (r < rows && token < tile.count) *reinterpret_cast<uint4*>(narrow + token * tile.y_stride + tile.row + r) = v;
  }
  meet(group);
}

// Walks over the tiles that `at(index, tile)` describes; it returns false for those that are none.
template <class F, class At>
__device__ __forceinline__ void walk(u32 tiles, u8* shared, At at) {
  using W = Wide<F>;
  const u32 base = shared_address(shared), barriers = base + W::BARRIERS_AT;
  Ring<W::WEIGHT_STAGES> weights(barriers);
  Ring<W::INPUT_STAGES> inputs(barriers + 16 * W::WEIGHT_STAGES);
  if (threadIdx.x == 0) {
    weights.init(128, 8 * WARP);  // threads; warps
    inputs.init(1, 8 * WARP);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  Tile tile;
  if (threadIdx.x >= 256) {
    give_registers<40>();
    for (u32 i = blockIdx.x; i < tiles; i += gridDim.x) {
      if (!at(i, tile)) continue;
      if (threadIdx.x < 384)
        feed_weights<F>(tile, base, weights);
      else if (threadIdx.x == 384)
        feed_inputs<F>(tile, base, inputs);
    }
    return;
  }
  take_registers<216>();
  for (u32 i = blockIdx.x; i < tiles; i += gridDim.x) {
    if (!at(i, tile)) continue;
    const u32 blocks = tile.m.cols / BLOCK, count = tile.count;
    auto again = [&](Tile& tile) { at(i, tile); };
    if (count > 96)
      consume<F, 128>(blocks, shared, base, weights, inputs, again);
    else if (count > 64)
      consume<F, 96>(blocks, shared, base, weights, inputs, again);
    else if (count > 32)
      consume<F, 64>(blocks, shared, base, weights, inputs, again);
    else
      consume<F, 32>(blocks, shared, base, weights, inputs, again);
  }
}

// ---- dense ----

struct WideJob {
  Matrix weight;
  const u8* image;
  void* y;  // [tokens, y_stride] bf16 or float32
  u32 y_stride;
  u32 y_f32;
  u32 first_tile;  // number of row tiles of the jobs before
  u32 unused;
};

struct WideParams {
  WideJob jobs[MAX_JOBS];
  u32 count;
  u32 tokens;
  u32 row_tiles;  // of all jobs
  u32 unused;
};

// blocks at work at the same time share BAND row tiles, so that what they read fits the L2 cache
constexpr u32 BAND = 12;

template <class F>
__device__ __forceinline__ void linear_wide(const WideParams& p, u8* shared) {
  wait_for_inputs();
  const u32 token_tiles = (p.tokens + WIDE_TOKENS - 1) / WIDE_TOKENS;
  walk<F>(p.row_tiles * token_tiles, shared, [&](u32 i, Tile& tile) {
    const u32 band = i / (BAND * token_tiles), within = i % (BAND * token_tiles);
    const u32 width = min(BAND, p.row_tiles - band * BAND);
    const u32 row_tile = band * BAND + within % width, token_tile = within / width;
    u32 j = p.count - 1;
    while (j > 0 && p.jobs[j].first_tile > row_tile) j--;
    const WideJob& job = p.jobs[j];
    const u32 first = token_tile * WIDE_TOKENS;
    tile.m = job.weight;
    tile.image = job.image + u64(token_tile) * 2 * (job.weight.cols / BLOCK) * IMAGE_BYTES;
    tile.y = static_cast<u8*>(job.y) + u64(first) * job.y_stride * (job.y_f32 ? 4 : 2);
    tile.y_stride = job.y_stride;
    tile.row = (row_tile - job.first_tile) * TILE_ROWS;
    tile.count = min(p.tokens - first, u32(WIDE_TOKENS));
    tile.y_f32 = job.y_f32;
    return true;
  });
}

extern "C" __global__ void __launch_bounds__(512, 1) linear_wide_e4m3(const __grid_constant__ WideParams p) {
  extern __shared__ __align__(128) u8 shared[];
  linear_wide<E4m3>(p, shared);
}
extern "C" __global__ void __launch_bounds__(512, 1) linear_wide_bf16(const __grid_constant__ WideParams p) {
  extern __shared__ __align__(128) u8 shared[];
  linear_wide<Bf16>(p, shared);
}

// ---- experts ----

struct ExpertWideParams {
  const u8* const* data[2];    // [experts] weights of each expert: w1 and w3, or w2
  const u8* const* scales[2];  // [experts]
  const u8* image;             // [tiles of 64 places, cols / 128, IMAGE_BYTES]
  const u32* bounds;           // of GroupParams
  const u32* tile_expert;
  const u32* tile_first;
  const u32* totals;
  u16* y;  // [places, halves * rows] bf16
  u32 halves;
  u32 rows;  // a multiple of 128
  u32 cols;
  u32 format;
};

// pairs of tiles of 64 places of one expert, and the last one alone
template <class F>
__device__ __forceinline__ void expert_wide(const ExpertWideParams& p, u8* shared) {
  wait_for_inputs();
  const u32 row_tiles = p.halves * p.rows / TILE_ROWS;
  walk<F>(p.totals[1] * row_tiles, shared, [&](u32 i, Tile& tile) {
    const u32 place_tile = i / row_tiles, column = i % row_tiles * TILE_ROWS, half = column / p.rows;
    const u32 expert = p.tile_expert[place_tile], first = p.tile_first[place_tile], begin = p.bounds[expert];
    if ((first - begin) / IMAGE_TOKENS % 2) return false;
    tile.m = Matrix{p.data[half][expert], p.scales[half][expert], p.rows, p.cols, 0, p.format};
    tile.image = p.image + u64(place_tile) * (p.cols / BLOCK) * IMAGE_BYTES;
    tile.row = column % p.rows;
    tile.y_stride = p.halves * p.rows;
    tile.y = p.y + first * tile.y_stride + half * p.rows;
    tile.count = min(p.bounds[expert + 1] - first, u32(WIDE_TOKENS));
    tile.y_f32 = 0;
    return true;
  });
}

extern "C" __global__ void __launch_bounds__(512, 1) expert_wide_e2m1(const __grid_constant__ ExpertWideParams p) {
  extern __shared__ __align__(128) u8 shared[];
  expert_wide<E2m1>(p, shared);
}
extern "C" __global__ void __launch_bounds__(512, 1) expert_wide_e4m3(const __grid_constant__ ExpertWideParams p) {
  extern __shared__ __align__(128) u8 shared[];
  expert_wide<E4m3>(p, shared);
}

#endif
