// Conversions of float8 numbers (e4m3 and e5m2 in types.cuh).
#pragma once
#include "types.cuh"

// Returns the float8 number whose bits are those of the lowest byte. A subnormal number is read as a normal one, which
// is 2^-6 too large; then 2^-6 is subtracted. Other numbers have an exponent bias that is 120 smaller than float's.
__device__ __forceinline__ float float8_number(u32 byte) {
    const u32 bits = byte & 127, bias = bits < 8 ? 121 : 120;
    float size = __uint_as_float((bits << 20) + (bias << 23)) - (bits < 8 ? 0x1p-6f : 0.0f);
    if (bits == 127) size = __uint_as_float(0x7fffffffu);  // NaN
    return __uint_as_float(__float_as_uint(size) | (byte & 128) << 24);
}

__device__ __forceinline__ float float8_number(e5m2 number) {
    float halves[2];
    widen(f16(), u32(number) << 8, halves);
    return halves[0];
}

// Returns the bits of the float8 number nearest to a size from 0 to 448; ties are rounded to even.
__device__ __forceinline__ u32 float8_bits(float size) {
    // The last bits of 2^14 + size, for a size below 2^-6, are the nearest multiple of 2^-9, the smallest number.
    if (size < 0x1p-6f) return __float_as_uint(size + 16384.0f) & 0xfu;
    const u32 kept = __float_as_uint(size) - (120u << 23);
    return (kept + 0x7ffffu + (kept >> 20 & 1u)) >> 20;
}
