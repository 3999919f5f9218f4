// The taps of a filter that lie inside x, for gemm_hopper_eight_bits.cuh.
//
// Along an axis, the first 0 to BEGIN taps of the filter and the last 0 to END taps can lie in the padding. Each pair
// of these two counts determines a range of taps inside x. For each combination of ranges along all axes,
// quantized_sums.cu writes a row of sums: for each filter, the sum of its weights at the taps inside x. In the order of
// these rows, the count of last taps varies fastest, and W is the innermost axis.
//
// Macros, besides KERNEL_* and DILATION_* of conv_operands.cuh:
//   STRIDE_*, PAD_*   by axis; PAD: elements before x
//   BEGIN_*, END_*    the largest number of taps before x, and after it, by axis
#pragma once
#include "types.cuh"
#include "conv_sizes.cuh"

namespace {

constexpr int TAPS = KERNEL_D * KERNEL_H * KERNEL_W;

template <int KERNEL, int STRIDE, int PAD, int DILATION, int BEGIN, int END>
struct AxisEdges {
    static constexpr int ROWS = (BEGIN + 1) * (END + 1);

    // Returns the index of the row of sums for element `at` of y, along this axis only: the index of the element's pair
    // of counts of taps in the padding. x has `size` elements along the axis.
    static __device__ __forceinline__ int row(int at, int size) {
        const int first = at * STRIDE - PAD, beyond = first + (KERNEL - 1) * DILATION - size;
        const int before = first < 0 ? min((-first + DILATION - 1) / DILATION, BEGIN) : 0;
        const int after = beyond < 0 ? 0 : min(beyond / DILATION + 1, END);
        return before * (END + 1) + after;
    }
    static __device__ __forceinline__ bool has(int row, int tap) {
        return tap >= row / (END + 1) && tap < KERNEL - row % (END + 1);
    }
};

using EdgesD = AxisEdges<KERNEL_D, STRIDE_D, PAD_D, DILATION_D, BEGIN_D, END_D>;
using EdgesH = AxisEdges<KERNEL_H, STRIDE_H, PAD_H, DILATION_H, BEGIN_H, END_H>;
using EdgesW = AxisEdges<KERNEL_W, STRIDE_W, PAD_W, DILATION_W, BEGIN_W, END_W>;
constexpr int EDGE_ROWS = EdgesD::ROWS * EdgesH::ROWS * EdgesW::ROWS;

struct Edges {
    Position x, y;  // sizes of x and y

    // Returns the index of the row of sums for a pixel of y.
    __device__ __forceinline__ int row(int pixel) const {
        const int lines = pixel / y.w, planes = lines / y.h;
        const int d = EdgesD::row(planes % y.d, x.d), h = EdgesH::row(lines - planes * y.h, x.h);
        return (d * EdgesH::ROWS + h) * EdgesW::ROWS + EdgesW::row(pixel - lines * y.w, x.w);
    }
};

// Returns a filter's sum in row `row` of the sums; `of_taps` are the filter's sums for single taps.
__device__ __forceinline__ int sum_of_row(const int* of_taps, int row) {
    const int lines = row / EdgesW::ROWS, w = row % EdgesW::ROWS, h = lines % EdgesH::ROWS, d = lines / EdgesH::ROWS;
    int sum = 0;
    for (int tap = 0; tap < TAPS; ++tap)
        if (EdgesW::has(w, tap % KERNEL_W) && EdgesH::has(h, tap / KERNEL_W % KERNEL_H) &&
            EdgesD::has(d, tap / (KERNEL_W * KERNEL_H)))
            sum += of_taps[tap];
    return sum;
}

}  // namespace
