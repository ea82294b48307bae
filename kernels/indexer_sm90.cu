// The indexer for Hopper: scores of queries on the grid of E2M1 with 8-bit products, and exact top-k among them. What they
// compute stands in indexer.cu. Compiled for sm_90a only.
//
// index_scores_hopper: values of queries and keys are E2M1 times powers of two, so as E4M3, over the largest scale of their
// vector, they are exact unless a block of 32 is 2^13 times smaller than another. A block holds the queries of up to 16 rows
// of a sequence in shared memory. Each of its warpgroups takes pages of 64 keys, by bulk copies several pages ahead, decodes
// them to operand A in registers while the page before is multiplied with all heads, and sums the heads with the matrix
// units too: as a product with ones. It leaves the highest score of every 16 keys, a warp's.
// top_k_hopper: of a row, a block first chooses the k groups of 16 with the highest score in them: the k highest scores are
// there. Groups and scores stand in registers.
#include "hopper.cuh"
#include "indexer.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// ---- scores ----

constexpr u32 TEAMS = 4, STAGES = 4;
constexpr u32 KEY_PAGE = PAGE_ROWS * KEY_BYTES;
constexpr u32 QUERY = 64 * INDEX_DIM, WEIGHTS = 64 * 2;  // bytes of a row's queries and weights in shared memory

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}

// d (64 x 64) = a b + (add ? d : 0), sums of 32 E4M3 values
__device__ __forceinline__ void product_e4m3(float (&d)[32], const u32 (&a)[4], u32 b, bool add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" PLACES_32 "}, {%32, %33, %34, %35}, %36, add, 1, 1;\n}"
      : ACCUMULATORS_32(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor(b)), "r"(u32(add)));
}

// the same for 128 columns
__device__ __forceinline__ void product_e4m3(float (&d)[64], const u32 (&a)[4], u32 b, bool add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" PLACES_64 "}, {%64, %65, %66, %67}, %68, add, 1, 1;\n}"
      : ACCUMULATORS_64(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor(b)), "r"(u32(add)));
}

__device__ __forceinline__ u32 load_word(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ u32 e4m3_pair(float low, float high) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ u32 pick(u32 low, u32 high, u32 selector) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "r"(selector));
  return r;
}

// Products of two heads as the official code stores them: bfloat16, not below zero, times the heads' weights.
__device__ __forceinline__ u32 weighted(float a, float b, u32 weights) {
  u32 relu;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(relu) : "f"(b), "f"(a));  // NaN passes
  return bf16_mul(relu, weights);
}

// Where dimension 32 t + 8 s + i of a vector stands in the products' sums: in step s, at 4 t + i / 2, 16 further if i is
// even. A thread of a quad then decodes the 16 bytes of block t of a key, with one scale.

// One row's queries and weights, each head over a power of two that its weight takes. A thread has 16 dimensions of a head.
__device__ __forceinline__ void place_row(u8* to, u16* weights_to, const u16* q, const u16* weights, u32 heads) {
  const u32 head = threadIdx.x / 8, part = threadIdx.x % 8, block = part / 2;
  const bool exists = head < heads;
  uint4 packed[2] = {};
  if (exists) {
    const uint4* from = reinterpret_cast<const uint4*>(q + head * INDEX_DIM + part * 16);
    packed[0] = from[0];
    packed[1] = from[1];
  }
  float v[2][8];
  u32 largest = 0;
#pragma unroll
  for (int u = 0; u < 2; u++) {
    unpack8(packed[u], v[u]);
#pragma unroll
    for (int i = 0; i < 8; i++) largest = max(largest, magnitude_bits(v[u][i]));
  }
  // exponent of the head's largest value, which becomes 7
  const u32 exponent = max(warp_max<8>(largest) >> 23, 8u);
  const float factor = __uint_as_float((261 - exponent) << 23);
#pragma unroll
  for (int u = 0; u < 2; u++) {
#pragma unroll
    for (int i = 0; i < 8; i++) v[u][i] *= factor;
    const u32 piece = 2 * (2 * (part % 2) + u);
    u8* row = to + head * INDEX_DIM + block * 4;
    const u32 odd = e4m3_pair(v[u][1], v[u][3]) | e4m3_pair(v[u][5], v[u][7]) << 16;
    const u32 even = e4m3_pair(v[u][0], v[u][2]) | e4m3_pair(v[u][4], v[u][6]) << 16;
    *reinterpret_cast<u32*>(row + ((piece ^ head % 8) << 4)) = odd;
    *reinterpret_cast<u32*>(row + ((piece + 1 ^ head % 8) << 4)) = even;
  }
  if (part != 0) return;
  const float weight = exists ? bf16_value(weights[head]) : 0.0f;
  const float scale = __uint_as_float(exponent == 255 ? 0x7FC00000u : (exponent - 7) << 23);  // not finite: NaN
  weights_to[head] = bf16_bits(weight * scale);
}

