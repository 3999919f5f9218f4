// Instructions that only Hopper (sm_90a) has, one function each: mbarriers, TMA copies, wgmma, stmatrix.
//
// Shared memory addresses are 32-bit, as shared_address returns them.
#pragma once
#include "types.cuh"

struct alignas(64) TensorMap { u64 words[16]; };  // a CUtensorMap; parameters are `const __grid_constant__ TensorMap`

namespace hopper {

__device__ __forceinline__ u32 shared_address(const void* pointer) { return u32(__cvta_generic_to_shared(pointer)); }

// ---- threads, clusters, registers --------------------------------------------------------------------------------

// Waits until `threads` threads have arrived at the named barrier number `barrier`: 1 to 15, because __syncthreads uses
// barrier 0.
__device__ __forceinline__ void named_barrier(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Arrives at a named barrier without waiting there.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Waits for all threads of the cluster; their earlier writes are then visible.
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Waits for all threads of the cluster, but makes no writes visible.
__device__ __forceinline__ void cluster_barrier_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

// Lowers the registers per thread of this warpgroup, a producer, to COUNT, a multiple of 8. Consumers raise theirs with
// take_registers.
template <int COUNT>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- mbarriers ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// The thread that initialised the mbarriers calls this next. TMA then sees the mbarriers. Other blocks of the cluster
// see them after a cluster barrier.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at an mbarrier, whose current phase then also waits for `bytes` more bytes of TMA loads.
__device__ __forceinline__ void barrier_arrive_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Returns once the phase with this parity is complete. The first phase has parity 0; before it, a wait for parity 1
// returns at once.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Stores to the shared memory of block `rank` of the cluster. `address` is the address of the same variable in this
// block.
__device__ __forceinline__ void store_at(u32 address, u32 rank, const float (&values)[4]) {
    asm volatile(
        "{ .reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "st.shared::cluster.v4.f32 [remote], {%2, %3, %4, %5}; }" ::"r"(address),
        "r"(rank), "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3])
        : "memory");
}

// Loads from the shared memory of block `rank` of the cluster, where `address` is as for store_at.
template <int COUNT>
__device__ __forceinline__ void load_at(u32 address, u32 rank, float (&values)[COUNT]) {
    u32 remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    if constexpr (COUNT == 4)
        asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
                     : "r"(remote)
                     : "memory");
    else
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(values[i]) : "r"(remote + 4 * i) : "memory");
}

// ---- bulk tensor copies: one thread issues them ------------------------------------------------------------------

__device__ __forceinline__ void prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Loads the box of a tensor map at these coordinates, innermost first; its bytes count towards the mbarrier's phase.
#define TMA_LOAD(rank, coordinates, ...)                                 \
    asm volatile("cp.async.bulk.tensor." rank                            \
                 ".shared::cluster.global.mbarrier::complete_tx::bytes " \
                 "[%0], [%1, " coordinates "], [%2];" ::"r"(to),         \
                 "l"(&map), "r"(barrier), __VA_ARGS__                    \
                 : "memory")

