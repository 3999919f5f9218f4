// Elementwise arithmetic with 32-bit words of packed elements; each result is rounded to the element type.
#pragma once
#include "types.cuh"

__device__ __forceinline__ unsigned multiply_words(f16, unsigned a, unsigned b) {
    unsigned product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

__device__ __forceinline__ unsigned multiply_words(bf16, unsigned a, unsigned b) {  // by fma: sm_80 has no mul of bf16
    unsigned product;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
    return product;
}

__device__ __forceinline__ unsigned multiply_words(f32, unsigned a, unsigned b) {
    return __float_as_uint(__uint_as_float(a) * __uint_as_float(b));
}

__device__ __forceinline__ unsigned subtract_words(f16, unsigned a, unsigned b) {
    unsigned difference;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
    return difference;
}

__device__ __forceinline__ unsigned fused_words(f16, unsigned a, unsigned b, unsigned c) {  // a * b + c
    unsigned d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

__device__ __forceinline__ unsigned fused_words(bf16, unsigned a, unsigned b, unsigned c) {  // a * b + c
    unsigned d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

__device__ __forceinline__ unsigned subtract_words(bf16, unsigned a, unsigned b) {  // sm_80 has no sub of bf16
    return fused_words(bf16(), b, 0xbf80bf80u, a);
}

__device__ __forceinline__ unsigned masked_or(unsigned bits, unsigned mask, unsigned lead) {  // bits & mask | lead
    unsigned d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(bits), "r"(mask), "r"(lead));
    return d;
}