// The eight magnitudes of E2M1 times 2^(6 - below) as E4M3.
__device__ __forceinline__ void magnitudes(u32 below, u32& low, u32& high) {
  if (below <= 11) {  // all of them normal: exponents are subtracted
    low = 0x6C686000u - below * 0x08080800u;
    high = 0x7C787470u - below * 0x08080808u;
    return;
  }
  const float one = __uint_as_float((133 - min(below, 100u)) << 23);
  low = e4m3_pair(0.0f, 0.5f * one) | e4m3_pair(one, 1.5f * one) << 16;
  high = e4m3_pair(2.0f * one, 3.0f * one) | e4m3_pair(4.0f * one, 6.0f * one) << 16;
}

// Keys lane/4 and lane/4+8 of a warp's 16, from their page in shared memory, to operand A; what their products lack.
__device__ __forceinline__ void decode_keys(u32 page, u32 (&a)[4][4], float (&factor)[2]) {
  const u32 lane = threadIdx.x % 32, quad = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const u32 key = threadIdx.x / 32 % 4 * 16 + half * 8 + lane / 4;
    const u32 row = page + key * KEY_BYTES, at = row + quad * 16;
    const u32 scales = load_word(row + 64), own = scales >> 8 * quad & 255;
    const u32 largest = max(max(scales & 255, scales >> 8 & 255), max(scales >> 16 & 255, scales >> 24));
    factor[half] = __uint_as_float(largest == 255 ? 0x7FC00000u : largest << 23) * 0.015625f;
    u32 low, high;
    magnitudes(largest - own, low, high);
#pragma unroll
    for (int s = 0; s < 4; s++) {
      const u32 codes = load_word(at + s * 4), selector = codes & 0x77777777u;
      const u32 first = pick(low, high, selector), second = pick(low, high, selector >> 16);
      a[s][half] = pick(first, second, 0x7531) | (codes & 0x80808080u);
      a[s][2 + half] = pick(first, second, 0x6420) | (codes << 4 & 0x80808080u);
    }
  }
}

