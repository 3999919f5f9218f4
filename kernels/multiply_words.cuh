// Elementwise products of two 32-bit words of packed elements, each product rounded to the element type.
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
