// Mixture of experts: router, grouping by expert, grouped products, SwiGLU, sum (src/backend/cpu/moe.rs).
//
// An assignment is token * top_k + choice; a place is its position when assignments are sorted by expert, then by token.
// Grouping is one launch: every block counts all assignments (integer counters in shared memory, so the result has no
// order), and block e writes the places of expert e. Products take tiles of one expert's places; their sums have the
// order of product.cuh, so a row's bits do not depend on what shares the batch. A token's experts are added in order of
// id. An idle row chooses the expert behind the last, which is nobody's work: its places are behind all others. Portable.
#include "one.cuh"

constexpr int MAX_EXPERTS = 512;
constexpr int MAX_TOP_K = 16;

struct RouteParams {
  const float* logits;       // [tokens, experts]
  const float* bias;         // [experts], or null with `table`
  const long long* table;    // [vocab, top_k] expert of a token id, or null with `bias`
  const u32* tokens;         // [tokens] ids
  u32* ids;                  // [tokens, top_k], best first
  float* weights;            // [tokens, top_k]
  u32 count;                 // tokens
  u32 experts;
  u32 top_k;
  float scale;
};

// one warp a token, 4 a block
extern "C" __global__ void __launch_bounds__(128) route(const __grid_constant__ RouteParams p) {
  wait_for_inputs();
  constexpr int PER_LANE = MAX_EXPERTS / 32;
  const u32 token = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (token >= p.count) return;
  const float* logits = p.logits + u64(token) * p.experts;
  auto affinity = [](float z) { return sqrtf(z > 20.0f ? z : log1pf(expf(z))); };
  u32 chosen = 0;  // of lane i: choice i
  if (p.tokens[token] == IDLE) {
    chosen = p.experts;
  } else if (p.table) {
    if (lane < p.top_k) chosen = u32(p.table[u64(p.tokens[token]) * p.top_k + lane]);
  } else {
    u32 rank[PER_LANE];  // orders like the value, NaN as minus infinity; 0 when taken or absent
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const u32 e = i * 32 + lane;
      rank[i] = 0;
      if (e < p.experts) {
        float v = affinity(logits[e]) + p.bias[e];
        if (v != v) v = minus_infinity();
        const u32 bits = __float_as_uint(v + 0.0f);  // minus zero equals zero
        rank[i] = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
      }
    }
    for (u32 choice = 0; choice < p.top_k; choice++) {
      u32 best = 0, at = 0;
#pragma unroll
      for (int i = 0; i < PER_LANE; i++)
        if (rank[i] > best) best = rank[i], at = i * 32 + lane;  // the lowest of this lane
      const u32 highest = warp_max(best);
      const u32 winner = __reduce_min_sync(ALL, best == highest ? at : ALL);
#pragma unroll
      for (int i = 0; i < PER_LANE; i++)
        if (winner == i * 32 + lane) rank[i] = 0;
      if (lane == choice) chosen = winner;
    }
  }
  const float mine = lane < p.top_k ? affinity(logits[min(chosen, p.experts - 1)]) : 0.0f;
  float sum = 0.0f;
  for (u32 i = 0; i < p.top_k; i++) sum += __shfl_sync(ALL, mine, i);
  if (lane < p.top_k) {
    p.ids[u64(token) * p.top_k + lane] = chosen;
    p.weights[u64(token) * p.top_k + lane] = mine / sum * p.scale;
  }
}

struct GroupParams {
  const u32* ids;     // [count] expert of each assignment; `experts` and above: nobody's
  u32* order;         // [count] assignment of each place
  u32* places;        // [count] place of each assignment
  u32* bounds;        // [experts + 1] first place of each expert, and of nobody's
  u32* active;        // [experts] experts with assignments, ascending
  u32* active_first;  // [experts + 1] first place of each of them, and of nobody's behind the last
  u32* active_eights; // [experts + 1] eights of places, begun ones too, of those before each of them, and of all
  u32* tile_expert;   // [ceil(count/64) + experts]
  u32* tile_first;    // same: first place of a tile of up to 64
  u32* totals;        // [3] active experts, tiles, eights
  u32 count;
  u32 experts;
};

