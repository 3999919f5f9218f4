// mma.sync of 16 x 8 sums in fp32 over 32 bytes of k (16 elements of fp16 or bf16, or 8 of fp32, which are read as
// TF32), and its operands in shared memory, whose rows are swizzled as TMA swizzles them.
#pragma once
#include "types.cuh"

using i64 = long long;

__device__ __forceinline__ u32 shared_address(const void* pointer) { return u32(__cvta_generic_to_shared(pointer)); }

// The offset of 16-byte chunk `chunk` of a row, in rows of ROW_BYTES whose chunks are permuted so that those of one
// column in eight rows fall into different banks.
template <int ROW_BYTES>
__device__ __forceinline__ int swizzled_offset(int row, int chunk) {
    return row * ROW_BYTES + ((chunk ^ (ROW_BYTES == 64 ? row >> 1 & 3 : row & 7)) << 4);
}

// Four matrices of 8 x 8 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
template <bool TRANSPOSE>
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], unsigned from) {
    if constexpr (TRANSPOSE)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from));
}

#define MMA(shape_and_types)                                                                                        \
    asm volatile("mma.sync.aligned." shape_and_types " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "              \
                 "{%0, %1, %2, %3};"                                                                                \
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

__device__ __forceinline__ void multiply(f16, float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    MMA("m16n8k16.row.col.f32.f16.f16.f32");
}

__device__ __forceinline__ void multiply(bf16, float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
}

__device__ __forceinline__ void multiply(f32, float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    MMA("m16n8k8.row.col.f32.tf32.tf32.f32");
}

#undef MMA
