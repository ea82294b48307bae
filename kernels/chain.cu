// Products of prompts on Hopper's asynchronous matrix unit (wgmma): one chain over all columns. Exists for sm_90a alone.
//
// Order of sums: steps of 16 columns in order, each added to one float32 sum; scales are powers of two and part of the
// weights, which become bfloat16 without rounding. So an output's bits depend on its two rows alone, however tiles are
// cut, but they are not those of product.cuh: the engine chooses by a sequence's own new tokens.
//
// linear_chain, expert_chain: as in wide.cu, with the same images, but a warpgroup has up to 128 rows and never waits for
// its sums before the end.
#include "wide.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// ---- a tile ----

// Shared memory: rings of weights and of inputs, then what a warpgroup's outputs pass through. A warpgroup has SUBS times
// 64 rows.
template <class F, int SUBS>
struct Chain {
  static constexpr int ROWS = 128 * SUBS;
  static constexpr int SCALES_AT = ROWS * F::BLOCK_BYTES;  // of groups of 32, 4 a row
  static constexpr int WEIGHTS = SCALES_AT + (F::UNIT_K == 128 ? ROWS * 4 : 0);
  static constexpr int INPUTS = 2 * IMAGE_BYTES, INPUT_STAGES = 3;
  static constexpr int STAGED_TOKENS = 16, STAGED = STAGED_TOKENS * 128;  // of a warpgroup: 64 rows at a time
  static constexpr int WEIGHT_STAGES_FIT = ((226 << 10) - INPUT_STAGES * INPUTS - 2 * STAGED) / WEIGHTS;
  static constexpr int WEIGHT_STAGES = WEIGHT_STAGES_FIT < 7 ? WEIGHT_STAGES_FIT : 7;
  static constexpr int INPUTS_AT = WEIGHT_STAGES * WEIGHTS, STAGED_AT = INPUTS_AT + INPUT_STAGES * INPUTS;
  static constexpr int BARRIERS_AT = STAGED_AT + 2 * STAGED;
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
template <class F, int SUBS>
__device__ __forceinline__ void feed_inputs(const Tile& tile, u32 base, Ring<Chain<F, SUBS>::INPUT_STAGES>& ring) {
  using C = Chain<F, SUBS>;
  const u32 blocks = tile.m.cols / BLOCK, first = min(tile.count, u32(IMAGE_TOKENS)), second = tile.count - first;
  const u32 bytes[2] = {(first + 7) / 8 * GROUP_BYTES, (second + 7) / 8 * GROUP_BYTES};
  for (u32 block = 0; block < blocks; block++, ring.advance()) {
    const u32 stage = base + C::INPUTS_AT + ring.stage * C::INPUTS;
    ring.wait_empty();
    arrive_expecting(ring.full(), bytes[0] + bytes[1]);
    copy_bulk(stage, tile.image + u64(block) * IMAGE_BYTES, bytes[0], ring.full());
    if (second) copy_bulk(stage + IMAGE_BYTES, tile.image + u64(blocks + block) * IMAGE_BYTES, bytes[1], ring.full());
  }
}

// two warps; rows beyond the matrix are copies of the last
constexpr u32 FEEDERS = 64;
template <class F, int SUBS>
__device__ __forceinline__ void feed_weights(const Tile& tile, u32 base, Ring<Chain<F, SUBS>::WEIGHT_STAGES>& ring) {
  using C = Chain<F, SUBS>;
  constexpr u32 CHUNKS = F::BLOCK_BYTES / 16, ROWS = FEEDERS / CHUNKS;  // of a row; at a time
  const u32 thread = threadIdx.x % FEEDERS, row = thread / CHUNKS, chunk = thread % CHUNKS, last = tile.m.rows - 1;
  const u64 bytes = row_bytes<F>(tile.m.cols);
  const u8* from = tile.m.data + u64(min(tile.row + row, last)) * bytes + chunk * 16;
  const u64 stride = tile.row + C::ROWS <= tile.m.rows ? ROWS * bytes : 0;
  const u32 to = base + row * F::BLOCK_BYTES + (chunk ^ (F::WEIGHT_FLIP * (row & 1))) * 16;
  const u32 blocks = tile.m.cols / BLOCK;
  for (u32 block = 0; block < blocks; block++, ring.advance()) {
    const u32 stage = ring.stage * C::WEIGHTS;
    ring.wait_empty();
    const u8* p = from;
#pragma unroll 8
    for (u32 i = 0; i < C::ROWS / ROWS; i++) {
      if (stride == 0)
        p = tile.m.data + u64(min(tile.row + row + i * ROWS, last)) * bytes + chunk * 16 + block * F::BLOCK_BYTES;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + stage + i * (ROWS * F::BLOCK_BYTES)), "l"(p));
      p += stride;
    }
    from += F::BLOCK_BYTES;
    if constexpr (F::UNIT_K == 128) {
#pragma unroll
      for (u32 i = 0; i < C::ROWS / FEEDERS; i++) {
        const u32 r = thread + FEEDERS * i;
        const u8* scales = tile.m.scales + u64(min(tile.row + r, last)) * (tile.m.cols / 32) + block * 4;
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(base + stage + C::SCALES_AT + r * 4), "l"(scales));
      }
    }
    arrive_with_copies(ring.full());
  }
}

