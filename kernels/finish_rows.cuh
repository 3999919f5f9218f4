// The epilogue "by row" (see epilogue.cuh) for all of a block's part of y, by all its threads.
//
// With SELECTED_COLUMNS, the program after the product ends in an ArgMax or ArgMin of each row of y. Its operand is
// then not stored. Instead, each SELECTED_COLUMNS adjacent columns of a row get an accumulator (program::Selected),
// which is stored where epilogue.y points; select_index.cu merges the accumulators of a row.
//
// Macros:
//   WIDTH              elements per access to y, the residual and the column vectors; divides n
//   SELECTED_COLUMNS   WIDTH times a power of two up to 32; not defined if y is stored
#pragma once
#include "epilogue.cuh"

// Runs the epilogue, by row, for a block's part of y: `rows` rows from `row` on, and COLUMNS columns from `first` on;
// columns from `columns` on do not exist. sums_of(i, j, values, ups) computes the accumulators of WIDTH columns,
// the first one j columns after `first`, of the block's row i. A block has at most MAX_ROWS rows. WHOLE: all COLUMNS
// columns exist.
template <int COLUMNS, int THREADS, int MAX_ROWS, bool WHOLE = false, class SumsOf>
__device__ __forceinline__ void finish_rows(const Epilogue& epilogue, int row, int rows, int first, int columns,
                                            SumsOf sums_of) {
    constexpr int VECTORS = COLUMNS / WIDTH;
#ifdef SELECTED_COLUMNS
    constexpr int SHARING = SELECTED_COLUMNS / WIDTH;  // adjacent lanes, whose columns have one accumulator
    static_assert(SHARING <= 32 && VECTORS % SHARING == 0, "a warp merges an accumulator");
    const int count = (columns + SELECTED_COLUMNS - 1) / SELECTED_COLUMNS;             // accumulators per row
    for (int at = threadIdx.x; at < (rows * VECTORS + 31) / 32 * 32; at += THREADS) {  // whole warps
        const int i = at / VECTORS, column = first + at % VECTORS * WIDTH;
        const bool inside = i < rows && (WHOLE || column < columns);
        program::Selected selected;
        if (inside) {
            float values[WIDTH], ups[WIDTH], results[WIDTH];
            EpilogueLoads<WIDTH, false> loads;
            sums_of(i, at % VECTORS * WIDTH, values, ups);
            epilogue.load(loads, row + i, column, columns);
            epilogue.compute((long long)(row + i) * columns + column, loads, values, ups, true, results);
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) selected.add(results[j], column + j);
        }
        program::merge_warp<SHARING>(selected);
        if (inside && at % SHARING == 0)
            program::store_accumulator(reinterpret_cast<u64*>(epilogue.y),
                                       (long long)(row + i) * count + column / SELECTED_COLUMNS, selected);
    }
#else
    const auto finish = [&](int at) {
        const int i = at / VECTORS, j = at % VECTORS * WIDTH;
        if (!WHOLE && first + j >= columns) return;
        float values[WIDTH], ups[WIDTH];
        sums_of(i, j, values, ups);
        epilogue.finish(values, ups, row + i, first + j, columns);
    };
    if constexpr (MAX_ROWS * VECTORS <= THREADS) {  // a loop would be unrolled
        if (threadIdx.x < rows * VECTORS) finish(threadIdx.x);
    } else {
        for (int at = threadIdx.x; at < rows * VECTORS; at += THREADS) finish(at);
    }
#endif
}