// Rows of a group: ROWS, or as many as it says if that is 0.
template <u32 ROWS>
__device__ __forceinline__ void score(const ScoreParams& p, u8* memory) {
  const u32 base = (shared_address(memory) + 1023) & ~1023u;
  u8* const shared = memory + (base - shared_address(memory));
  const Group group = p.groups[blockIdx.y];  // tables are there before the step's first kernel
  const u32 rows = ROWS > 0 ? ROWS : group.rows;
  const u32 visible = (group.position + rows) / 4, pages = (visible + PAGE_ROWS - 1) / PAGE_ROWS;  // of the last row
  const u32 share = (pages + gridDim.x - 1) / gridDim.x, end = min(pages, (blockIdx.x + 1) * share);
  if (blockIdx.x * share >= end) return wait_for_inputs();
  const u32 team = threadIdx.x / 128, lane = threadIdx.x % 32, quad = lane % 4;
  const u32 at_pages = rows * QUERY, at_weights = at_pages + TEAMS * STAGES * KEY_PAGE;
  const u32 barriers = base + at_weights + rows * WEIGHTS + team * STAGES * 8;
  const u32 ring = base + at_pages + team * STAGES * KEY_PAGE;
  const bool fetches = threadIdx.x % 128 < 32, leads = threadIdx.x % 128 == 0;
  const u32* ids = p.keys.ids + u64(group.sequence) * p.keys.pitch;
  u32 page = blockIdx.x * share + team, next = page;  // and the next to be copied

  // A team's first warp has the ids of 32 pages: a load that is under way would be waited for with those of shared memory.
  u32 id = 0, known = 0;
  auto look_up = [&] {
    if (next + lane * TEAMS < end) id = ids[next + lane * TEAMS];
    known = 0;
  };
  if (leads) {
#pragma unroll
    for (int i = 0; i < STAGES; i++) barrier_init(barriers + i * 8, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    acquire();
  }
  if (fetches) look_up();
  auto fetch = [&](u32 stage) {  // the whole warp
    if (next >= end) return;
    if (known == 32) look_up();
    const u8* from = p.keys.base + u64(__shfl_sync(ALL, id, known++)) * p.keys.page_bytes;
    next += TEAMS;
    if (!leads) return;
    barrier_expect(barriers + stage * 8, KEY_PAGE);
    bulk_copy(ring + stage * KEY_PAGE, from, KEY_PAGE, barriers + stage * 8);
  };
  wait_for_inputs();
  if (fetches) {
#pragma unroll 1
    for (u32 i = 0; i < STAGES; i++) fetch(i);
  }
  if (threadIdx.x < 512) {
    for (u32 i = 0; i < rows; i++) {
      const u64 row = group.first_row + i;
      place_row(shared + i * QUERY, reinterpret_cast<u16*>(shared + at_weights + i * WEIGHTS),
                p.q + row * p.heads * INDEX_DIM, p.weights + row * p.heads, p.heads);
    }
  }
  acquire();
  __syncthreads();

  u32 stage = 0, phase = 0, worst = 0;
  auto take = [&](u32 (&keys)[4][4], float (&factor)[2]) {
    barrier_wait(barriers + stage * 8, phase);
    decode_keys(ring + stage * KEY_PAGE, keys, factor);
    asm volatile("bar.sync %0, 128;" ::"r"(team + 1) : "memory");  // all have read
    if (fetches) fetch(stage);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    phase ^= stage == 0;
  };
  auto read_weights = [&](u32 i, u32 (&w)[8]) {
#pragma unroll
    for (int j = 0; j < 8; j++) w[j] = load_word(base + at_weights + i * WEIGHTS + quad * 4 + j * 16);
  };
  const u32 offset = threadIdx.x / 32 % 4 * 16 + quad % 2 * 8 + lane / 4;
  float* out = p.scores + u64(group.first_row - p.first_row) * p.pitch + offset;
  u16* highest = p.highest + u64(group.first_row - p.first_row) * p.highest_pitch;

  // sums the products of row i, which stand in d from `at` on
  auto finish = [&](u32 i, const float* d, const u32 (&w)[8], const float (&factor)[2]) {
    float sum[4] = {};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float* v = d + 8 * j;
      const u32 terms[4] = {weighted(v[0], v[1], w[2 * j]), weighted(v[2], v[3], w[2 * j]),
                            weighted(v[4], v[5], w[2 * j + 1]), weighted(v[6], v[7], w[2 * j + 1])};
      mma(sum, terms, 0x3F803F80u, 0x3F803F80u);
    }
    const u32 key = page * PAGE_ROWS + offset;
    const u32 pair = bf16_pair(sum[0] * factor[0], sum[2] * factor[1]);
    const float score = __uint_as_float(quad % 2 == 0 ? pair << 16 : pair & 0xFFFF0000u);
    const bool sees = key < (group.position + i + 1) / 4;
    if (sees && quad < 2) out[u64(i) * p.pitch + page * PAGE_ROWS] = score;
    if (sees) worst = max(worst, magnitude_bits(score));
    const u32 most = __reduce_max_sync(ALL, sees ? rank_of(score) : 0);
    if (lane == 0) highest[u64(i) * p.highest_pitch + key / 16] = most >> 16;
  };
  if constexpr (ROWS == 1) {
    u32 keys[2][4][4], w[8];
    float factor[2][2];
    read_weights(0, w);
    const u32 queries = along_columns(uniform(base));
    // one page, and the next one's keys meanwhile
    auto step = [&](const u32 (&mine)[4][4], const float (&f)[2], u32 (&others)[4][4], float (&others_f)[2]) {
      float d[32];
      products_begin();
#pragma unroll
      for (int s = 0; s < 4; s++) product_e4m3(d, mine[s], queries + s * 2, s > 0);
      products_commit();
      if (page + TEAMS < end) take(others, others_f);
      products_wait<0>();
      finish(0, d, w, f);
      page += TEAMS;
    };
    if (page < end) take(keys[0], factor[0]);
    while (page < end) {
      step(keys[0], factor[0], keys[1], factor[1]);
      if (page >= end) break;
      step(keys[1], factor[1], keys[0], factor[0]);
    }
  } else {
    for (; page < end; page += TEAMS) {
      u32 keys[4][4];
      float factor[2];
      take(keys, factor);
      for (u32 i = 0; i < rows; i += 2) {  // two rows at a time; behind an odd number lies something finite or not
        float d[64];
        const u32 queries = along_columns(uniform(base + i * QUERY));
        products_begin();
#pragma unroll
        for (int s = 0; s < 4; s++) product_e4m3(d, keys[s], queries + s * 2, s > 0);
        products_commit();
        u32 w[8];
        read_weights(i, w);
        products_wait<0>();
        finish(i, d, w, factor);
        if (i + 1 == rows) break;
        read_weights(i + 1, w);
        finish(i + 1, d + 32, w, factor);
      }
    }
  }
  if (worst >= 0x7F800000u && p.bad) *p.bad = 1;
}