// grid experts + 1: the last block has what is nobody's
extern "C" __global__ void __launch_bounds__(256) group(const __grid_constant__ GroupParams p) {
  wait_for_inputs();
  __shared__ u32 counts[MAX_EXPERTS + 1];
  __shared__ u32 warp_counts[8];
  // places, active experts, tiles and eights of the experts below
  __shared__ __align__(16) u32 before[4];
  const u32 expert = blockIdx.x, thread = threadIdx.x;
  for (u32 e = thread; e <= p.experts; e += 256) counts[e] = 0;
  if (thread < 4) before[thread] = 0;
  __syncthreads();
  for (u32 i = thread; i < p.count; i += 256) atomicAdd(&counts[min(p.ids[i], p.experts)], 1u);
  __syncthreads();
  for (u32 e = thread; e < expert; e += 256) {
    atomicAdd(&before[0], counts[e]);
    atomicAdd(&before[1], u32(counts[e] > 0));
    atomicAdd(&before[2], (counts[e] + TILE_TOKENS - 1) / TILE_TOKENS);
    atomicAdd(&before[3], (counts[e] + FEW_TOKENS - 1) / FEW_TOKENS);
  }
  __syncthreads();
  const u32 first = before[0], own = counts[expert], tiles = (own + TILE_TOKENS - 1) / TILE_TOKENS;
  const bool is_expert = expert < p.experts;
  if (thread == 0) {
    p.bounds[expert] = first;
    if (is_expert && own > 0) p.active[before[1]] = expert;
    if (!is_expert || own > 0) p.active_first[before[1]] = first, p.active_eights[before[1]] = before[3];
    if (!is_expert) {
      p.totals[0] = before[1];
      p.totals[1] = before[2];
      p.totals[2] = before[3];
    }
  }
  for (u32 t = thread; is_expert && t < tiles; t += 256) {
    p.tile_expert[before[2] + t] = expert;
    p.tile_first[before[2] + t] = first + t * TILE_TOKENS;
  }
  if (own == 0) return;
  u32 next = first;
  for (u32 base = 0; base < p.count; base += 256) {
    const u32 i = base + thread;
    const bool is_own = i < p.count && min(p.ids[i], p.experts) == expert;
    const u32 votes = __ballot_sync(ALL, is_own);
    if (thread % 32 == 0) warp_counts[thread / 32] = __popc(votes);
    __syncthreads();
    u32 place = next;
    for (u32 w = 0; w < 8; w++) {
      if (w < thread / 32) place += warp_counts[w];
      next += warp_counts[w];
    }
    if (is_own) {
      place += __popc(votes & ((1u << (thread % 32)) - 1));
      p.order[place] = i;
      p.places[i] = place;
    }
    __syncthreads();
  }
}

// One grouped product: `halves` matrices a expert, whose outputs stand side by side.
struct ExpertParams {
  const u8* const* data[2];    // [experts] weights of each expert: w1 and w3, or w2
  const u8* const* scales[2];  // [experts]
  const u16* x;                // [tokens, cols] with `order`, else [places, cols]; bf16
  const u32* order;            // [places] assignment of a place, or null
  const u32* bounds;           // of GroupParams
  const u32* active;
  const u32* active_first;
  const u32* active_eights;
  const u32* tile_expert;
  const u32* tile_first;
  const u32* totals;
  u16* y;  // [places, halves * rows] bf16
  u32 halves;
  u32 rows;  // a multiple of 128
  u32 cols;
  u32 top_k;
  u32 format;
  u32 experts;
  Job beside;  // one token: a dense product, which the first `beside.first_tile` blocks have
  u32 inputs;  // rows of x
};

__device__ __forceinline__ Matrix expert_matrix(const ExpertParams& p, u32 expert, u32 half) {
  return Matrix{p.data[half][expert], p.scales[half][expert], p.rows, p.cols, 0, p.format};
}

__device__ __forceinline__ u32 input_row(const ExpertParams& p, u32 place) {
  return p.order ? p.order[place] / p.top_k : place;
}

