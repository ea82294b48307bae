// What the products of many tokens on wgmma share: images of inputs, rings in shared memory, steps of the matrix unit.
#pragma once
#include "hopper.cuh"
#include "product.cuh"

constexpr int IMAGE_TOKENS = 64;
constexpr int IMAGE_BYTES = IMAGE_TOKENS * BLOCK * 2;
constexpr int STEP_BYTES = 256, HALF_BYTES = 128, GROUP_BYTES = 2048;
constexpr int WIDE_TOKENS = 2 * IMAGE_TOKENS;
constexpr int MAX_JOBS = 16;

// ---- barriers and copies ----

__device__ __forceinline__ void arrive_expecting(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// arrives when this thread's copies so far have ended
__device__ __forceinline__ void arrive_with_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// the 128 threads of a warpgroup
__device__ __forceinline__ void meet(u32 group) { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); }

// ---- the matrix unit ----

// inputs of a step in shared memory: rows of 16 bytes, 8 tokens together, halves and groups apart
__device__ __forceinline__ u64 step_inputs(u32 address) {
  return u64(address >> 4) | u64(HALF_BYTES >> 4) << 16 | u64(GROUP_BYTES >> 4) << 32;
}

// d (+)= a b: 64 rows of the warpgroup, twice as many tokens as `d` has values
__device__ __forceinline__ void step(float (&d)[64], const u32 (&a)[4], u64 b, bool adds) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" PLACES_64 "}"
      ", {%64, %65, %66, %67}, %68, adds, 1, 1, 0;\n}"
      : ACCUMULATORS_64(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(adds)));
}
__device__ __forceinline__ void step(float (&d)[56], const u32 (&a)[4], u64 b, bool adds) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %61, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n112k16.f32.bf16.bf16 {" PLACES_32 ", "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55}"
      ", {%56, %57, %58, %59}, %60, adds, 1, 1, 0;\n}"
      : SIXTEEN(d, 0), SIXTEEN(d, 16), SIXTEEN(d, 32), FOUR(d, 48), FOUR(d, 52)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(adds)));
}
__device__ __forceinline__ void step(float (&d)[48], const u32 (&a)[4], u64 b, bool adds) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %53, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {" PLACES_32 ", "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}"
      ", {%48, %49, %50, %51}, %52, adds, 1, 1, 0;\n}"
      : SIXTEEN(d, 0), SIXTEEN(d, 16), SIXTEEN(d, 32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(adds)));
}
__device__ __forceinline__ void step(float (&d)[40], const u32 (&a)[4], u64 b, bool adds) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %45, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {" PLACES_32 ", "
      "%32, %33, %34, %35, %36, %37, %38, %39}"
      ", {%40, %41, %42, %43}, %44, adds, 1, 1, 0;\n}"
      : SIXTEEN(d, 0), SIXTEEN(d, 16), FOUR(d, 32), FOUR(d, 36)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(adds)));
}
__device__ __forceinline__ void step(float (&d)[32], const u32 (&a)[4], u64 b, bool adds) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" PLACES_32 "}"
      ", {%32, %33, %34, %35}, %36, adds, 1, 1, 0;\n}"
      : ACCUMULATORS_32(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(adds)));
}
__device__ __forceinline__ void step(float (&d)[16], const u32 (&a)[4], u64 b, bool adds) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
      ", {%16, %17, %18, %19}, %20, adds, 1, 1, 0;\n}"
      : SIXTEEN(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(adds)));
}

// four pairs of 8x8 values, transposed
__device__ __forceinline__ void store_transposed(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// A ring of stages, each with a barrier `full` and one `empty`, and a position in it.
template <int STAGES>
struct Ring {
  u32 barriers;
  u32 stage = 0, parity = 0;

  __device__ __forceinline__ explicit Ring(u32 barriers) : barriers(barriers) {}
  __device__ __forceinline__ void init(u32 fillers, u32 takers) {
    for (u32 i = 0; i < STAGES; i++) {
      barrier_init(barriers + i * 8, fillers);
      barrier_init(barriers + (STAGES + i) * 8, takers);
    }
  }
  __device__ __forceinline__ u32 full() const { return barriers + stage * 8; }
  __device__ __forceinline__ u32 empty() const { return barriers + (STAGES + stage) * 8; }
  __device__ __forceinline__ void wait_full() const { barrier_wait(full(), parity); }
  __device__ __forceinline__ void wait_empty() const { barrier_wait(empty(), parity ^ 1); }
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};
