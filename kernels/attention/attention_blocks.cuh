// Classifies the elements of a mask by their effect on scores.
#pragma once
#include "types.cuh"
#include "attention_score_tensor.cuh"

// Loads N neighbouring elements of a mask.
template <int N, class E>
__device__ __forceinline__ Pack<E, N> load_mask(const E* from) {
    if constexpr (N * sizeof(E) == 1) return {{*reinterpret_cast<const unsigned char*>(from)}};
    else return load_cached<N>(from);
}

// Returns for each element: 0, the score does not count; 1, the score changes; 2, the score stays as it is.
template <int N>
__device__ __forceinline__ void mask_kinds(const Pack<b8, N>& elements, int (&kinds)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) kinds[i] = (elements.words[i / 4] >> i % 4 * 8 & 0xff) != 0 != INVERTED ? 2 : 0;
}

// The same for an additive mask. Elements up to NEGLIGIBLE count as -inf, as in the first pass of attention_hopper.cu.
template <class E, int N>
__device__ __forceinline__ void mask_kinds(const Pack<E, N>& elements, int (&kinds)[N]) {
    float values[N];
    unpack(elements, values);
#pragma unroll
    for (int i = 0; i < N; ++i) kinds[i] = values[i] <= NEGLIGIBLE ? 0 : values[i] == 0.0f ? 2 : 1;
}

// Whether all elements are equal, bit by bit.
template <class E, int N>
__device__ __forceinline__ bool equal(const Pack<E, N>& elements) {
    if constexpr (N == 1) return true;
    constexpr u32 EACH = sizeof(E) == 4 ? 1 : sizeof(E) == 2 ? 0x10001 : 0x1010101;  // element * EACH fills a word
    constexpr u32 ONE = sizeof(E) == 4 ? ~0u : (1u << 8 * sizeof(E)) - 1, ALL = N * sizeof(E) == 2 ? 0xffff : ~0u;
    const u32 first = (elements.words[0] & ONE) * EACH & ALL;
    bool same = true;
#pragma unroll
    for (u32 word : elements.words) same &= word == first;
    return same;
}
