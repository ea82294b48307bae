// Products of up to eight tokens of an expert, bound by the weights' bytes: weights flow through shared memory.
//
// A block takes a range of tiles of 16 rows, its 8 warps the slices of a tile, or of several tiles where there are fewer
// slices. Every warp has a ring of its own that `cp.async` fills ahead, across tiles, and begins to fill before the
// inputs are there; so nobody waits for another warp but where the slices' sums are added. The inputs of a warp's slice
// stay in registers (one.cuh: one token). Order of sums: product.cuh.
#pragma once
#include "product.cuh"

constexpr int FEW_TOKENS = 8;
constexpr int FEW_WARPS = 8;
constexpr int RING_STAGES = 5;
constexpr int TILE_HEIGHT = 16;                   // rows
constexpr int STAGE_WEIGHTS = TILE_HEIGHT * 128;  // two units a row, in all formats
constexpr int RING_STAGE = STAGE_WEIGHTS + 128;   // and scales of E2M1, 8 bytes a row
constexpr int RING_BYTES = FEW_WARPS * RING_STAGES * RING_STAGE;

// Where a warp is in a block's tiles. They are taken in batches, whose sums fit in shared memory; of a batch first all
// tiles of slices 0 to 7, then of 8 to 15.
struct Place {
  u32 begin;  // first turn of the batch
  u32 turn;
  u32 pass;
};

struct Deal {  // how a block's tiles and slices are dealt out to its warps
  u32 tiles, slices, lanes, turns, passes, batch;

  __device__ __forceinline__ Deal(u32 tiles, u32 cols, u32 tokens, u32 sums_bytes) : tiles(tiles) {
    slices = (cols + SLICE - 1) / SLICE;
    lanes = slice_lanes(slices);
    const u32 at_once = FEW_WARPS / lanes;
    turns = (tiles + at_once - 1) / at_once;
    passes = (slices + lanes - 1) / lanes;
    batch = max(sums_bytes / (slices * tokens * TILE_HEIGHT * 4) / at_once, 1u);
  }
  __device__ __forceinline__ u32 end(u32 begin) const { return min(begin + batch, turns); }
  __device__ __forceinline__ void next(Place& p) const {
    if (++p.turn < end(p.begin)) return;
    if (++p.pass < passes) {
      p.turn = p.begin;
    } else {
      p.pass = 0;
      p.begin = p.turn;
    }
  }
};

// Copies of one warp: stages of 16 rows times 128 bytes, in the order in which it takes them.
template <class F>
struct Ring {
  static constexpr u32 SLICE_BYTES = SLICE / BLOCK * F::BLOCK_BYTES;
  const Matrix& m;
  const Deal& deal;
  u32 first_tile, own_tile, own_slice, pitch;
  Place ahead;
  u32 left;             // stages of the item that is being copied
  u32 column;           // byte within rows
  const u8* from;       // of row lane/8
  const u8* scales;     // E2M1: of row lane/2
  u32 place;            // of this lane's piece in a stage

  __device__ __forceinline__ Ring(const Matrix& m, const Deal& deal, u32 first_tile)
      : m(m), deal(deal), first_tile(first_tile), ahead{}, left(0) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    own_tile = warp / deal.lanes, own_slice = warp % deal.lanes;
    pitch = u32(row_bytes<F>(m.cols));
    place = lane / 8 * 128 + (lane % 8 ^ (4 * (lane / 8 & 1))) * 16;
    open();
  }
  __device__ __forceinline__ void open() {
    const u32 lane = threadIdx.x % 32;
    while (ahead.begin < deal.turns) {
      const u32 tile = ahead.turn * (FEW_WARPS / deal.lanes) + own_tile, slice = ahead.pass * deal.lanes + own_slice;
      if (tile < deal.tiles && slice < deal.slices) {
        const u32 row = (first_tile + tile) * TILE_HEIGHT;
        column = slice * SLICE_BYTES;
        left = (min(SLICE_BYTES, pitch - column) + 127) / 128;
        from = m.data + u64(row + lane / 8) * pitch + column + lane % 8 * 16;
        if (F::UNIT_K == 128) scales = m.scales + u64(row + lane / 2) * (m.cols / 32);
        return;
      }
      deal.next(ahead);
    }
  }
  __device__ __forceinline__ void fill(u32 slot) {
    if (left > 0) {
      const u32 lane = threadIdx.x % 32;
      // half of the last stage of E2M1 may be behind the row's end
      const bool inside = F::UNIT_K != 128 || column + lane % 8 * 16 < pitch;
#pragma unroll
      for (u32 i = 0; i < 4; i++) copy_async(slot + place + i * 512, from + u64(pitch) * (4 * i), inside);
      if constexpr (F::UNIT_K == 128)
        copy_word(slot + STAGE_WEIGHTS + lane * 4, scales + min(column / 16 + lane % 2 * 4, m.cols / 32 - 4));
      from += 128;
      column += 128;
      if (--left == 0) {
        deal.next(ahead);
        open();
      }
    }
    commit_copies();
  }
};

