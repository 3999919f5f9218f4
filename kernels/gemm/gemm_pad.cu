// Copies up to four matrices of 16-bit elements, so that rows begin at multiples of 16 bytes, which TMA and vector
// accesses require. A matrix of 32-bit elements is treated as one of 16-bit elements with twice as many columns.
//
// A warp copies SEGMENT elements of a row. Each lane copies PAIRS pairs of adjacent elements. It loads elements one by
// one, because a source row can begin at any element, and stores each pair as one word; all loads come before the first
// store. The padding after a row is not written, except that after an odd row one element gets an arbitrary value.
//
// Macros:
//   WARPS   warps per block    PAIRS  pairs of elements per lane
//   WEIGHTS_CONSTANT   bit i: no kernel writes matrix i, so it is read before the previous kernel ends
#include "types.cuh"

namespace {

constexpr int SEGMENT = 64 * PAIRS;

struct Matrix {
    const f16* from;
    f16* to;
    int rows, columns;

    __device__ __forceinline__ u32 segments() const { return (u32(columns) + SEGMENT - 1) / SEGMENT; }

    // Copies segment number `index` of the matrix, which has rows * segments() segments.
    __device__ __forceinline__ void copy(u32 index, bool constant) const {
        const u32 row = index / segments(), first = index % segments() * SEGMENT + threadIdx.x % 32 * 2;
        const f16* source = from + u64(row) * columns;
        f16* target = to + u64(row) * ((columns + 7) / 8 * 8);
        u32 pairs[PAIRS][2];
        if (!constant) wait_for_predecessor();
#pragma unroll
        for (int i = 0; i < 2 * PAIRS; ++i) {  // after the row's end, load its last element: an `if` would delay loads
            const u32 column = first + i / 2 * 64 + i % 2;
            pairs[i / 2][i % 2] = load_cached<1>(source + min(column, u32(columns) - 1)).words[0];
        }
        if (constant) wait_for_predecessor();
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const u32 column = first + i * 64, both = pairs[i][0] | pairs[i][1] << 16;
            if (column < columns) store_bytes<false, 4>(reinterpret_cast<char*>(target + column), &both);
        }
    }
};

struct Matrices { Matrix matrices[4]; };  // absent ones have no rows

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * WARPS) gemm_pad(Matrices all) {
    release_successor();
    u64 index = u64(blockIdx.x) * WARPS + threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const Matrix& matrix = all.matrices[i];
        const u64 count = u64(matrix.rows) * matrix.segments();
        if (index < count) return matrix.copy(u32(index), WEIGHTS_CONSTANT >> i & 1);
        index -= count;
    }
}
