// Instructions of Hopper that the portable kernels do without: warpgroup products (wgmma), barriers in shared memory, moving
// registers between warpgroups. Only for code compiled for sm_90a.
//
// Operands in shared memory are blocks of 64 rows of 64 bfloat16: 128 bytes a row, its 16-byte pieces exchanged by the
// row's number (the 128-byte swizzle), 8 KB in all, aligned to 1 KB. A block serves with its columns or with its rows as
// the dimension that is summed over.
#pragma once
#include "common.cuh"

constexpr u32 BLOCK_ROW = 128;               // bytes of a row of a block
constexpr u32 BLOCK_BYTES = 64 * BLOCK_ROW;  // bytes of a block

// Offset of 16-byte piece `piece` of row `row` of a block.
__device__ __forceinline__ u32 block_offset(u32 row, u32 piece) { return row * BLOCK_ROW + ((piece ^ row % 8) << 4); }

// ---- barriers ----

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Waits until the phase of parity `phase` has ended.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 phase) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier),
      "r"(phase)
      : "memory");
}

// A warp's arrivals: what its lanes wrote may be read, what they and their products read may be overwritten. Every lane
// arrives, which costs next to nothing (benches/RESULTS.md), and race checkers understand it.
constexpr u32 WARP = 32;
__device__ __forceinline__ void release(u32 barrier) { barrier_arrive(barrier); }

// After waiting for what other threads wrote to shared memory, before products read it. The readers do this: writers with
// loads under way would wait for those.
__device__ __forceinline__ void acquire() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- registers ----

template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- warpgroup products ----

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Descriptors of blocks: the lower half; the upper one is the same for all. Bytes are counted in sixteens, so that a
// descriptor that lies further is a sum.
// Summed over along their columns: groups of eight rows follow each other.
__device__ __forceinline__ u32 along_columns(u32 address) { return 1u << 16 | (address & 0x3FFFF) >> 4; }

// Along their rows: groups of eight rows follow each other, and the next 64 columns are the next block.
__device__ __forceinline__ u32 along_rows(u32 address) { return (BLOCK_BYTES >> 4) << 16 | (address & 0x3FFFF) >> 4; }

// What all lanes have alike, in a way that the compiler sees: descriptors are then computed once a warp.
__device__ __forceinline__ u32 uniform(u32 x) { return __shfl_sync(ALL, x, 0); }

__device__ __forceinline__ u64 descriptor(u32 lower) { return u64(1u << 30 | 1024 >> 4) << 32 | lower; }

#define FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(d, i) FOUR(d, i), FOUR(d, i + 4), FOUR(d, i + 8), FOUR(d, i + 12)
#define ACCUMULATORS_32(d) SIXTEEN(d, 0), SIXTEEN(d, 16)
#define ACCUMULATORS_64(d, i) SIXTEEN(d, i), SIXTEEN(d, i + 16), SIXTEEN(d, i + 32), SIXTEEN(d, i + 48)
#define PLACES_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PLACES_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// d (64 x 64) = a b + (add ? d : 0), sums of 16, both along columns
__device__ __forceinline__ void product_64(float (&d)[32], u32 a, u32 b, bool add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" PLACES_32 "}, %32, %33, add, 1, 1, 0, 0;\n}"
      : ACCUMULATORS_32(d)
      : "l"(descriptor(a)), "l"(descriptor(b)), "r"(u32(add)));
}

// d[BEGIN..] (64 x 128) += a b, sums of 16, a along columns, b along rows
template <int BEGIN, int SIZE>
__device__ __forceinline__ void product_128(float (&d)[SIZE], u32 a, u32 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" PLACES_64 "}, %64, %65, 1, 1, 1, 0, 1;"
               : ACCUMULATORS_64(d, BEGIN)
               : "l"(descriptor(a)), "l"(descriptor(b)));
}

// the same with a in registers, laid out as for `mma`
template <int BEGIN, int SIZE>
__device__ __forceinline__ void product_128(float (&d)[SIZE], const u32 (&a)[4], u32 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" PLACES_64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
               : ACCUMULATORS_64(d, BEGIN)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor(b)));
}

__device__ __forceinline__ void store_matrices(u32 address, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- shared memory by its address ----

__device__ __forceinline__ u64 load_shared(u32 address) {
  u64 v;
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ void store_shared(u32 address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ void store_word(u32 address, u64 v) {
  asm volatile("st.shared.u64 [%0], %1;" ::"r"(address), "l"(v) : "memory");
}
