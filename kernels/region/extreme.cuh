// The accumulators of ArgMax and ArgMin, and what merges accumulators of a warp and stores them in scratch memory.
#pragma once
#include "types.cuh"

// The index of the largest number, or of the least one if !LARGEST_WINS; of equal ones the first, or the last if LAST.
// As on onnxruntime's CPU and CUDA providers, a NaN is selected only if it is the first element of its row.
template <class T, bool LARGEST_WINS, bool LAST>
struct Extreme {
    T best = T(0);
    int at = -1;
    __device__ __forceinline__ void add(T x, int place) {
        if (x == x || place == 0) merge(Extreme{x, place});
    }
    __device__ __forceinline__ void merge(const Extreme& other) {
        const bool better = (LARGEST_WINS ? other.best > best : other.best < best) || other.best != other.best;
        const bool later = other.at > at;
        if (other.at >= 0 && (at < 0 || better || (other.best == best && later == LAST))) *this = other;
    }
};

// Returns the accumulator of the lane whose index is this lane's XOR `mask`.
template <class A>
__device__ __forceinline__ A exchanged(const A& own, int mask) {
    union Words {
        A whole;
        u32 words[sizeof(A) / 4];
        __device__ __forceinline__ Words() {}
    } from, to;
    from.whole = own;
#pragma unroll
    for (int i = 0; i < int(sizeof(A) / 4); ++i) to.words[i] = __shfl_xor_sync(0xffffffffu, from.words[i], mask);
    return to.whole;
}

// Merges the accumulators of COUNT neighbouring threads of a warp; COUNT is a power of two.
template <int COUNT = 32, class A>
__device__ __forceinline__ void merge_warp(A& own) {
#pragma unroll
    for (int mask = COUNT / 2; mask > 0; mask /= 2) own.merge(exchanged(own, mask));
}

// Merges own[i] of COUNT neighbouring threads for each i; those of i = 0 to N - 1 are then own[0] of the first N threads,
// and of every N threads after them. N and COUNT are powers of two. This takes fewer exchanges than to merge each alone.
template <int COUNT, int N, class A>
__device__ __forceinline__ void merge_each(A (&own)[N]) {
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2) {
        const bool is_upper = threadIdx.x & half;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const A given = is_upper ? own[i] : own[i + half];
            if (is_upper) own[i] = own[i + half];
            own[i].merge(exchanged(given, half));
        }
    }
#pragma unroll
    for (int mask = N; mask < COUNT; mask *= 2) own[0].merge(exchanged(own[0], mask));
}

template <class A>
__device__ __forceinline__ void store_accumulator(u64* memory, long long at, const A& own) {
    reinterpret_cast<A*>(memory)[at] = own;
}