// Few places an expert, eight at a time. The work, tiles of all active experts' matrices times eights of places, is dealt out
// evenly; where each matrix has many blocks, in whole blocks, so that none has parts of two. A block goes through its tiles
// of an expert once for each eight, so that weights come from the L2 cache from the second time on. IS_ONE: for a single
// token, place by place.
template <class F, bool IS_ONE>
__device__ __forceinline__ void expert_few(const ExpertParams& p, u8* shared) {
  const u32 others = p.beside.first_tile, lane = threadIdx.x % 32, tiles = p.rows / TILE_HEIGHT, span = p.halves * tiles;
  if (IS_ONE && blockIdx.x < others) return stream_job(p.beside, blockIdx.x, others, shared);
  const u32 grid = gridDim.x - others, index = blockIdx.x - others;
  if (index == 0)  // the addresses of weights, which nobody has read lately
    for (u32 half = 0; half < p.halves; half++)
      for (u32 e = threadIdx.x * 16; e < p.experts; e += blockDim.x * 16)
        prefetch(p.data[half] + e), prefetch(p.scales[half] + e);
  wait_for_inputs();
  // asked for at once, for up to 32 experts
  const u32 some_expert = lane < p.experts ? p.active[lane] : 0, some_first = lane <= p.experts ? p.active_first[lane] : 0;
  const u32 some_eights = lane <= p.experts ? p.active_eights[lane] : 0;
  const u32 active = p.totals[0], matrices = active * p.halves;
  const auto at = [&](const u32* table, u32 some, u32 i) {
    const u32 held = __shfl_sync(ALL, some, i % 32);
    return i < 32 ? held : table[i];
  };

  u32 begin, end;  // of the work
  if (matrices * 4 <= grid && p.totals[2] == active) {
    const u32 blocks = grid / max(matrices, 1u), own = index / blocks, block = index % blocks;
    if (own >= matrices) return;
    begin = own * tiles + tiles * block / blocks;
    end = own * tiles + tiles * (block + 1) / blocks;
  } else {
    const u64 all = u64(p.totals[2]) * span;
    begin = all * index / grid;
    end = all * (index + 1) / grid;
  }
  if (begin >= end) return;
  u32 own = 0;  // the expert that it begins with
  for (u32 base = 0; base < active; base += 32) {
    const u32 i = base + lane, eights = base == 0 ? some_eights : i < active ? p.active_eights[i] : 0;
    own += __popc(__ballot_sync(ALL, i < active && eights * span <= begin));
  }
  for (own--; own < active; own++) {
    const u32 before = at(p.active_eights, some_eights, own) * span;
    if (before >= end) return;
    const u32 eights = at(p.active_eights, some_eights, own + 1) - before / span, expert = at(p.active, some_expert, own);
    const u32 place0 = at(p.active_first, some_first, own), last = at(p.active_first, some_first, own + 1);
    const u32 stop = min((end - before + eights - 1) / eights, span), width = p.halves * p.rows;
    for (u32 tile = begin > before ? (begin - before + eights - 1) / eights : 0; tile < stop;) {
      const u32 half = tile / tiles, count = min(stop, (half + 1) * tiles) - tile;
      const Matrix m = expert_matrix(p, expert, half);
      for (u32 base = place0; base < last; base += IS_ONE ? 1 : FEW_TOKENS) {
        u16* const y = p.y + u64(base) * width + half * p.rows;
        if constexpr (IS_ONE) {
          const u16* x = p.x + u64(p.inputs == 1 ? 0 : input_row(p, base)) * p.cols;
          stream_one<F>(m, tile % tiles, count, x, shared, [] {}, [&](u32 row, float v) { y[row] = bf16_bits(v); });
        } else {
          const u32 place = base + lane / 4;
          const u16* x = place < last ? p.x + u64(input_row(p, place)) * p.cols : nullptr;
          stream_rows<F>(m, tile % tiles, count, x, min(last - base, u32(FEW_TOKENS)), shared,
                         [&](u32 token, u32 row, float v) { y[u64(token) * width + row] = bf16_bits(v); });
        }
      }
      tile += count;
    }
  }
}

#define EXPERT_FEW(name, F, IS_ONE)                                                                                 \
  extern "C" __global__ void __launch_bounds__(32 * FEW_WARPS, 2) name(const __grid_constant__ ExpertParams p) { \
    extern __shared__ __align__(128) u8 shared[];                                                                   \
    expert_few<F, IS_ONE>(p, shared);                                                                               \
  }
EXPERT_FEW(expert_one_e2m1, E2m1, true)
EXPERT_FEW(expert_one_e4m3, E4m3, true)
EXPERT_FEW(expert_few_e2m1, E2m1, false)
EXPERT_FEW(expert_few_e4m3, E4m3, false)

template <class F>
__device__ __forceinline__ void expert_tile(const ExpertParams& p, u8* shared) {
  const u32 expert = p.tile_expert[blockIdx.y], base = p.tile_first[blockIdx.y], end = p.bounds[expert + 1];
  const u32 column = blockIdx.x * TILE_ROWS, half = column / p.rows, first_row = column % p.rows;
  const Matrix m = expert_matrix(p, expert, half);
  const u32 own = base + threadIdx.x % TILE_TOKENS, x_row = own < end ? input_row(p, own) : NO_TOKEN;
  float total[2][4][4] = {};
  many_tokens<F>(m, first_row, p.x, p.cols, x_row, 0, (p.cols + SLICE - 1) / SLICE, shared, total);
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 32, warp_token = threadIdx.x / 128 * 32;
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int t = 0; t < 4; t++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const u32 row = warp_row + i * 16 + lane / 4 + j / 2 * 8;
        const u32 place = base + warp_token + t * 8 + lane % 4 * 2 + j % 2;
        if (place < end) p.y[u64(place) * (p.halves * p.rows) + column + row] = bf16_bits(total[i][t][j]);
      }
}

