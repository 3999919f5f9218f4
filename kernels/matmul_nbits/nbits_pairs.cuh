// Pairs of fp16 or bf16 numbers, each pair in a word, which quantized weights become.
#pragma once
#include "epilogue.cuh"
#include "packed_words.cuh"

template <class A, class B> constexpr bool IS = false;
template <class A> constexpr bool IS<A, A> = true;
constexpr bool HALF = IS<T, f16>;

// Bit operations convert a weight q to a number: the last bit of LEAD's mantissa has the value 1, so the bits LEAD | q
// are the number LEAD + q.
constexpr unsigned LEAD = HALF ? 0x64006400u : 0x43004300u;  // a pair of 1024 in fp16, or of 128 in bf16

__device__ __forceinline__ unsigned select(unsigned a, unsigned b, unsigned selector) {
    return __byte_perm(a, b, selector);
}

__device__ __forceinline__ unsigned twice(unsigned bits) { return select(bits, bits, 0x1010); }
