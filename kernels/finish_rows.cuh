// The epilogue "by row" (see epilogue.cuh) for all of a block's part of y, by all its threads.
//
// Macros:
//   WIDTH              elements per access to y, the residual and the column vectors; divides n
#pragma once
#include "epilogue.cuh"

// Runs the epilogue, by row, for a block's part of y: `rows` rows from `row` on, and COLUMNS columns from `first` on, of
// which those from `columns` on do not exist. sums_of(i, j, values, ups) computes the accumulators of WIDTH columns,
// the first one j columns after `first`, of the block's row i. WHOLE: all COLUMNS columns exist.
template <int COLUMNS, int THREADS, bool WHOLE = false, class SumsOf>
__device__ __forceinline__ void finish_rows(const Epilogue& epilogue, int row, int rows, int first, int columns,
                                            SumsOf sums_of) {
    constexpr int VECTORS = COLUMNS / WIDTH;
    for (int at = threadIdx.x; at < rows * VECTORS; at += THREADS) {
        const int i = at / VECTORS, j = at % VECTORS * WIDTH;
        if (!WHOLE && first + j >= columns) continue;
        float values[WIDTH], ups[WIDTH];
        sums_of(i, j, values, ups);
        epilogue.finish(values, ups, row + i, first + j, columns);
    }
}
