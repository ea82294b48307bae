// Sparse attention over the window and the chosen compressed entries, with a sink per head, inverse rotation and an
// optional E4M3 rounding of the output (src/backend/cpu/attention.rs). Keys are values: one row serves as both.
//
// A block takes HEADS heads of one query and walks over tiles of KEYS rows: first the window, oldest first, then the
// entries; a tile never mixes them. Rows are read from their pages as stored, the next tile's into registers while this
// one is used, and decoded to bfloat16 in shared memory. Scores are split over the warps by heads and keys, the output by
// its 512 columns (all heads), so HEADS * 512 accumulators lie in registers.
//
// Blocks of 16 and of 64 heads have tiles of the same keys and the same order of sums: the same bits.
//
// attend_*: one block a query and head block, all tiles in order (prefill). attend_split_*: tiles are cut into at most
// MAX_SPLITS runs, by the number of tiles alone, and `attend_join` adds the runs in order (decode).
// Grid (head blocks, rows, runs). Shared memory: attention_bytes. Portable; 64 heads need 157 KB a block.
#include "attention.cuh"

template <int HEADS, int KEYS, int WARPS>
struct Shape {
  static constexpr int PITCH = HEAD_DIM + 8;  // of q and keys, in values: 8 rows hit all banks
  static constexpr int S_PITCH = KEYS + 4, P_PITCH = KEYS + 8;
  static constexpr int Q = 0, K = Q + HEADS * PITCH * 2, S = K + KEYS * PITCH * 2, P = S + HEADS * S_PITCH * 4;
  static constexpr int FADE = P + HEADS * P_PITCH * 2, BYTES = FADE + HEADS * 4;
};

// Eight codes of one block to eight bfloat16.
__device__ __forceinline__ uint4 decode8(u64 codes, u32 scale) {
  u32 odd, even, v[4];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    e4m3_pairs(u32(codes >> (32 * i)), odd, even);
    v[2 * i] = bf16_mul(__byte_perm(even, odd, 0x5410), scale);
    v[2 * i + 1] = bf16_mul(__byte_perm(even, odd, 0x7632), scale);
  }
  return make_uint4(v[0], v[1], v[2], v[3]);
}