// grid (parts, groups); shared memory 1024 + rows * (QUERY + WEIGHTS) + TEAMS * STAGES * (KEY_PAGE + 8)
extern "C" __global__ void __launch_bounds__(TEAMS * 128, 1) index_scores_hopper(const __grid_constant__ ScoreParams p) {
  extern __shared__ u8 shared[];
  score<0>(p, shared);
}

// the same where all groups have one row
extern "C" __global__ void __launch_bounds__(TEAMS * 128, 1) index_scores_hopper_one(const __grid_constant__ ScoreParams p) {
  extern __shared__ u8 shared[];
  score<1>(p, shared);
}

// ---- top-k ----

constexpr u32 GROUP = 16;                    // keys whose highest score is known
constexpr u32 THREADS = 1024, VALUES = 16;  // values of a thread at most
constexpr u32 MOST_CHOSEN = THREADS * VALUES / GROUP;

// The block's values stand in registers: place (warp * each + j) * 32 + lane has `values[j]`, ranks of 16 bits, 0 for none.
struct Selection {
  u32 least;  // the k-th highest
  u32 equal;  // how many of those that are equal to it belong to the k
};

// The k-th highest of at least k values that are not below `floor` (at least 1). Their distance from the lowest is cut into
// 256 parts, so that neighbours seldom count in one place, and the part with the k-th again.
__device__ __forceinline__ Selection kth(const u32 (&values)[VALUES], u32 each, u32 k, u32 floor) {
  __shared__ __align__(16) u32 histogram[2][256];
  __shared__ u32 lowest[32], highest[32];
  __shared__ uint2 found;
  const u32 thread = threadIdx.x, lane = thread % 32;
  u32 low = ALL, high = 0;
#pragma unroll
  for (u32 j = 0; j < VALUES; j++) {
    if (j >= each) break;
    if (values[j] >= floor) low = min(low, values[j]), high = max(high, values[j]);
  }
  low = __reduce_min_sync(ALL, low);
  high = __reduce_max_sync(ALL, high);
  if (lane == 0) lowest[thread / 32] = low, highest[thread / 32] = high;
  if (thread < 512) histogram[thread / 256][thread % 256] = 0;
  __syncthreads();
  low = __reduce_min_sync(ALL, lowest[lane]);
  high = __reduce_max_sync(ALL, highest[lane]);
  const u32 bits = 32 - __clz(high - low), shift = bits > 8 ? bits - 8 : 0;
  u32 prefix = 0, wanted = k;
#pragma unroll
  for (int digit = 0; digit < 2; digit++) {
#pragma unroll
    for (u32 j = 0; j < VALUES; j++) {
      if (j >= each) break;
      const u32 v = values[j] - low;
      const bool counts = values[j] >= floor && (digit == 0 || v >> shift == prefix);
      if (counts) atomicAdd(&histogram[digit][255 - (digit == 0 ? v >> shift : v & ((1u << shift) - 1))], 1u);
    }
    __syncthreads();
    if (thread < 32) {  // a lane has eight neighbours, from the highest
      const uint4* from = reinterpret_cast<const uint4*>(histogram[digit]) + lane * 2;
      const uint4 a = from[0], b = from[1];
      const u32 counts[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
      u32 all = 0;
#pragma unroll
      for (int i = 0; i < 8; i++) all += counts[i];
      u32 running = all;
#pragma unroll
      for (u32 step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(ALL, running, step);
        if (lane >= step) running += other;
      }
      u32 before = running - all;
      if (before < wanted && running >= wanted) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
          if (before < wanted && before + counts[i] >= wanted) found = make_uint2(255 - lane * 8 - i, wanted - before);
          before += counts[i];
        }
      }
    }
    __syncthreads();
    const uint2 answer = found;
    wanted = answer.y;
    if (digit == 0) prefix = answer.x;
    else prefix = prefix << shift | answer.x;
    if (shift == 0) break;
  }
  return {low + prefix, wanted};
}