// 16 bytes of two weight rows as they are stored, and their scales: F::STEPS steps of a thread
struct Unit {
  uint4 low, high;
  u32 low_scale, high_scale;
};

// unit `unit` of a block for rows `row` and `row` + 8; E4M3 has one scale for all
template <class F, int SUBS>
__device__ __forceinline__ void load_unit(const u8* stage, u32 row, int unit, u32 scale, Unit& u) {
  const u32 quad = threadIdx.x % 4, chunk = (unit * 4 + quad) ^ (F::WEIGHT_FLIP * (row & 1));
  const u8* from = stage + row * F::BLOCK_BYTES + chunk * 16;
  u.low = *reinterpret_cast<const uint4*>(from);
  u.high = *reinterpret_cast<const uint4*>(from + 8 * F::BLOCK_BYTES);
  if constexpr (F::UNIT_K == 128) {
    const u8* scales = stage + Chain<F, SUBS>::SCALES_AT + row * 4 + quad;
    u.low_scale = F::scale(scales[0]);
    u.high_scale = F::scale(scales[32]);
  } else {
    u.low_scale = scale;
  }
}

// E4M3 with its scale: 2^60 is left out so that it fits bfloat16, and 2^120 is what the exponent biases differ by
__device__ __forceinline__ u32 e4m3_multiplier(u32 code) { return min(code + 60u, 255u) * 0x00800080u; }
constexpr float LEFT_OUT = 1152921504606846976.0f;

// operand A of a step of a unit
template <class F>
__device__ __forceinline__ void decode(int step, const Unit& u, u32 (&a)[4]) {
  if constexpr (F::BLOCK_BYTES == 128) {
    const u32 q[2] = {word(u.low, step), word(u.high, step)};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 low = q[i] << 8;
      a[i] = bf16_mul((q[i] & 0x80008000u) | ((q[i] >> 4) & 0x07F007F0u), u.low_scale);
      a[i + 2] = bf16_mul((low & 0x80008000u) | ((low >> 4) & 0x07F007F0u), u.low_scale);
    }
  } else {
    F::a(step, u.low, u.high, u.low_scale, u.high_scale, a);
  }
}

