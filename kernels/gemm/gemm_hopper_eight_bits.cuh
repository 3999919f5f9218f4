// The epilogue of gemm_hopper_threads.cuh for products of operands of 8 bits, called "by row" (see epilogue.cuh).
//
//   acc = (sum - x_zero * w_sums[row, column]) * x_scale * w_scale[column]
//
// `sum` is the sum of the products of the integers or float8 numbers x and w. An x represents the number
// (x - x_zero) * x_scale, and a w represents w * w_scale. For a matrix product, w_sums[0, column] is the sum of the
// column of w. A convolution reads zeros in its padding, so the weights of taps in the padding must not be in these
// sums. Its w_sums has a row for each possible range of taps inside x (conv_edges.cuh), with the sums of w over these
// taps.
//
// In wgmma's layout, four lanes hold eight columns of a row, two neighbouring columns each. If WIDTH is 8, TMA loads the
// columns of w in another order (load_columns of gemm_hopper.cuh): of 32 columns, 8 * i + 2 * j and 8 * i + 2 * j + 1
// become columns 8 * j + 2 * i and 8 * j + 2 * i + 1, which lane i has. So each lane has eight neighbouring columns of y.
// If y is stored in 8 bits, which is the usual case, the four lanes store a whole sector of L2.
//
// Macros, besides those of gemm_hopper.cuh:
//   WIDTH      columns of y that a thread computes at a time: 8, 2 or 1; divides n
//   W_SCALES   1: w_scale has one number per column; 0: one number
//   OPERAND    s8, u8 or e4m3, the type of x and of x_zero
//   X_ZERO     1: x has a zero point, and there are w_sums; 0: the zero point is 0
//   EDGES      1: taps can lie outside x, and Edges of conv_edges.cuh returns a pixel's row of w_sums; 0: no tap does
#pragma once
#include "gemm_hopper_threads.cuh"

namespace {

constexpr int OWN_COLUMNS = WIDTH == 8 ? 8 : 2;  // columns of a thread in a group of columns
constexpr int GROUP = 4 * OWN_COLUMNS;

static_assert(TILE_N % GROUP == 0 && (WIDTH == 8 || WIDTH <= 2));

#ifndef DIMS  // a product of matrices
struct Edges {
    __device__ __forceinline__ int row(int pixel) const { return 0; }
};
#endif

// Scales and zero points of x and w, as a kernel argument; quantized/hopper.py writes the fields in this order.
struct EightBitOperands {
    const T *x_scale, *w_scale;
    const OPERAND* x_zero;
    const f32* w_sums;  // int32 numbers, loaded as f32 bits
};

struct EightBitOutput : EightBitOperands {
    Epilogue epilogue;
    int m, n;
    Edges edges;
};

constexpr int ROWS_OF_SUMS = EDGES ? 2 : 1;  // rows of w_sums for the two rows of a thread

// The scales and the w_sums of WIDTH columns, for the two rows of a thread.
struct EightBitColumns {
    float scale[WIDTH];
    Pack<f32, WIDTH> sums[ROWS_OF_SUMS];

    // The sums for the thread's first row of y are in row rows[0] of w_sums, and those for its second row in rows[1].
    __device__ __forceinline__ void load(const EightBitOutput& of, float x_scale, const int (&rows)[2], int column) {
        if constexpr (W_SCALES) unpack(load_cached<WIDTH>(of.w_scale + column), scale);
        else scale[0] = ColumnVectors::value(of.w_scale);
        if constexpr (X_ZERO)
#pragma unroll
            for (int i = 0; i < ROWS_OF_SUMS; ++i)
                sums[i] = load_cached<WIDTH>(of.w_sums + size_t(rows[i]) * of.n + column);
#pragma unroll
        for (int i = WIDTH - 1; i >= 0; --i) scale[i] = x_scale * scale[W_SCALES ? i : 0];
    }
    // Converts a sum of column i to the number that it represents. `row`: 0 for the thread's first row, or 1.
    __device__ __forceinline__ float number(Sum sum, int x_zero, int row, int i) const {
        if constexpr (X_ZERO) sum -= x_zero * int(sums[EDGES ? row : 0].words[i]);
        return float(sum) * scale[i];
    }
};

// The operands of the epilogue for a thread's two rows and OWN_COLUMNS columns of a group.
struct GroupOperands {
    static constexpr int PARTS = OWN_COLUMNS / WIDTH;
    EpilogueLoads<WIDTH, false> loads[PARTS][2];
    EightBitColumns columns[PARTS];
    bool inside[PARTS][2];