// Calls emit(n, place) for the n-th place of those chosen, in ascending order.
template <class Emit>
__device__ __forceinline__ void choose(const u32 (&values)[VALUES], u32 each, Selection s, Emit emit) {
  __shared__ u32 totals[32];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, before = (1u << lane) - 1;
  u32 mine = 0;  // above and equal
#pragma unroll
  for (u32 j = 0; j < VALUES; j++) {
    if (j >= each) break;
    mine += __popc(__ballot_sync(ALL, values[j] > s.least)) | __popc(__ballot_sync(ALL, values[j] == s.least)) << 16;
  }
  if (lane == 0) totals[warp] = mine;
  __syncthreads();
  const u32 front = __reduce_add_sync(ALL, lane < warp ? totals[lane] : 0);
  u32 above = front & 0xFFFF, equal = front >> 16;
#pragma unroll
  for (u32 j = 0; j < VALUES; j++) {
    if (j >= each) break;
    const u32 higher = __ballot_sync(ALL, values[j] > s.least), same = __ballot_sync(ALL, values[j] == s.least);
    const u32 a = above + __popc(higher & before), e = equal + __popc(same & before);
    if (values[j] > s.least || (values[j] == s.least && e < s.equal)) emit(a + min(e, s.equal), (warp * each + j) * 32 + lane);
    above += __popc(higher);
    equal += __popc(same);
  }
}

// grid rows; of rows of up to THREADS * VALUES groups
extern "C" __global__ void __launch_bounds__(THREADS, 1) top_k_hopper(const __grid_constant__ TopKParams p) {
  __shared__ u32 chosen[MOST_CHOSEN];
  const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32, row = blockIdx.x;
  const u32 n = (p.positions[row] + 1) / p.ratio, groups = (n + GROUP - 1) / GROUP, k = min(p.k, groups);
  u32* const ids = p.ids + u64(row) * p.k;
  wait_for_inputs();
  if (thread == 0) p.counts[row] = min(n, p.k);
  if (n <= p.k) {  // all of them
    for (u32 i = thread; i < n; i += THREADS) ids[i] = i;
    return;
  }
  u32 values[VALUES], floor = 1;
  u32 each = (groups + THREADS - 1) / THREADS;
  if (groups > k) {
    const u16* highest = p.highest + u64(row) * p.highest_pitch;
#pragma unroll
    for (u32 j = 0; j < VALUES; j++)
      if (j < each) values[j] = highest[min((warp * each + j) * 32 + lane, groups - 1)];
#pragma unroll
    for (u32 j = 0; j < VALUES; j++)
      if ((warp * each + j) * 32 + lane >= groups) values[j] = 0;
    const Selection s = kth(values, each, k, 1);
    choose(values, each, s, [&](u32 at, u32 i) { chosen[at] = i; });
    floor = s.least;
  } else {
    for (u32 i = thread; i < k; i += THREADS) chosen[i] = i;
  }
  __syncthreads();
  each = (k * GROUP + THREADS - 1) / THREADS;
  const float* scores = p.scores + u64(row) * p.pitch;
  // where place j of the thread lies, and whether it is a score
  u32 entry;
  auto exists = [&](u32 j) {
    const u32 i = (warp * each + j) * 32 + lane;
    entry = chosen[min(i / GROUP, k - 1)] * GROUP + i % GROUP;
    return i < k * GROUP && entry < n;
  };
  // nothing stands between the loads
#pragma unroll
  for (u32 j = 0; j < VALUES; j++) {
    if (j >= each) break;
    exists(j);
    values[j] = __float_as_uint(scores[min(entry, n - 1)]);
  }
#pragma unroll
  for (u32 j = 0; j < VALUES; j++) {
    if (j >= each) break;
    values[j] = exists(j) ? rank_of(__uint_as_float(values[j])) >> 16 : 0;
  }
  choose(values, each, kth(values, each, p.k, floor),
         [&](u32 at, u32 i) { ids[at] = chosen[i / GROUP] * GROUP + i % GROUP; });
}

#endif