// N tokens. Each step's weights are decoded AHEAD steps before, while the unit is at work. `again` describes the tile once
// more, so that no register holds it through the loop.
template <class F, int SUBS, int N, class Again>
__device__ __forceinline__ void consume(u8* shared, u32 base, Ring<Chain<F, SUBS>::WEIGHT_STAGES>& weights,
                                        Ring<Chain<F, SUBS>::INPUT_STAGES>& inputs, Again again) {
  using C = Chain<F, SUBS>;
  constexpr int VALUES = N / 2, STEPS = BLOCK / 16;  // values of a thread, steps of a block
  constexpr int AHEAD = SUBS == 1 ? 2 : 1;
  constexpr bool HAS_TILES = F::BLOCK_BYTES == 128;             // with a scale each
  const u32 thread = threadIdx.x % 128, lane = thread % 32, group = threadIdx.x / 128;
  const u32 row = group * 64 * SUBS + thread / 32 * 16 + lane / 4;
  Tile tile;
  again(tile);
  const u32 blocks = tile.m.cols / BLOCK;
  const u8* codes = nullptr;
  if (HAS_TILES) codes = tile.m.scales + u64((tile.m.first_row + tile.row + group * 64 * SUBS) / 128) * blocks;
  float acc[SUBS][VALUES];
#pragma unroll
  for (int sub = 0; sub < SUBS; sub++)
#pragma unroll
    for (int i = 0; i < VALUES; i++) acc[sub][i] = 0.0f;
  u32 a[2 * AHEAD][SUBS][4];
  Unit unit[SUBS];
  u32 next_code = HAS_TILES ? codes[0] : 0;
  auto load = [&](int which, u32 multiplier) {
#pragma unroll
    for (int sub = 0; sub < SUBS; sub++)
      load_unit<F, SUBS>(shared + weights.stage * C::WEIGHTS, row + sub * 64, which, multiplier, unit[sub]);
  };
  auto decode_step = [&](int step) {
#pragma unroll
    for (int sub = 0; sub < SUBS; sub++) decode<F>(step % F::STEPS, unit[sub], a[step % (2 * AHEAD)][sub]);
  };
  u32 multiplier = e4m3_multiplier(next_code), before = 0;
  if (HAS_TILES && blocks > 1) next_code = codes[1];
  weights.wait_full();
  load(0, multiplier);
#pragma unroll
  for (int s = 0; s < AHEAD; s++) {
    decode_step(s);
    if ((s + 1) % F::STEPS == 0) load((s + 1) / F::STEPS, multiplier);
  }
  auto one_block = [&](u32 block, bool is_last) {
    inputs.wait_full();
    const u64 b = step_inputs(base + C::INPUTS_AT + inputs.stage * C::INPUTS);
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      products_begin();
#pragma unroll
      for (int sub = 0; sub < SUBS; sub++) step(acc[sub], a[s % (2 * AHEAD)][sub], b + s * (STEP_BYTES >> 4), true);
      products_commit();
      const int next = (s + AHEAD) % STEPS;
      if (is_last && s + AHEAD >= STEPS) continue;
      products_wait<AHEAD>();
      if (s == AHEAD - 1 && block > 0) release(before);  // the steps of the block before have ended
      decode_step(next);
      if ((next + 1) % F::STEPS) continue;
      if (next + 1 == STEPS) {
        release(weights.empty());
        weights.advance();
        if (is_last) continue;
        multiplier = e4m3_multiplier(next_code);
        if (HAS_TILES && block + 2 < blocks) next_code = codes[block + 2];
        weights.wait_full();
      }
      load((next + 1) % STEPS / F::STEPS, multiplier);
    }
    before = inputs.empty();
    inputs.advance();
  };
  for (u32 block = 0; block + 1 < blocks; block++) one_block(block, false);
  one_block(blocks - 1, true);
  products_wait<0>();
  release(before);

  again(tile);
  constexpr float FACTOR = HAS_TILES ? LEFT_OUT : F::FACTOR;
  // acc[sub][4 t + 2 h + j]: row `row` + 64 sub + 8 h, token 8 t + 2 (lane%4) + j
  const u32 rows = tile.m.rows - min(tile.row, tile.m.rows);
  u16* const narrow = static_cast<u16*>(tile.y);
  const bool is_plain = tile.y_f32 || tile.y_stride % 8 || reinterpret_cast<u64>(tile.y) % 16 || rows % 8;
  if (is_plain) {
#pragma unroll
    for (int i = 0; i < SUBS * VALUES; i++) {
      const int v = i % VALUES, sub = i / VALUES;
      const u32 r = row + sub * 64 + v / 2 % 2 * 8, token = v / 4 * 8 + lane % 4 * 2 + v % 2;
      if (r >= rows || token >= tile.count) continue;
      const u64 at = token * tile.y_stride + tile.row + r;
      if (tile.y_f32)
        static_cast<float*>(tile.y)[at] = acc[sub][v] * FACTOR;
      else
        narrow[at] = bf16_bits(acc[sub][v] * FACTOR);
    }
    return;
  }
  // 16 tokens of 64 rows at a time, 16-byte chunks turned by token
  u8* const staging = shared + C::STAGED_AT + group * C::STAGED;
  const u32 staged = shared_address(staging);