__device__ __forceinline__ u32 dynamic_shared_bytes() {
  u32 bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  return bytes;
}

// Adds the slices of `tiles` tiles in order: put(tile, output, sum) of sums [tiles, slices, outputs].
template <class Put>
__device__ __forceinline__ void add_slices(const float* sums, u32 tiles, u32 slices, u32 outputs, Put put) {
  for (u32 i = threadIdx.x; i < tiles * outputs; i += 32 * FEW_WARPS) {
    const u32 tile = i / outputs, output = i % outputs;
    const float* from = sums + tile * slices * outputs + output;
    float sum = 0.0f;
#pragma unroll 8
    for (u32 s = 0; s < slices; s++) sum = __fadd_rn(sum, from[s * outputs]);
    put(tile, output, sum);
  }
}

// Inputs of the slice that begins at column k, as F's products take them.
template <class F>
__device__ __forceinline__ void load_inputs(const u16* x, u32 k, u32 cols, u32 (&in)[64]) {
  const u32 quad = threadIdx.x % 4;
#pragma unroll
  for (int unit = 0; unit < SLICE / F::UNIT_K; unit++) {
    u32 words[F::X_WORDS] = {};
    if (x && k + unit * F::UNIT_K < cols) {
#pragma unroll
      for (int w = 0; w < F::X_WORDS; w += 4) {
        const uint4 v = *reinterpret_cast<const uint4*>(x + k + unit * F::UNIT_K + quad * (F::X_WORDS * 2) + 2 * w);
        words[w] = v.x, words[w + 1] = v.y, words[w + 2] = v.z, words[w + 3] = v.w;
      }
    }
#pragma unroll
    for (int s = 0; s < F::STEPS; s++)
      F::b(s, words, in[unit * F::X_WORDS + 2 * s], in[unit * F::X_WORDS + 2 * s + 1]);
  }
}

// Sums of one tile and slice, from the ring.
template <class F>
__device__ __forceinline__ void tile_product(Ring<F>& ring, u32& slot, u32& before, u32 base, const Matrix& m, u32 slice,
                                             const u32 (&in)[64], u32 row, u32 codes, float (&acc)[4]) {
  constexpr u32 STAGE_COLS = 2 * F::UNIT_K, SLICE_STAGES = SLICE / STAGE_COLS;
  constexpr bool TWO_CHAINS = F::UNIT_K == 128;
  const u32 lane = threadIdx.x % 32, quad = lane % 4, group = lane / 4;
  const u32 at = group * 128 + (quad ^ (4 * (group & 1))) * 16;
  float part[2][4] = {};
#pragma unroll
  for (u32 stage = 0; stage < SLICE_STAGES; stage++) {
    if (slice * SLICE + stage * STAGE_COLS >= m.cols) break;
    wait_copies<RING_STAGES - 2>();
    __syncwarp();
    uint4 wl[2], wh[2];
    u32 sl[2] = {}, sh[2] = {};
    wl[0] = load_shared16(slot + at);
    wh[0] = load_shared16(slot + at + 1024);
    wl[1] = load_shared16(slot + (at ^ 64));
    wh[1] = load_shared16(slot + (at ^ 64) + 1024);
    if constexpr (F::UNIT_K == 128) {
#pragma unroll
      for (u32 u = 0; u < 2; u++) {
        sl[u] = F::scale(load_shared1(slot + STAGE_WEIGHTS + group * 8 + u * 4 + quad));
        sh[u] = F::scale(load_shared1(slot + STAGE_WEIGHTS + 64 + group * 8 + u * 4 + quad));
      }
    }
    ring.fill(before);
    before = slot;
    slot = slot == base + (RING_STAGES - 1) * RING_STAGE ? base : slot + RING_STAGE;
    float scale = 1.0f;
    if constexpr (F::UNIT_K == 64) {
      if (m.format == E4M3_F32)
        scale = tile_scale(m, row, slice * (SLICE / BLOCK) + stage);
      else
        scale = e8m0_value(u8(codes >> 8 * stage));
    }
    u32 a[4];
    if constexpr (TWO_CHAINS) {
#pragma unroll
      for (int s = 0; s < F::STEPS; s++)
#pragma unroll
        for (int u = 0; u < 2; u++) {
          F::a(s, wl[u], wh[u], sl[u], sh[u], a);
          const u32 x = (stage * 2 + u) * F::X_WORDS + 2 * s;
          mma(part[u], a, in[x], in[x + 1]);
        }
    } else {
#pragma unroll
      for (int u = 0; u < 2; u++)
#pragma unroll
        for (int s = 0; s < F::STEPS; s++) {
          F::a(s, wl[u], wh[u], 0, 0, a);
          const u32 x = (stage * 2 + u) * F::X_WORDS + 2 * s;
          mma(part[0], a, in[x], in[x + 1]);
        }
    }
    // blocks of 128 columns that end here
#pragma unroll
    for (u32 u = 0; u < (TWO_CHAINS ? 2 : 1); u++) {
      if ((stage + 1) * STAGE_COLS % BLOCK != 0) continue;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        acc[j] = fmaf(part[u][j], scale, acc[j]);
        part[u][j] = 0.0f;
      }
    }
  }
}

