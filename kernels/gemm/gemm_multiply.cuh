// The instructions of kernels that multiply by mma.sync: copies of operands to shared memory, loads of fragments from
// shared memory, and mma. One mma adds products along 32 bytes of k (16 elements of fp16 or bf16, or 8 of fp32, which
// are read as TF32) to 16 x 8 sums in fp32. Rows in shared memory are swizzled as TMA swizzles them. Before sm_80,
// operands are fp16, and there is no cp.async.
#pragma once
#include "types.cuh"

using i64 = long long;

__device__ __forceinline__ u32 shared_address(const void* pointer) { return u32(__cvta_generic_to_shared(pointer)); }

// The offset of a 16-byte chunk in rows of ROW_BYTES. The chunks of a row are permuted, so that a column of chunks in
// eight rows falls into different banks.
template <int ROW_BYTES>
__device__ __forceinline__ int swizzled_offset(int row, int chunk) {
    return row * ROW_BYTES + ((chunk ^ (ROW_BYTES == 64 ? row >> 1 & 3 : row & 7)) << 4);
}

// ---- global memory -> shared memory ------------------------------------------------------------------------------

// Whether copies of `bytes` bytes go to shared memory by cp.async; other copies go through registers.
constexpr bool is_asynchronous(int bytes) {
#if __CUDA_ARCH__ >= 800
    return bytes >= 4;
#else
    return false;
#endif
}

// Copies the first `read` of BYTES bytes asynchronously, and writes zeros for the others.
template <int BYTES>
__device__ __forceinline__ void copy_async(unsigned to, const char* from, int read) {
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(read)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(read)
                     : "memory");
}

__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;");
#endif
}

// Waits until all but the last PENDING groups of this thread's copies have arrived.
template <int PENDING>
__device__ __forceinline__ void wait_for_groups() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

__device__ __forceinline__ unsigned short load_half(const char* from) {
    unsigned short half;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(half) : "l"(from));
    return half;
}

// ---- registers <-> shared memory ---------------------------------------------------------------------------------

__device__ __forceinline__ void store_chunk(unsigned to, const unsigned (&words)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
}

__device__ __forceinline__ unsigned load_word(unsigned from) {
    unsigned word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from));
    return word;
}

// Loads 1, 2 or 4 words; the address is a multiple of their total size.
template <int WORDS>
__device__ __forceinline__ void load_words(unsigned from, unsigned (&to)[WORDS]) {
    if constexpr (WORDS == 4)
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(from));
    else if constexpr (WORDS == 2)
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(from));
    else to[0] = load_word(from);
}

// Loads four matrices of 8 x 8 16-bit elements; lane i passes the address of row i % 8 of matrix i / 8.
template <bool TRANSPOSE>
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], unsigned from) {
    if constexpr (TRANSPOSE)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(from));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(from));
}

// ---- mma ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ unsigned nearest_tf32(unsigned bits) {
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(__uint_as_float(bits)));
    return bits;
}

#define MMA(shape_and_types)                                              \
    asm volatile("mma.sync.aligned." shape_and_types                      \
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "        \
                 "{%0, %1, %2, %3};"                                      \
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

__device__ __forceinline__ void multiply(f16, float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    MMA("m16n8k16.row.col.f32.f16.f16.f32");
#else
    const unsigned b[2] = {b0, b1};
#pragma unroll
    for (int i = 0; i < 2; ++i)
        asm volatile(
            "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
            "{%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a[2 * i]), "r"(a[2 * i + 1]), "r"(b[i]));
#endif
}

__device__ __forceinline__ void multiply(bf16, float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
}

__device__ __forceinline__ void multiply(f32, float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    MMA("m16n8k8.row.col.f32.tf32.tf32.f32");
}

#undef MMA