#pragma unroll
  for (int sub = 0; sub < SUBS; sub++)
#pragma unroll
    for (int t = 0; t < N / 8; t += 2) {
      const u32 token = lane / 16 * 8 + lane % 8, chunk = thread / 32 * 2 + lane / 8 % 2;
      const float* v = acc[sub] + 4 * t;
      u32 pairs[4];
#pragma unroll
      for (int i = 0; i < 4; i++) pairs[i] = bf16_pair(v[2 * i] * FACTOR, v[2 * i + 1] * FACTOR);
      meet(group);
      store_transposed(staged + token * 128 + (chunk ^ (token & 7)) * 16, pairs[0], pairs[1], pairs[2], pairs[3]);
      meet(group);
      const u32 from = thread / 8, c = thread % 8, r = group * 64 * SUBS + sub * 64 + c * 8, to = t * 8 + from;
      const uint4 out = *reinterpret_cast<const uint4*>(staging + from * 128 + (c ^ (from & 7)) * 16);
      if (r < rows && to < tile.count) *reinterpret_cast<uint4*>(narrow + to * tile.y_stride + tile.row + r) = out;
    }
}

// Walks over the tiles that `at(index, tile)` describes; it returns false for those that are none.
template <class F, int SUBS, class At>
__device__ __forceinline__ void walk(u32 tiles, u8* shared, At at) {
  using C = Chain<F, SUBS>;
  const u32 base = shared_address(shared), barriers = base + C::BARRIERS_AT;
  Ring<C::WEIGHT_STAGES> weights(barriers);
  Ring<C::INPUT_STAGES> inputs(barriers + 16 * C::WEIGHT_STAGES);
  if (threadIdx.x == 0) {
    weights.init(FEEDERS, 8 * WARP);
    inputs.init(1, 8 * WARP);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  Tile tile;
  if (threadIdx.x >= 256) {
    give_registers<56>();
    for (u32 i = blockIdx.x; i < tiles; i += gridDim.x) {
      if (!at(i, tile)) continue;
      if (threadIdx.x < 256 + FEEDERS)
        feed_weights<F, SUBS>(tile, base, weights);
      else if (threadIdx.x == 256 + FEEDERS)
        feed_inputs<F, SUBS>(tile, base, inputs);
    }
    return;
  }
  take_registers<224>();
  for (u32 i = blockIdx.x; i < tiles; i += gridDim.x) {
    if (!at(i, tile)) continue;
    const u32 count = tile.count;
    auto again = [&](Tile& tile) { at(i, tile); };
    if (count > 112)
      consume<F, SUBS, 128>(shared, base, weights, inputs, again);
    else if (count > 96)
      consume<F, SUBS, 112>(shared, base, weights, inputs, again);
    else if (count > 80)
      consume<F, SUBS, 96>(shared, base, weights, inputs, again);
    else if (count > 64)
      consume<F, SUBS, 80>(shared, base, weights, inputs, again);
    else if (count > 32)
      consume<F, SUBS, 64>(shared, base, weights, inputs, again);
    else
      consume<F, SUBS, 32>(shared, base, weights, inputs, again);
  }
}

// ---- dense ----

struct ChainJob {
  Matrix weight;
  const u8* image;
  void* y;  // [tokens, y_stride] bf16 or float32
  u32 y_stride;
  u32 y_f32;
  u32 first_tile;  // number of row tiles of the jobs before
  u32 unused;
};

struct ChainParams {
  ChainJob jobs[MAX_JOBS];
  u32 count;
  u32 tokens;
  u32 row_tiles;  // of all jobs
  u32 unused;
};

// blocks at work at the same time share BAND row tiles, so that what they read fits the L2 cache
constexpr u32 BAND = 12;

template <class F, int SUBS>
__device__ __forceinline__ void linear_chain(const ChainParams& p, u8* shared) {
  wait_for_inputs();
  const u32 token_tiles = (p.tokens + WIDE_TOKENS - 1) / WIDE_TOKENS;
  walk<F, SUBS>(p.row_tiles * token_tiles, shared, [&](u32 i, Tile& tile) {
    const u32 band = i / (BAND * token_tiles), within = i % (BAND * token_tiles);
    const u32 width = min(BAND, p.row_tiles - band * BAND);
    const u32 row_tile = band * BAND + within % width, token_tile = within / width;
    u32 j = p.count - 1;
    while (j > 0 && p.jobs[j].first_tile > row_tile) j--;
    const ChainJob& job = p.jobs[j];
    const u32 first = token_tile * WIDE_TOKENS;
    tile.m = job.weight;
    tile.image = job.image + u64(token_tile) * 2 * (job.weight.cols / BLOCK) * IMAGE_BYTES;
    tile.y = static_cast<u8*>(job.y) + u64(first) * job.y_stride * (job.y_f32 ? 4 : 2);
    tile.y_stride = job.y_stride;
    tile.row = (row_tile - job.first_tile) * Chain<F, SUBS>::ROWS;
    tile.count = min(p.tokens - first, u32(WIDE_TOKENS));
    tile.y_f32 = job.y_f32;
    return true;
  });
}

extern "C" __global__ void __launch_bounds__(384, 1) linear_chain_e4m3(const __grid_constant__ ChainParams p) {
  extern __shared__ __align__(128) u8 shared[];
  linear_chain<E4m3, 1>(p, shared);
}
extern "C" __global__ void __launch_bounds__(384, 1) linear_chain_bf16(const __grid_constant__ ChainParams p) {
  extern __shared__ __align__(128) u8 shared[];
  linear_chain<Bf16, 1>(p, shared);
}

// ---- experts ----

struct ExpertChainParams {
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
template <class F, int SUBS>
__device__ __forceinline__ void expert_chain(const ExpertChainParams& p, u8* shared) {
  wait_for_inputs();
  constexpr u32 ROWS = Chain<F, SUBS>::ROWS;
  const u32 half_tiles = (p.rows + ROWS - 1) / ROWS, row_tiles = p.halves * half_tiles;
  walk<F, SUBS>(p.totals[1] * row_tiles, shared, [&](u32 i, Tile& tile) {
    const u32 place_tile = i / row_tiles, half = i % row_tiles / half_tiles;
    const u32 expert = p.tile_expert[place_tile], first = p.tile_first[place_tile], begin = p.bounds[expert];
    if ((first - begin) / IMAGE_TOKENS % 2) return false;
    tile.m = Matrix{p.data[half][expert], p.scales[half][expert], p.rows, p.cols, 0, p.format};
    tile.image = p.image + u64(place_tile) * (p.cols / BLOCK) * IMAGE_BYTES;
    tile.row = i % half_tiles * ROWS;
    tile.y_stride = p.halves * p.rows;
    tile.y = p.y + first * tile.y_stride + half * p.rows;
    tile.count = min(p.bounds[expert + 1] - first, u32(WIDE_TOKENS));
    tile.y_f32 = 0;
    return true;
  });
}

extern "C" __global__ void __launch_bounds__(384, 1) expert_chain_e2m1(const __grid_constant__ ExpertChainParams p) {
  extern __shared__ __align__(128) u8 shared[];
  expert_chain<E2m1, 2>(p, shared);
}

#endif