template <int HEADS, int KEYS, int WARPS, bool SPLIT>
__device__ __forceinline__ void attend(const AttentionParams& p) {
  using L = Shape<HEADS, KEYS, WARPS>;
  constexpr int THREADS = WARPS * 32;
  constexpr int PER_KEY = THREADS / KEYS;                    // threads that load one row
  constexpr int CODES = 56 / PER_KEY, ROPES = 16 / PER_KEY;  // 8-byte pieces of a thread
  constexpr int ROW_TILES = HEADS / 16, SCORE_TILES = ROW_TILES * (KEYS / 8) / WARPS;
  constexpr int PER_HEAD = THREADS / HEADS, SHARE = KEYS / PER_HEAD;  // softmax: threads of a head, keys of a thread
  constexpr int COLUMNS = HEAD_DIM / WARPS, COLUMN_TILES = COLUMNS / 8;
  constexpr int BLOCK_WARPS = ACT_BLOCK / COLUMNS;  // warps that share a block of the E4M3 output
  extern __shared__ __align__(128) u8 shared[];
  u16* const keys = reinterpret_cast<u16*>(shared + L::K);
  float* const scores = reinterpret_cast<float*>(shared + L::S);
  u16* const probabilities = reinterpret_cast<u16*>(shared + L::P);
  float* const fades = reinterpret_cast<float*>(shared + L::FADE);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, quad = lane % 4;
  const u32 row = blockIdx.y, first_head = blockIdx.x * HEADS;
  const u32 index = p.sequence[row];
  const Sequence s = p.sequences[index];
  const u32 position = s.start + row - s.first_row;
  const Tiles t = tiles_of<KEYS>(p, row, position);
  const u32 begin = SPLIT ? blockIdx.z * t.per_run : 0, end = SPLIT ? min(begin + t.per_run, t.total) : t.total;
  if (begin >= end) return;

  // rows of a tile: thread / PER_KEY, pieces thread % PER_KEY + PER_KEY * i
  u64 codes[CODES], ropes[ROPES], scales = 0;
  auto load = [&](u32 tile) {
    const u32 i = thread / PER_KEY, j = thread % PER_KEY;
    const bool is_window = tile < t.window_tiles;
    const u32 at = (is_window ? tile : tile - t.window_tiles) * KEYS + i;
    const u8* from = nullptr;
    if (is_window && at < t.in_window) {
      const u32 q = t.first + at;
      from = q >= s.start ? p.staged + u64(s.first_row + q - s.start) * ROW_BYTES
                          : p.ring.row(index, q % p.window, PAGE_ROWS, ROW_BYTES);
    } else if (!is_window && at < t.entries) {
      const u32 entry = p.selected ? p.selected[u64(row) * p.width + at] : at;
      from = p.entries.row(index, entry, p.ratio == 4 ? PAGE_ROWS : NARROW_ROWS, ROW_BYTES);
    }
    const u64* words = reinterpret_cast<const u64*>(from);
#pragma unroll
    for (int c = 0; c < CODES; c++) codes[c] = from ? words[c * PER_KEY + j] : 0;
#pragma unroll
    for (int c = 0; c < ROPES; c++) ropes[c] = from ? words[56 + c * PER_KEY + j] : 0;
    scales = from ? words[72] : 0;  // zeros: a row of zeros
  };
  auto store = [&] {
    const int i = thread / PER_KEY, j = thread % PER_KEY;
    u16* to = keys + i * L::PITCH;
#pragma unroll
    for (int c = 0; c < CODES; c++) {
      const int piece = c * PER_KEY + j;
      const u32 scale = e8m0_pair(u8(scales >> (8 * (c * PER_KEY / 8))));
      *reinterpret_cast<uint4*>(to + piece * 8) = decode8(codes[c], scale);
    }
#pragma unroll
    for (int c = 0; c < ROPES; c++) *reinterpret_cast<u64*>(to + NOPE_DIM + (c * PER_KEY + j) * 4) = ropes[c];
  };

  load(begin);
  for (int i = thread; i < HEADS * HEAD_DIM / 8; i += THREADS) {
    const u32 head = i / (HEAD_DIM / 8), c = i % (HEAD_DIM / 8);
    uint4 v = make_uint4(0, 0, 0, 0);
    if (first_head + head < p.heads)
      v = reinterpret_cast<const uint4*>(p.q + (u64(row) * p.heads + first_head + head) * HEAD_DIM)[c];
    *reinterpret_cast<uint4*>(shared + L::Q + head * L::PITCH * 2 + c * 16) = v;
  }

  const int score_row = warp % ROW_TILES * 16, score_key = warp / ROW_TILES * SCORE_TILES * 8;
  const u32 q_address = shared_address(shared) + L::Q + ((score_row + lane % 16) * L::PITCH + lane / 16 * 8) * 2;
  // one load gives operand B of two tiles of 8 keys, or of two steps of one tile
  const int b_key = SCORE_TILES == 2 ? lane % 8 + lane / 16 * 8 : lane % 8;
  const int b_column = SCORE_TILES == 2 ? lane / 8 % 2 * 8 : lane / 8 * 8;
  const u32 k_address = shared_address(keys) + ((score_key + b_key) * L::PITCH + b_column) * 2;
  const u32 v_address = shared_address(keys) + (lane % 16 * L::PITCH + warp * COLUMNS + lane / 16 * 8) * 2;
  const u32 p_address = shared_address(probabilities) + (lane % 16 * L::P_PITCH + lane / 16 * 8) * 2;

  float out[ROW_TILES][COLUMN_TILES][4] = {};
  float top = minus_infinity(), sum = 0.0f;  // of head thread / PER_HEAD
  for (u32 tile = begin; tile < end; tile++) {
    __syncthreads();
    store();
    __syncthreads();
    if (tile + 1 < end) load(tile + 1);

    float part[SCORE_TILES][4] = {};
#pragma unroll 2
    for (int step = 0; step < HEAD_DIM / 16; step += 2) {
      u32 a[2][4], b[2][4];
      load_matrices(a[0], q_address + step * 32);
      load_matrices(a[1], q_address + (step + 1) * 32);
      load_matrices(b[0], k_address + step * 32);
      if constexpr (SCORE_TILES == 2) {
        load_matrices(b[1], k_address + (step + 1) * 32);
#pragma unroll
        for (int j = 0; j < 2; j++) {
          mma(part[0], a[j], b[j][0], b[j][1]);
          mma(part[SCORE_TILES - 1], a[j], b[j][2], b[j][3]);
        }
      } else {
        mma(part[0], a[0], b[0][0], b[0][1]);
        mma(part[0], a[1], b[0][2], b[0][3]);
      }
    }
    const u32 valid = tile < t.window_tiles ? t.in_window - tile * KEYS : t.entries - (tile - t.window_tiles) * KEYS;
#pragma unroll
    for (int n = 0; n < SCORE_TILES; n++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int key = score_key + n * 8 + quad * 2 + j % 2, head = score_row + lane / 4 + j / 2 * 8;
        scores[head * L::S_PITCH + key] = key < valid ? part[n][j] * 0.04419417382415922f : minus_infinity();
      }
    __syncthreads();

    {
      const int head = thread / PER_HEAD, first = thread % PER_HEAD * SHARE;
      float v[SHARE];
      float highest = top;
#pragma unroll
      for (int i = 0; i < SHARE; i++) {
        v[i] = scores[head * L::S_PITCH + first + i];
        highest = v[i] > highest ? v[i] : highest;
      }
#pragma unroll
      for (int step = PER_HEAD / 2; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(ALL, highest, step);
        highest = other > highest ? other : highest;
      }
      const float fade = expf(top - highest);
#pragma unroll
      for (int i = 0; i < SHARE; i++) v[i] = expf(v[i] - highest);
      // four keys, then pairs of neighbours: one order, however many threads share a head
      float mine = (v[0] + v[1]) + (v[2] + v[3]);
      if constexpr (SHARE == 8) mine += (v[4] + v[5]) + (v[6] + v[7]);
#pragma unroll
      for (int step = 1; step < PER_HEAD; step *= 2) mine += __shfl_xor_sync(ALL, mine, step);
      sum = sum * fade + mine;
      top = highest;
#pragma unroll
      for (int i = 0; i < SHARE; i += 2)
        *reinterpret_cast<u32*>(probabilities + head * L::P_PITCH + first + i) = bf16_pair(v[i], v[i + 1]);
      if (first == 0) fades[head] = fade;
    }
    __syncthreads();

#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
      const float low = fades[m * 16 + lane / 4], high = fades[m * 16 + lane / 4 + 8];
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++) {
        out[m][n][0] *= low;
        out[m][n][1] *= low;
        out[m][n][2] *= high;
        out[m][n][3] *= high;
      }
    }
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) {
      u32 a[ROW_TILES][4];
#pragma unroll
      for (int m = 0; m < ROW_TILES; m++) load_matrices(a[m], p_address + (m * 16 * L::P_PITCH + step * 16) * 2);
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; n += 2) {
        u32 b[4];
        load_matrices_transposed(b, v_address + (step * 16 * L::PITCH + n * 8) * 2);
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
          mma(out[m][n], a[m], b[0], b[1]);
          mma(out[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  if constexpr (SPLIT) {
    const u64 run = (u64(row) * MAX_SPLITS + blockIdx.z) * p.heads + first_head;
    if (thread % PER_HEAD == 0 && first_head + thread / PER_HEAD < p.heads)
      p.part_sums[run + thread / PER_HEAD] = make_float2(top, sum);
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const u32 head = m * 16 + lane / 4 + half * 8;
        if (first_head + head >= p.heads) continue;
        float* to = p.part_out + (run + head) * HEAD_DIM + warp * COLUMNS + quad * 2;
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++)
          *reinterpret_cast<float2*>(to + n * 8) = make_float2(out[m][n][half * 2], out[m][n][half * 2 + 1]);
      }
    return;
  }

  // normalise, rotate back, round: staged where the queries were, so that whole rows are written
  __syncthreads();
  {
    const int head = thread / PER_HEAD;
    const float sink = p.sink[min(first_head + head, p.heads - 1)];
    if (thread % PER_HEAD == 0) fades[head] = sum + expf(sink - top);
  }
  __syncthreads();
  float* const magnitudes = scores;  // [HEADS, WARPS]
#pragma unroll
  for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int head = m * 16 + lane / 4 + half * 8;
      const float total = fades[head];
      u32 bits = 0;
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++) {
        float a = round_bf16(out[m][n][half * 2] / total), b = round_bf16(out[m][n][half * 2 + 1] / total);
        if (warp * COLUMNS >= NOPE_DIM) {
          float2 turn = p.turns[u64(row) * (ROPE_DIM / 2) + (warp * COLUMNS - NOPE_DIM) / 2 + n * 4 + quad];
          turn.y = -turn.y;
          rotate(turn, a, b);
        }
        bits = max(bits, max(magnitude_bits(a), magnitude_bits(b)));
        out[m][n][half * 2] = a;
        out[m][n][half * 2 + 1] = b;
      }
      bits = warp_max<4>(bits);
      if (quad == 0) magnitudes[head * WARPS + warp] = __uint_as_float(bits);
    }
  __syncthreads();
