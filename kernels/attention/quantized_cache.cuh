// The numbers of a quantized cache: int8, or float8 (e4m3fn). A number times its scale is an element of a key or value.
//
// Macros: QUANTIZED, 1: int8, 2: e4m3fn; if it is not defined, the elements of a cache are of type T. PER_CHANNEL, 1:
// each element of a key head has a scale, 0: a cache has one.
#pragma once
#include "types.cuh"

#if !QUANTIZED
constexpr bool IS_QUANTIZED = false;
using Cached = T;
#else
#include "float8.cuh"
#include "packed_words.cuh"
constexpr bool IS_QUANTIZED = true, FLOAT8 = QUANTIZED == 2;
using Cached = u8;

// The scales of the keys and of the values; group_query.py writes the fields in this order.
struct CacheScales { const f32 *keys, *values; };

// Returns the scales of a key head; without PER_CHANNEL, the only scale.
__device__ __forceinline__ const f32* scales_of(const f32* scales, int head, int head_dim) {
    return scales + (PER_CHANNEL ? head * head_dim : 0);
}

// Loads the scales of W elements, from element `first` of the head on.
template <int W>
__device__ __forceinline__ void load_scales(const f32* scales, int first, float (&to)[W]) {
    if constexpr (PER_CHANNEL) {
        unpack(load_cached<W>(scales + first), to);
    } else {
        float one[1];
        unpack(load_cached<1>(scales), one);
#pragma unroll
        for (float& scale : to) scale = one[0];
    }
}

// Returns the only scale or, with PER_CHANNEL, the largest of a head's, without its sign; all lanes must call it.
__device__ __forceinline__ float largest_scale(const f32* scales, int head_dim) {
    float one[1], largest = 0.0f;
    if constexpr (PER_CHANNEL) {
        for (int i = threadIdx.x % 32; i < head_dim; i += 32) {
            load_scales(scales, i, one);
            largest = fmaxf(largest, fabsf(one[0]));
        }
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
        return largest;
    } else {
        load_scales(scales, 0, one);
        return one[0];
    }
}

// Returns 1 / scale, or 0 for 0, as onnxruntime does on a GPU. A division would be a call, which saves registers.
__device__ __forceinline__ float inverse(float scale) {
    const float near = reciprocal(scale);
    return scale == 0.0f ? 0.0f : fmaf(near, fmaf(-scale, near, 1.0f), near);
}

// Returns the byte of the number nearest to x / scale, ties to even. Numbers out of range become the largest, or the
// smallest. As in onnxruntime, x is multiplied by the reciprocal of the scale.
__device__ __forceinline__ u32 quantized(float x, float scale) {
    x *= inverse(scale);
    if constexpr (!FLOAT8) return u32(int(rintf(fmaxf(-128.0f, fminf(127.0f, x))))) & 0xffu;
    return float8_bits(fminf(fabsf(x), 448.0f)) | (__float_as_uint(x) >> 24 & 0x80u);
}

// Returns the number of the lowest byte. An e4m3fn NaN becomes 480 or -480, so that rows after the end of a sequence,
// which are multiplied by 0, may hold any bytes.
__device__ __forceinline__ float number(u32 byte) {
    if constexpr (!FLOAT8) return float(int(byte << 24) >> 24);
    float half[2];  // e4m3fn's bits within those of fp16, whose exponent bias is 8 larger
    widen(f16(), (byte & 0x80u) << 8 | (byte & 0x7fu) << 7, half);
    return half[0] * 256.0f;
}

// What pair() divides numbers by.
constexpr float pair_unit(f16) { return FLOAT8 ? 256.0f : 1.0f; }
constexpr float pair_unit(bf16) { return 1.0f; }

// Returns the numbers of bytes FIRST and SECOND of a word, divided by pair_unit(), as a pair of T. All steps are exact.
template <int FIRST, int SECOND>
__device__ __forceinline__ u32 pair(f16, u32 bytes) {
    if constexpr (FLOAT8) {
        const u32 high = __byte_perm(bytes, 0, 0x0404 | FIRST << 4 | SECOND << 12);
        return masked_or(high >> 1, 0x3f803f80u, high & 0x80008000u);
    }
    // 0x6400 is 1024, whose last bit has the value 1; the sign's bit is inverted, which adds 128.
    const u32 sum = __byte_perm(bytes ^ 0x80808080u, 0x64646464u, 0x4040 | FIRST | SECOND << 8);
    return subtract_words(f16(), sum, 0x64806480u);
}
template <int FIRST, int SECOND>
__device__ __forceinline__ u32 pair(bf16, u32 bytes) {
    if constexpr (FLOAT8) {  // bf16's exponent bias is 120 larger
        const u32 high = __byte_perm(bytes, 0, 0x0404 | FIRST << 4 | SECOND << 12);
        return multiply_words(bf16(), masked_or(high >> 4, 0x07f007f0u, high & 0x80008000u), 0x7b807b80u);
    }
    // 0x4300 is 128, whose last bit has the value 1. 128, or 256 if the sign's bit is set, is subtracted from the rest.
    const u32 sum = __byte_perm(bytes, 0x43434343u, 0x4040 | FIRST | SECOND << 8);
    return subtract_words(bf16(), sum & 0xff7fff7fu, sum & 0xff80ff80u);
}
#endif