__device__ __forceinline__ void load(const TensorMap& map, u32 to, u32 barrier, int c0, int c1) {
    TMA_LOAD("2d", "{%3, %4}", "r"(c0), "r"(c1));
}
__device__ __forceinline__ void load(const TensorMap& map, u32 to, u32 barrier, int c0, int c1, int c2) {
    TMA_LOAD("3d", "{%3, %4, %5}", "r"(c0), "r"(c1), "r"(c2));
}
__device__ __forceinline__ void load(const TensorMap& map, u32 to, u32 barrier, int c0, int c1, int c2, int c3) {
    TMA_LOAD("4d", "{%3, %4, %5, %6}", "r"(c0), "r"(c1), "r"(c2), "r"(c3));
}
__device__ __forceinline__ void load(const TensorMap& map, u32 to, u32 barrier, int c0, int c1, int c2, int c3,
                                     int c4) {
    TMA_LOAD("5d", "{%3, %4, %5, %6, %7}", "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4));
}
#undef TMA_LOAD

// Loads pixels by an im2col map, which walks over W, over W and H, or over W, H and D. The first pixel is at
// coordinates c, w, h, d, n plus the offsets of a filter tap. Each offset has 16, 8 or 5 bits.
#define TMA_IM2COL(rank, coordinates, offsets, ...)                             \
    asm volatile("cp.async.bulk.tensor." rank                                   \
                 ".shared::cluster.global.im2col.mbarrier::complete_tx::bytes " \
                 "[%0], [%1, " coordinates "], [%2], " offsets ";" ::"r"(to),   \
                 "l"(&map), "r"(barrier), __VA_ARGS__                           \
                 : "memory")

__device__ __forceinline__ void load_im2col(const TensorMap& map, u32 to, u32 barrier, int c, int w, int n,
                                            unsigned short offset_w) {
    TMA_IM2COL("3d", "{%3, %4, %5}", "{%6}", "r"(c), "r"(w), "r"(n), "h"(offset_w));
}
__device__ __forceinline__ void load_im2col(const TensorMap& map, u32 to, u32 barrier, int c, int w, int h, int n,
                                            unsigned short offset_w, unsigned short offset_h) {
    TMA_IM2COL("4d", "{%3, %4, %5, %6}", "{%7, %8}", "r"(c), "r"(w), "r"(h), "r"(n), "h"(offset_w), "h"(offset_h));
}
__device__ __forceinline__ void load_im2col(const TensorMap& map, u32 to, u32 barrier, int c, int w, int h, int d,
                                            int n, unsigned short offset_w, unsigned short offset_h,
                                            unsigned short offset_d) {
    TMA_IM2COL("5d", "{%3, %4, %5, %6, %7}", "{%8, %9, %10}", "r"(c), "r"(w), "r"(h), "r"(d), "r"(n), "h"(offset_w),
               "h"(offset_h), "h"(offset_d));
}
#undef TMA_IM2COL

// Stores a box; elements outside the tensor are not written. Threads call store_fence after their ordinary stores to
// `from`, before this store.
#define TMA_STORE(rank, coordinates, ...)                                                        \
    asm volatile("cp.async.bulk.tensor." rank ".global.shared::cta.bulk_group [%0, " coordinates \
                 "], [%1];" ::"l"(&map),                                                         \
                 "r"(from), __VA_ARGS__                                                          \
                 : "memory")

__device__ __forceinline__ void store(const TensorMap& map, u32 from, int c0, int c1) {
    TMA_STORE("2d", "{%2, %3}", "r"(c0), "r"(c1));
}
__device__ __forceinline__ void store(const TensorMap& map, u32 from, int c0, int c1, int c2) {
    TMA_STORE("3d", "{%2, %3, %4}", "r"(c0), "r"(c1), "r"(c2));
}
__device__ __forceinline__ void store(const TensorMap& map, u32 from, int c0, int c1, int c2, int c3) {
    TMA_STORE("4d", "{%2, %3, %4, %5}", "r"(c0), "r"(c1), "r"(c2), "r"(c3));
}
#undef TMA_STORE

__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all groups of TMA stores, except the PENDING groups committed last, have read their shared memory.
template <int PENDING>
__device__ __forceinline__ void store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Makes a thread's ordinary accesses to shared memory visible to TMA and wgmma. Each thread that writes calls it before
// the barrier after which TMA or wgmma reads.
__device__ __forceinline__ void store_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- words of shared memory --------------------------------------------------------------------------------------

__device__ __forceinline__ void store_word(u32 to, u32 word) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

__device__ __forceinline__ void load_vector(u32 from, u32 (&words)[4]) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(from)
                 : "memory");
}

// Loads two neighbouring words. The asm is volatile, so that each use loads again: that costs less than copying
// registers.
__device__ __forceinline__ void load_words(u32 from, float& first, float& second) {
    asm volatile("ld.volatile.shared.v2.f32 {%0, %1}, [%2];" : "=f"(first), "=f"(second) : "r"(from) : "memory");
}

__device__ __forceinline__ void load_words(u32 from, u32& first, u32& second) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(first), "=r"(second) : "r"(from) : "memory");
}

// ---- 8 x 8 matrices of 16-bit elements between registers and shared memory ---------------------------------------
// For stmatrix and ldmatrix, lane i gives the address of row i % 8 of matrix i / 8. Register j of a lane has elements
// c = 2 (lane % 4) and c + 1 of row lane / 4 of matrix j, as wgmma's accumulators have them.

