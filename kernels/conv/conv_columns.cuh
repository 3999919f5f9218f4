// The part of a row of x that a thread of a depthwise kernel reads, for a strip of TW positions of y.
//
// Macros:
//   CHANNELS, VEC       channels of x, and elements of an access; VEC divides CHANNELS
//   TW, SW, DW          positions of y, and the filter's stride and dilation, along the width
//   PIECE               taps of a row of the filter that are used at a time
//   EIGHT_BITS          1: x is integers, of the type OPERAND
#pragma once
#include "types.cuh"

using i64 = long long;
#if EIGHT_BITS
using X_T = OPERAND;
#else
using X_T = T;
#endif

constexpr int COLUMNS = (TW - 1) * SW + (PIECE - 1) * DW + 1;  // columns of x that a strip reads
constexpr u32 ALL_COLUMNS = 0xffffffffu >> (32 - COLUMNS);

static_assert(CHANNELS % VEC == 0, "a position is whole vectors");
static_assert(COLUMNS <= 32, "a bit for each column");

// Returns whether any position of a strip reads column `column`.
__device__ constexpr bool reads_column(int column) {
    for (int s = 0; s < PIECE; ++s) {
        const int from = column - s * DW;
        if (from >= 0 && from % SW == 0 && from / SW < TW) return true;
    }
    return false;
}

// Returns a mask of the columns, from `first` on, that lie inside a row of x.
__device__ __forceinline__ u32 columns_inside(int first, int width) {
    const int low = max(0, -first), high = min(COLUMNS, width - first);
    return low < high ? ALL_COLUMNS >> (COLUMNS - (high - low)) << low : 0;
}

struct Row {
    Pack<X_T, VEC> columns[COLUMNS];

    // Loads the columns whose bits in `inside` are set; all words of the others become `outside`.
    __device__ __forceinline__ void load_some(const X_T* from, u32 inside, u32 outside = 0) {
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            if (!reads_column(j)) continue;
#pragma unroll
            for (u32& word : columns[j].words) word = outside;
            if (inside >> j & 1) columns[j] = load_cached<VEC>(from + j * CHANNELS);
        }
    }

    // Does the same as load_some, but faster if all columns are inside.
    __device__ __forceinline__ void load(const X_T* from, u32 inside) {
        if (inside != ALL_COLUMNS) return load_some(from, inside);
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
            if (reads_column(j)) columns[j] = load_cached<VEC>(from + j * CHANNELS);
    }

    __device__ __forceinline__ void widen_to(float (&values)[COLUMNS][VEC]) const {
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
            if (reads_column(j)) unpack(columns[j], values[j]);
    }
};