#pragma unroll
  for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int head = m * 16 + lane / 4 + half * 8;
      u32 bits = 0;
#pragma unroll
      for (int w = 0; w < BLOCK_WARPS; w++)
        bits = max(bits, __float_as_uint(magnitudes[head * WARPS + warp / BLOCK_WARPS * BLOCK_WARPS + w]));
      const float scale = e4m3_scale(__uint_as_float(bits)), inverse = 1.0f / scale;
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++) {
        float v[2] = {out[m][n][half * 2], out[m][n][half * 2 + 1]};
        if (p.quantise) {
#pragma unroll
          for (int i = 0; i < 2; i++)
            v[i] = scale != scale ? scale : round_e4m3(clamp_to(v[i] * inverse, 448.0f)) * scale;
        }
        const int column = warp * COLUMNS + n * 8 + quad * 2;
        *reinterpret_cast<u32*>(shared + L::Q + (head * L::PITCH + column) * 2) = bf16_pair(v[0], v[1]);
      }
    }
  __syncthreads();
  for (int i = thread; i < HEADS * HEAD_DIM / 8; i += THREADS) {
    const u32 head = i / (HEAD_DIM / 8), c = i % (HEAD_DIM / 8);
    if (first_head + head < p.heads)
      reinterpret_cast<uint4*>(p.out + (u64(row) * p.heads + first_head + head) * HEAD_DIM)[c] =
          *reinterpret_cast<const uint4*>(shared + L::Q + head * L::PITCH * 2 + c * 16);
  }
}