// E8M0 scales of the four blocks of a slice
__device__ __forceinline__ u32 slice_codes(const Matrix& m, u32 row, u32 slice) {
  if (m.format != E4M3_E8M0) return 0;
  const u32 blocks = m.cols / BLOCK, first = slice * (SLICE / BLOCK);
  const u8* at = m.scales + u64((m.first_row + row) / 128) * blocks + first;
  if (blocks % 4 == 0) return *reinterpret_cast<const u32*>(at);
  u32 codes = 0;
  for (u32 i = 0; i < 4 && first + i < blocks; i++) codes |= u32(at[i]) << 8 * i;
  return codes;
}

// store(token, row, sum) for rows of tiles first_tile + [0, tiles) and up to eight tokens; m.rows is a multiple of 16. `x`:
// inputs of token lane/4, or null. `shared`: RING_BYTES, and the rest of the block's for sums.
template <class F, class Store>
__device__ __forceinline__ void stream_rows(const Matrix& m, u32 first_tile, u32 tiles, const u16* x, u32 tokens, u8* shared,
                                            Store store) {
  const Deal deal(tiles, m.cols, tokens, dynamic_shared_bytes() - RING_BYTES);
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane % 4, group = lane / 4;
  const u32 at_once = FEW_WARPS / deal.lanes;
  const u32 base = shared_address(shared) + warp * (RING_STAGES * RING_STAGE);
  float* const sums = reinterpret_cast<float*>(shared + RING_BYTES);

  Ring<F> ring(m, deal, first_tile);
  for (u32 i = 0; i < RING_STAGES - 1; i++) ring.fill(base + i * RING_STAGE);
  u32 slot = base, before = base + (RING_STAGES - 1) * RING_STAGE;

  for (u32 begin = 0; begin < deal.turns; begin += deal.batch) {
    const u32 end = deal.end(begin);
    for (u32 slice = ring.own_slice; slice < deal.slices; slice += deal.lanes) {
      u32 in[64];
      load_inputs<F>(x, slice * SLICE, m.cols, in);
      u32 tile = begin * at_once + ring.own_tile;
      u32 next = tile < tiles ? slice_codes(m, (first_tile + tile) * TILE_HEIGHT, slice) : 0;
#pragma unroll 1
      for (; tile < min(end * at_once, tiles); tile += at_once) {
        const u32 row = (first_tile + tile) * TILE_HEIGHT, codes = next;
        if (tile + at_once < tiles) next = slice_codes(m, row + at_once * TILE_HEIGHT, slice);
        float acc[4] = {};
        tile_product(ring, slot, before, base, m, slice, in, row, codes, acc);
        float* to = sums + ((tile - begin * at_once) * deal.slices + slice) * (tokens * TILE_HEIGHT);
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const u32 token = quad * 2 + j % 2;
          if (token < tokens) to[token * TILE_HEIGHT + group + j / 2 * 8] = acc[j] * F::FACTOR;
        }
      }
    }
    __syncthreads();
    const u32 tile0 = begin * at_once, count = min(end * at_once, tiles) - tile0;
    add_slices(sums, count, deal.slices, tokens * TILE_HEIGHT, [&](u32 tile, u32 output, float sum) {
      store(output / TILE_HEIGHT, (first_tile + tile0 + tile) * TILE_HEIGHT + output % TILE_HEIGHT, sum);
    });
    __syncthreads();
  }
}