__device__ __forceinline__ void store_matrices(u32 to, const u32 (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

__device__ __forceinline__ void load_matrices(u32 from, u32 (&words)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(from)
                 : "memory");
}

// ---- wgmma -------------------------------------------------------------------------------------------------------
// d (64 x N) += a (64 x 16) b (16 x N), or for TF32 a (64 x 8) b (8 x N), or for 8 bits a (64 x 32) b (32 x N): 32
// bytes of k. d is fp32, or int32 for integers. Thread t of the warpgroup holds two rows, 16 (t / 32) + t % 32 / 4 and
// the row 8 below it. Of every 8 columns it holds columns 2 (t % 4) and 2 (t % 4) + 1: d[4 j] and d[4 j + 1] belong to
// the upper row, d[4 j + 2] and d[4 j + 3] to the lower row.

// Returns the descriptor of an operand in shared memory, in rows of SWIZZLE bytes as TMA writes them; the operand
// begins at a multiple of 8 rows. `stride` and `leading` are distances in bytes.
//   contiguous along k:        `stride` leads from 8 rows of m or n to the next 8 rows: 8 * SWIZZLE. `leading` is not
//                              used. The next 32 bytes of k are at address + 32.
//   contiguous along m or n:   `leading` leads from SWIZZLE bytes of m or n to the next ones. `stride` leads from 8
//                              rows of k to the next 8 rows: 8 * SWIZZLE. The next 16 rows of k are at
//                              address + 16 * SWIZZLE.
template <int SWIZZLE>
__device__ __forceinline__ u64 matrix_descriptor(u32 address, u32 leading, u32 stride) {
    constexpr u64 KIND = SWIZZLE == 128 ? 1 : SWIZZLE == 64 ? 2 : SWIZZLE == 32 ? 3 : 0;
    return KIND << 62 | u64(stride >> 4) << 32 | u64(leading >> 4) << 16 | u64((address & 0x3ffff) >> 4);
}

// Returns the descriptor of an operand that begins `bytes` bytes after the operand that `descriptor` describes.
__device__ __forceinline__ u64 moved(u64 descriptor, u32 bytes) {
    return (descriptor & 0xffffffff00000000) | (u32(descriptor) + (bytes >> 4));
}

// Call this before the first wgmma, and after ordinary writes to registers that wgmma uses.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Call this after wgmma_wait: it keeps the compiler from reading the results earlier.
template <int COUNT>
__device__ __forceinline__ void settle(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int COUNT>
__device__ __forceinline__ void settle(int (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// Keeps the compiler from recomputing a pointer at each use.
template <class E>
__device__ __forceinline__ void settle(const E*& pointer) {
    asm("" : "+l"(pointer));
}

// Keeps the compiler from sharing what it computes from a number.
__device__ __forceinline__ void settle(int& number) { asm volatile("" : "+r"(number)); }

#define OPERANDS(a, b, c, d, e, f, g, h) "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h
#define OPERANDS_8 OPERANDS(0, 1, 2, 3, 4, 5, 6, 7)
#define OPERANDS_16 OPERANDS_8 ", " OPERANDS(8, 9, 10, 11, 12, 13, 14, 15)
#define OPERANDS_24 OPERANDS_16 ", " OPERANDS(16, 17, 18, 19, 20, 21, 22, 23)
#define OPERANDS_32 OPERANDS_24 ", " OPERANDS(24, 25, 26, 27, 28, 29, 30, 31)
#define OPERANDS_40 OPERANDS_32 ", " OPERANDS(32, 33, 34, 35, 36, 37, 38, 39)
#define OPERANDS_48 OPERANDS_40 ", " OPERANDS(40, 41, 42, 43, 44, 45, 46, 47)
#define OPERANDS_56 OPERANDS_48 ", " OPERANDS(48, 49, 50, 51, 52, 53, 54, 55)
#define OPERANDS_64 OPERANDS_56 ", " OPERANDS(56, 57, 58, 59, 60, 61, 62, 63)
#define OPERANDS_72 OPERANDS_64 ", " OPERANDS(64, 65, 66, 67, 68, 69, 70, 71)
#define OPERANDS_80 OPERANDS_72 ", " OPERANDS(72, 73, 74, 75, 76, 77, 78, 79)
#define OPERANDS_88 OPERANDS_80 ", " OPERANDS(80, 81, 82, 83, 84, 85, 86, 87)
#define OPERANDS_96 OPERANDS_88 ", " OPERANDS(88, 89, 90, 91, 92, 93, 94, 95)
#define OPERANDS_104 OPERANDS_96 ", " OPERANDS(96, 97, 98, 99, 100, 101, 102, 103)
#define OPERANDS_112 OPERANDS_104 ", " OPERANDS(104, 105, 106, 107, 108, 109, 110, 111)
#define OPERANDS_120 OPERANDS_112 ", " OPERANDS(112, 113, 114, 115, 116, 117, 118, 119)
#define OPERANDS_128 OPERANDS_120 ", " OPERANDS(120, 121, 122, 123, 124, 125, 126, 127)
#define EIGHT(is, i) \
    is(d[i]), is(d[i + 1]), is(d[i + 2]), is(d[i + 3]), is(d[i + 4]), is(d[i + 5]), is(d[i + 6]), is(d[i + 7])
#define RESULTS_8(is) EIGHT(is, 0)
#define RESULTS_16(is) RESULTS_8(is), EIGHT(is, 8)
#define RESULTS_24(is) RESULTS_16(is), EIGHT(is, 16)
#define RESULTS_32(is) RESULTS_24(is), EIGHT(is, 24)
#define RESULTS_40(is) RESULTS_32(is), EIGHT(is, 32)
#define RESULTS_48(is) RESULTS_40(is), EIGHT(is, 40)
#define RESULTS_56(is) RESULTS_48(is), EIGHT(is, 48)
#define RESULTS_64(is) RESULTS_56(is), EIGHT(is, 56)
#define RESULTS_72(is) RESULTS_64(is), EIGHT(is, 64)
#define RESULTS_80(is) RESULTS_72(is), EIGHT(is, 72)
#define RESULTS_88(is) RESULTS_80(is), EIGHT(is, 80)
#define RESULTS_96(is) RESULTS_88(is), EIGHT(is, 88)
#define RESULTS_104(is) RESULTS_96(is), EIGHT(is, 96)
#define RESULTS_112(is) RESULTS_104(is), EIGHT(is, 104)
#define RESULTS_120(is) RESULTS_112(is), EIGHT(is, 112)
#define RESULTS_128(is) RESULTS_120(is), EIGHT(is, 120)

// wgmma<ALONG_N>(T(), d, a, b, accumulate): `a` is a descriptor (contiguous along k) or registers, and `b` is a
// descriptor. ALONG_N: b is contiguous along n. accumulate false: d is overwritten. n0 to n6 are N / 2 to N / 2 + 6:
// in the asm statement, operands %0 to %(N / 2 - 1) are the results, and the operands from %(N / 2) on are inputs.
#define WGMMA(N, T, type, n0, n1, n2, n3, n4, n5, n6)                                                                \
    template <bool ALONG_N>                                                                                          \
    __device__ __forceinline__ void wgmma(T, float (&d)[N / 2], u64 a, u64 b, bool accumulate) {                     \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #n2                                                          \
                     ", 0;\n"                                                                                        \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" OPERANDS_##n0              \
                     "}, %" #n0 ", %" #n1 ", p, 1, 1, 0, %" #n3 "; }"                                                \
                     : RESULTS_##n0("+f")                                                                            \
                     : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(ALONG_N)));                                     \
    }                                                                                                                \
    template <bool ALONG_N>                                                                                          \
    __device__ __forceinline__ void wgmma(T, float (&d)[N / 2], const u32(&a)[4], u64 b, bool accumulate) {          \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #n5                                                          \
                     ", 0;\n"                                                                                        \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" OPERANDS_##n0              \
                     "}, {%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4 ", p, 1, 1, %" #n6 "; }"                   \
                     : RESULTS_##n0("+f")                                                                            \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(int(ALONG_N))); \
    }
// Like WGMMA, but for fp32 operands, which TMA has rounded to TF32; wgmma ignores the bits that TF32 lacks. Operands in
// shared memory are contiguous along k. Of registers `a`, a thread's four are element k = lane % 4 of both of its rows,
// then element k + 4.
#define WGMMA_TF32(N, n0, n1, n2, n3, n4, n5, n6)                                                                   \
    template <bool ALONG_N>                                                                                         \
    __device__ __forceinline__ void wgmma(f32, float (&d)[N / 2], u64 a, u64 b, bool accumulate) {                  \
        static_assert(!ALONG_N);                                                                                    \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #n2                                                         \
                     ", 0;\n"                                                                                       \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k8.f32.tf32.tf32 {" OPERANDS_##n0 "}, %" #n0 ", %" #n1 \
                                                                                               ", p, 1, 1; }"       \
                     : RESULTS_##n0("+f")                                                                           \
                     : "l"(a), "l"(b), "r"(int(accumulate)));                                                       \
    }                                                                                                               \
    template <bool ALONG_N>                                                                                         \
    __device__ __forceinline__ void wgmma(f32, float (&d)[N / 2], const u32(&a)[4], u64 b, bool accumulate) {       \
        static_assert(!ALONG_N);                                                                                    \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #n5                                                         \
                     ", 0;\n"                                                                                       \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k8.f32.tf32.tf32 {" OPERANDS_##n0                      \
                     "}, {%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4 ", p, 1, 1; }"                            \
                     : RESULTS_##n0("+f")                                                                           \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)));                   \
    }
// Like WGMMA, but for integers of 8 bits, which are summed exactly. Both operands are contiguous along k; b is signed.
#define WGMMA_INTEGERS(N, T, type, n0, n1, n2, n3, n4, n5, n6)                                                         \
    template <bool ALONG_N>                                                                                            \
    __device__ __forceinline__ void wgmma(T, int (&d)[N / 2], u64 a, u64 b, bool accumulate) {                         \
        static_assert(!ALONG_N);                                                                                       \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #n2                                                            \
                     ", 0;\n"                                                                                          \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32." type ".s8 {" OPERANDS_##n0 "}, %" #n0 ", %" #n1 \
                                                                                                  ", p; }"             \
                     : RESULTS_##n0("+r")                                                                              \
                     : "l"(a), "l"(b), "r"(int(accumulate)));                                                          \
    }
// Like WGMMA, but for e4m3. Both operands are contiguous along k. The sums have about 14 bits, although d is fp32.
#define WGMMA_E4M3(N, n0, n1, n2, n3, n4, n5, n6)                                                                    \
    template <bool ALONG_N>                                                                                          \
    __device__ __forceinline__ void wgmma(e4m3, float (&d)[N / 2], u64 a, u64 b, bool accumulate) {                  \
        static_assert(!ALONG_N);                                                                                     \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #n2                                                          \
                     ", 0;\n"                                                                                        \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" OPERANDS_##n0 "}, %" #n0 ", %" #n1 \
                                                                                                ", p, 1, 1; }"       \
                     : RESULTS_##n0("+f")                                                                            \
                     : "l"(a), "l"(b), "r"(int(accumulate)));                                                        \
    }
