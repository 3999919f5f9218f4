// mma.sync, with sums in fp32: m16n8k16 of fp16 or bf16, and m16n8k8 of fp32, which is read as TF32.
#pragma once
#include "types.cuh"

#define MMA(shape, type)                                                 \
    asm volatile("mma.sync.aligned." shape ".row.col.f32." type "." type \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "             \
                 "{%8, %9}, {%0, %1, %2, %3};"                           \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

__device__ __forceinline__ void mma(f16, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    MMA("m16n8k16", "f16");
#endif
}
__device__ __forceinline__ void mma(bf16, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    MMA("m16n8k16", "bf16");
#endif
}
__device__ __forceinline__ void mma(f32, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    MMA("m16n8k8", "tf32");
#endif
}
#undef MMA
