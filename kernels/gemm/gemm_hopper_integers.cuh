// The epilogue of gemm_hopper_threads.cuh for products of integers: by row, in the words of epilogue.cuh.
//
//   acc = (sum - zeros[0, column] + the zeros of taps outside x) * x_scale * w_scale[column]
//
// x stands for (x - x_zero) * x_scale, w for w * w_scale, and sum is that of x w. zeros[0, column] is x_zero times the
// sum of the column of w, as quantized_zeros.cu writes it. A convolution reads zeros in its padding, where x stands for
// 0: row 1 + t of `zeros` is x_zero times the column's sum over tap t, for the taps that lie outside x.
//
// Four lanes hold eight columns of a row in wgmma's layout, two each. They exchange the sums of 32 columns, so that
// each finishes eight neighbouring ones; the integers that they mostly store then fill a sector of L2.
//
// Macros, besides those of gemm_hopper.cuh:
//   WIDTH      columns that are finished together: 8, 4, 2 or 1; they divide n
//   W_SCALES   1: w_scale has one number per column; 0: one number
//   X_ZERO     1: x has a zero point, and `zeros` the numbers above; 0: it is 0
//   EDGES      1: taps may lie outside x, and conv_edges.cuh has the struct Edges, which tells which ones; else 0
#pragma once
#include "gemm_hopper_threads.cuh"

namespace {

static_assert(TILE_N % 32 == 0 && 8 % WIDTH == 0);

#ifndef DIMS  // a product of matrices
struct Edges {
    __device__ __forceinline__ u64 outside(int row) const { return 0; }
};
#endif

struct IntegerOutput {
    Epilogue epilogue;
    const T *x_scale, *w_scale;
    const f32* zeros;  // the bits of integers
    Edges edges;
    int m, n;
};

// Exchanges values of four lanes, so that lane i has the values number i of all of them.
__device__ __forceinline__ void exchange(int (&values)[4]) {
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & bit) continue;
            const int other = __shfl_xor_sync(0xffffffff, lane & bit ? values[i] : values[i + bit], bit);
            if (lane & bit) values[i] = other;
            else values[i + bit] = other;
        }
}

// The part of a column that is the same in all rows.
struct IntegerColumns {
    float scale[WIDTH];
    int zero[WIDTH];

    __device__ __forceinline__ void load(const IntegerOutput& of, float x_scale, int column) {
        if constexpr (W_SCALES) unpack(load_cached<WIDTH>(of.w_scale + column), scale);
        else scale[0] = ColumnVectors::value(of.w_scale);
        Pack<f32, WIDTH> loaded = {};
        if constexpr (X_ZERO) loaded = load_once<WIDTH>(of.zeros + column);
#pragma unroll
        for (int i = WIDTH - 1; i >= 0; --i) {
            scale[i] = x_scale * scale[W_SCALES ? i : 0];
            zero[i] = int(loaded.words[i]);
        }
    }
};

// Finishes WIDTH columns of a row.
__device__ __forceinline__ void finish_columns(const int (&sums)[WIDTH], const IntegerColumns& columns, u64 outside,
                                               int row, int column, const IntegerOutput& of) {
    int zero[WIDTH];
    float acc[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) zero[i] = columns.zero[i];
    if constexpr (EDGES)
        for (u64 left = outside; left; left &= left - 1) {
            const Pack<f32, WIDTH> tap = load_once<WIDTH>(of.zeros + size_t(__ffsll(left)) * of.n + column);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) zero[i] -= int(tap.words[i]);
        }
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) acc[i] = float(sums[i] - zero[i]) * columns.scale[i];
    of.epilogue.finish(acc, acc, row, column, of.n);  // there is no second product
}

// Finishes the 64 rows of an atom; `origin` is its first row and column.
__device__ __forceinline__ void finish_atom(const int (&d)[COLUMNS / 2], int2 origin, const IntegerOutput& of) {
    const int thread = threadIdx.x % 128;
    const int first = origin.x + thread / 32 * 16 + thread % 32 / 4;
    const float x_scale = ColumnVectors::value(of.x_scale);
    const u64 outside[2] = {EDGES ? of.edges.outside(first) : 0, EDGES ? of.edges.outside(first + 8) : 0};
#pragma unroll
    for (int group = 0; group < TILE_N / 32; ++group) {
        const int column = origin.y + 32 * group + thread % 4 * 8;
        int sums[2][2][4];  // by row, by the column's parity, and by pair of columns
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[i / 2][i % 2][j] = d[4 * (4 * group + j) + i];
            exchange(sums[i / 2][i % 2]);
        }
#pragma unroll
        for (int at = 0; at < 8; at += WIDTH) {
            if (column + at >= of.n) break;
            IntegerColumns columns;
            columns.load(of, x_scale, column + at);
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                if (first + 8 * row >= of.m) break;
                int own[WIDTH];
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) own[i] = sums[row][(at + i) % 2][(at + i) / 2];
                finish_columns(own, columns, outside[row], first + 8 * row, column + at, of);
            }
        }
    }
}

}  // namespace