#define WGMMAS(N, ...)                  \
    WGMMA(N, f16, "f16", __VA_ARGS__)   \
    WGMMA(N, bf16, "bf16", __VA_ARGS__) \
    WGMMA_E4M3(N, __VA_ARGS__)          \
    WGMMA_TF32(N, __VA_ARGS__) WGMMA_INTEGERS(N, s8, "s8", __VA_ARGS__) WGMMA_INTEGERS(N, u8, "u8", __VA_ARGS__)

WGMMAS(16, 8, 9, 10, 11, 12, 13, 14)
WGMMAS(32, 16, 17, 18, 19, 20, 21, 22)
WGMMAS(48, 24, 25, 26, 27, 28, 29, 30)
WGMMAS(64, 32, 33, 34, 35, 36, 37, 38)
WGMMAS(80, 40, 41, 42, 43, 44, 45, 46)
WGMMAS(96, 48, 49, 50, 51, 52, 53, 54)
WGMMAS(112, 56, 57, 58, 59, 60, 61, 62)
WGMMAS(128, 64, 65, 66, 67, 68, 69, 70)
WGMMAS(144, 72, 73, 74, 75, 76, 77, 78)
WGMMAS(160, 80, 81, 82, 83, 84, 85, 86)
WGMMAS(176, 88, 89, 90, 91, 92, 93, 94)
WGMMAS(192, 96, 97, 98, 99, 100, 101, 102)
WGMMAS(208, 104, 105, 106, 107, 108, 109, 110)
WGMMAS(224, 112, 113, 114, 115, 116, 117, 118)
WGMMAS(240, 120, 121, 122, 123, 124, 125, 126)
WGMMAS(256, 128, 129, 130, 131, 132, 133, 134)

#undef WGMMAS
#undef WGMMA
#undef WGMMA_TF32
#undef WGMMA_INTEGERS
#undef WGMMA_E4M3
#undef OPERANDS
#undef EIGHT

}  // namespace hopper