// grid (halves * rows / 128, ceil(places/64) + experts): prefill
extern "C" __global__ void __launch_bounds__(256, 2) expert_many_e2m1(const __grid_constant__ ExpertParams p) {
  wait_for_inputs();
  extern __shared__ __align__(128) u8 shared[];
  if (blockIdx.y < p.totals[1]) expert_tile<E2m1>(p, shared);
}
extern "C" __global__ void __launch_bounds__(256, 2) expert_many_e4m3(const __grid_constant__ ExpertParams p) {
  wait_for_inputs();
  extern __shared__ __align__(128) u8 shared[];
  if (blockIdx.y < p.totals[1]) expert_tile<E4m3>(p, shared);
}

// Rows of routed experts, then rows of the shared one.
struct SwigluParams {
  const u16* gate_up[2];  // [rows, 2 * width] bf16
  u16* out[2];            // [rows, width] bf16
  const float* weights;   // [assignments], of the first kind
  const u32* order;       // [rows] assignment of a row of the first kind
  u32 rows;               // of the first kind
  u32 width;              // a multiple of 128
  float limit;            // 0: none
  u32 quantise;           // round to the E4M3 grid as the input of the next product
};

// grid rows of both kinds
extern "C" __global__ void __launch_bounds__(256) swiglu(const __grid_constant__ SwigluParams p) {
  wait_for_inputs();
  const u32 kind = blockIdx.x >= p.rows;
  const u64 row = blockIdx.x - (kind ? p.rows : 0);
  const float weight = kind ? 1.0f : p.weights[p.order[row]];
  const float limit = p.limit > 0.0f ? p.limit : -minus_infinity();
  const uint4* gate = reinterpret_cast<const uint4*>(p.gate_up[kind] + row * 2 * p.width);
  const uint4* up = gate + p.width / 8;
  u16* const out = p.out[kind] + row * p.width;
  for (u32 base = 0; base < p.width / 8; base += 256) {
    const u32 g = base + threadIdx.x;
    const bool inside = g < p.width / 8;
    float v[8] = {}, u[8] = {};
    if (inside) {
      unpack8(gate[g], v);
      unpack8(up[g], u);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float clamped = v[i] > limit ? limit : v[i];
      v[i] = round_bf16(weight * (clamped / (1.0f + expf(-clamped)) * clamp_to(u[i], limit)));
    }
    if (p.quantise) round_act_block(v);
    if (inside) reinterpret_cast<uint4*>(out)[g] = pack8(v);
  }
}

struct CombineParams {
  const u16* routed;   // [places, width] bf16
  const u16* shared;   // [tokens, width] bf16
  const u32* places;   // [tokens, top_k] place of each assignment
  const u32* used;     // [1]: places from here on are nobody's
  u16* out;            // [tokens, width] bf16
  u32 width;
  u32 top_k;
};

// grid (tokens, ceil(width / 1024)); all rows of a token are asked for at once
extern "C" __global__ void __launch_bounds__(128) combine(const __grid_constant__ CombineParams p) {
  constexpr u32 AT_ONCE = 8;
  wait_for_inputs();
  const u64 token = blockIdx.x;
  const u32 g = blockIdx.y * 128 + threadIdx.x, lane = threadIdx.x % 32;
  const bool inside = g < p.width / 8;
  const u32 mine = lane < p.top_k ? p.places[token * p.top_k + lane] : ALL, used = *p.used;
  uint4 last = {};
  if (inside) last = reinterpret_cast<const uint4*>(p.shared + token * p.width)[g];
  u32 rank = 0;  // ascending places are ascending experts
  for (u32 i = 0; i < p.top_k; i++) rank += __shfl_sync(ALL, mine, i) < mine;
  float sum[8] = {}, v[8];
  for (u32 base = 0; base < p.top_k; base += AT_ONCE) {
    uint4 rows[AT_ONCE];
    bool valid[AT_ONCE];
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) {
      const u32 has = __ballot_sync(ALL, lane < p.top_k && rank == base + i);
      const u32 place = __shfl_sync(ALL, mine, has ? __ffs(has) - 1 : 0);
      valid[i] = has && place < used && inside;
      if (valid[i]) rows[i] = reinterpret_cast<const uint4*>(p.routed + u64(place) * p.width)[g];
    }
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) {
      if (!valid[i]) continue;
      unpack8(rows[i], v);
#pragma unroll
      for (int j = 0; j < 8; j++) sum[j] += v[j];
    }
  }
  if (!inside) return;
  unpack8(last, v);
#pragma unroll
  for (int j = 0; j < 8; j++) sum[j] += v[j];
  reinterpret_cast<uint4*>(p.out + token * p.width)[g] = pack8(sum);
}
