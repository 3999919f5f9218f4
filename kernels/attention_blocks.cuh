// What an element of a mask does to its score.
#pragma once
#include "types.cuh"

struct b8 { unsigned char bits; };

// A mask's element as it lies in memory.
__device__ __forceinline__ Pack<b8, 1> load_mask(const b8* from) { return {{from->bits}}; }

template <class E>
__device__ __forceinline__ Pack<E, 1> load_mask(const E* from) { return load_cached<1>(from); }

// 0 the score does not count, 1 it changes, 2 it stays. In fp32 a score beside -1e30 vanishes.
__device__ __forceinline__ int mask_kind(const Pack<b8, 1>& element) {
    return (element.words[0] != 0) != INVERTED ? 2 : 0;
}

template <class E>
__device__ __forceinline__ int mask_kind(const Pack<E, 1>& element) {
    float value[1];
    unpack(element, value);
    return value[0] <= -1e30f ? 0 : value[0] == 0.0f ? 2 : 1;
}