    // `of_rows` holds the operands that the program (the operators fused into the epilogue) reads once per row. `rows`
    // are the rows of w_sums. Operands of elements outside y are not read.
    __device__ __forceinline__ void load(const EightBitOutput& of, const Program::OfRow (&of_rows)[2], float x_scale,
                                         const int (&rows)[2], int first, int column) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const int from = column + part * WIDTH, existing = from < of.n ? from : 0;
            columns[part].load(of, x_scale, rows, existing);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = first + 8 * i;
                const long long at = (long long)row * of.n + from;
                auto& to = loads[part][i];
                inside[part][i] = from < of.n && row < of.m;
                of.epilogue.load_columns(to, existing, of.n);
                if (inside[part][i]) of.epilogue.load_residual(to, at);
                to.of_row = of_rows[i];
                of.epilogue.program.template load<true>(to.of_columns, existing, WIDTH);
                of.epilogue.program.template load<true>(to.of_elements, row, from, at, inside[part][i] ? WIDTH : 0);
            }
        }
    }
    // Applies the epilogue to the columns of both rows, and stores the results. `sums` has a thread's sums of a group:
    // two columns of the first row, the same columns of the second row, the next two columns of the first, and so on.
    __device__ __forceinline__ void finish(const EightBitOutput& of, const Sum* sums, int x_zero, int first,
                                           int column) const {
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float acc[WIDTH];
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) {
                    const int own = part * WIDTH + j;
                    acc[j] = columns[part].number(sums[own / 2 * 4 + 2 * i + own % 2], x_zero, i, j);
                }
                const long long at = (long long)(first + 8 * i) * of.n + column + part * WIDTH;
                of.epilogue.finish<false>(at, loads[part][i], acc, acc, inside[part][i]);  // the second `acc` is unused
            }
    }
};

// Applies the epilogue to the 64 rows of an atom, and stores the results. `origin` is the atom's first row and column.
// Operands are loaded one group ahead. Rows and columns outside y are computed too, from operands of other elements,
// but are not stored. This avoids branches, so the compiler computes numbers once if they depend only on scales of the
// program (the operators fused into the product).
__device__ __forceinline__ void finish_atom(const Sum (&d)[COLUMNS / 2], int2 origin, const EightBitOutput& of) {
    const int thread = threadIdx.x % 128;
    const int first = origin.x + thread / 32 * 16 + thread % 32 / 4;
    const float x_scale = ColumnVectors::value(of.x_scale);
    const int x_zero = X_ZERO ? *of.x_zero : 0;
    const int rows[2] = {EDGES ? of.edges.row(first) : 0, EDGES ? of.edges.row(first + 8) : 0};
    Program::OfRow of_rows[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) of.epilogue.program.load(of_rows[row], min(first + 8 * row, of.m - 1), true);
    GroupOperands operands[2];
    const int column = origin.y + thread % 4 * OWN_COLUMNS;
    operands[0].load(of, of_rows, x_scale, rows, first, column);
#pragma unroll
    for (int group = 0; group < TILE_N / GROUP; ++group) {
        const int next = group + 1;
        if (origin.y + GROUP * group >= of.n) return;
        if (next < TILE_N / GROUP) operands[next % 2].load(of, of_rows, x_scale, rows, first, column + GROUP * next);
        operands[group % 2].finish(of, &d[2 * OWN_COLUMNS * group], x_zero, first, column + GROUP * group);
    }
}

}  // namespace
