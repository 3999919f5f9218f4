// Loads of mma fragments from tiles in shared memory, and the mma instructions.
#pragma once

#include "attention_mma_instruction.cuh"
#include "attention_mma_tiles.cuh"

template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 from) {
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(from)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(from)
                     : "memory");
}

__device__ __forceinline__ float shared_float(u32 from) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from) : "memory");
    return value;
}

__device__ __forceinline__ float2 shared_float2(u32 from) {
    float2 value;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(from) : "memory");
    return value;
}

__device__ __forceinline__ float4 shared_float4(u32 from) {
    float4 value;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(from)
                 : "memory");
    return value;
}

#if QUANTIZED
using Paired = Conditional<MATH_KIND == HALF, T, f16>::type;  // products by FFMA do not convert to pairs
constexpr float NUMBER_UNIT = MATH_KIND == HALF ? pair_unit(Paired())
                                                : 1.0f;  // what numbers are divided by in products
#endif

// Returns neighbouring elements of a row of keys or values, for products by FFMA.
__device__ __forceinline__ float4 four_elements(u32 row, int first) {
#if QUANTIZED
    u32 bytes;
    load_shared<4>(row + first, &bytes);
    return {number(bytes), number(bytes >> 8), number(bytes >> 16), number(bytes >> 24)};
#else
    return shared_float4(row + first * 4);
#endif
}
__device__ __forceinline__ float2 two_elements(u32 row, int first) {
#if QUANTIZED
    u32 bytes;
    load_shared<2>(row + first, &bytes);
    return {number(bytes), number(bytes >> 8)};
#else
    return shared_float2(row + first * 4);
#endif
}

__device__ __forceinline__ u32 rounded_tf32(u32 value) {
    u32 result = value;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "r"(value));
#endif
    return result;
}

__device__ __forceinline__ void round_operand(u32 (&words)[4]) {
    if constexpr (MATH_KIND == TF32) {
#pragma unroll
        for (u32& word : words) word = rounded_tf32(word);
    }
}