#define ATTEND(name, heads, keys, warps, blocks, split) \
  extern "C" __global__ void __launch_bounds__(warps * 32, blocks) name(const __grid_constant__ AttentionParams p) { \
    wait_for_inputs(); \
    attend<heads, keys, warps, split>(p); \
  }
ATTEND(attend_16, 16, 64, 8, 2, false)
ATTEND(attend_32, 32, 32, 8, 1, false)
ATTEND(attend_64, 64, 64, 16, 1, false)
ATTEND(attend_split_16, 16, 64, 8, 2, true)
ATTEND(attend_split_32, 32, 32, 8, 1, true)
ATTEND(attend_split_64, 64, 64, 16, 1, true)

struct JoinParams {
  AttentionParams attention;
  u32 keys;  // of a tile of the launch before
};

// grid (heads, rows), 128 threads of 4 columns
extern "C" __global__ void __launch_bounds__(128) attend_join(const __grid_constant__ JoinParams j) {
  wait_for_inputs();
  const AttentionParams& p = j.attention;
  const u32 head = blockIdx.x, row = blockIdx.y, thread = threadIdx.x;
  const Sequence s = p.sequences[p.sequence[row]];
  const u32 position = s.start + row - s.first_row;
  const Tiles t = j.keys == 64 ? tiles_of<64>(p, row, position) : tiles_of<32>(p, row, position);
  const u32 runs = (t.total + t.per_run - 1) / t.per_run;
  const float2* sums = p.part_sums + u64(row) * MAX_SPLITS * p.heads + head;
  float top = minus_infinity();
  for (u32 r = 0; r < runs; r++) {
    const float m = sums[r * p.heads].x;
    top = m > top ? m : top;
  }
  float total = 0.0f, v[4] = {};
  for (u32 r = 0; r < runs; r++) {
    const float2 run = sums[r * p.heads];
    const float weight = expf(run.x - top);
    const float4 part = *reinterpret_cast<const float4*>(
        p.part_out + ((u64(row) * MAX_SPLITS + r) * p.heads + head) * HEAD_DIM + thread * 4);
    total += run.y * weight;
    v[0] += part.x * weight;
    v[1] += part.y * weight;
    v[2] += part.z * weight;
    v[3] += part.w * weight;
  }
  total += expf(p.sink[head] - top);
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] = round_bf16(v[i] / total);
  if (thread >= NOPE_DIM / 4) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float2 turn = p.turns[u64(row) * (ROPE_DIM / 2) + (thread - NOPE_DIM / 4) * 2 + i];
      turn.y = -turn.y;
      rotate(turn, v[2 * i], v[2 * i + 1]);
    }
  }
  if (p.quantise) {  // a warp holds a block of 128
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) bits = max(bits, magnitude_bits(v[i]));
    const float scale = e4m3_scale(__uint_as_float(warp_max(bits))), inverse = 1.0f / scale;
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = scale != scale ? scale : round_e4m3(clamp_to(v[i] * inverse, 448.0f)) * scale;
  }
  *reinterpret_cast<uint2*>(p.out + (u64(row) * p.heads + head) * HEAD_DIM + thread * 4) =
      make_uint2(bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]));
}
