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
// In wgmma's layout, four lanes hold eight columns of a row, two neighbouring columns each. If WIDTH is 8 or 4, TMA
// loads the columns of w in another order (load_columns of gemm_hopper.cuh): of 4 * WIDTH columns, 2 * i and 2 * i + 1
// of the WIDTH columns of lane j become columns 8 * i + 2 * j and 8 * i + 2 * j + 1, which lane j has. So each lane has
// WIDTH neighbouring columns of y. It stores these at once, and four lanes store whole sectors of L2.
//
// Macros, besides those of gemm_hopper.cuh:
//   WIDTH      columns of y that a thread computes at a time: 8, 4, 2 or 1; divides n
//   W_SCALES   1: w_scale has one number per column; 0: one number
//   OPERAND    s8, u8 or e4m3, the type of x and of x_zero
//   X_ZERO     1: x has a zero point, and there are w_sums; 0: the zero point is 0
//   EDGES      1: taps can lie outside x, and Edges of conv_edges.cuh returns a pixel's row of w_sums; 0: no tap does
#pragma once
#include "gemm_hopper_threads.cuh"

namespace {

constexpr int OWN_COLUMNS = WIDTH > 2 ? WIDTH : 2;  // columns of a thread in a group of columns
constexpr int GROUP = 4 * OWN_COLUMNS;

static_assert(TILE_N % GROUP == 0 && 8 % WIDTH == 0);

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

constexpr int PARTS = OWN_COLUMNS / WIDTH, SCALES = W_SCALES ? WIDTH : 1;

// What a thread reads once for its columns of a group. In `loads`, only the operands of columns are used.
struct GroupColumns {
    Pack<T, SCALES> scales[PARTS];
    Pack<f32, WIDTH> sums[PARTS];
    EpilogueLoads<WIDTH, false> loads[PARTS];

    __device__ __forceinline__ void load(const EightBitOutput& of, int column) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const int from = column + part * WIDTH, existing = from < of.n ? from : 0;
            scales[part] = load_cached<SCALES>(of.w_scale + W_SCALES * existing);
            if constexpr (X_ZERO && !EDGES) sums[part] = load_cached<WIDTH>(of.w_sums + existing);
            of.epilogue.load_columns(loads[part], existing, of.n);
            of.epilogue.program.template load<true>(loads[part].of_columns, existing, WIDTH);
        }
    }
};

// What a thread reads for the elements of these columns in two rows of an atom. In `loads`, only the operands of
// elements are used.
struct GroupElements {
    Pack<f32, WIDTH> sums[PARTS][2];
    EpilogueLoads<WIDTH, false> loads[PARTS][2];

    // `edges` are the rows of w_sums for the two rows. Operands of elements outside y are not read.
    __device__ __forceinline__ void load(const EightBitOutput& of, const int (&edges)[2], int first, int column) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = first + 8 * i, from = column + part * WIDTH, existing = from < of.n ? from : 0;
                const long long at = (long long)row * of.n + from;
                const bool inside = from < of.n && row < of.m;
                if constexpr (EDGES) sums[part][i] = load_cached<WIDTH>(of.w_sums + size_t(edges[i]) * of.n + existing);
                if (inside) of.epilogue.load_residual(loads[part][i], at);
                of.epilogue.program.template load<true>(loads[part][i].of_elements, row, from, at, inside ? WIDTH : 0);
            }
    }
};

// The results of a consumer's rows of a tile. Operands of columns are loaded a group ahead, and those of elements AHEAD
// atoms ahead; the first ones before the multiplication. Rows and columns outside y are computed too, from operands of
// other elements, but are not stored. This avoids branches, so the compiler computes numbers once if they depend only
// on scales of the program (the operators fused into the product).
struct EightBitResults {
    static constexpr int STEPS = TILE_N / GROUP * ATOMS;
    // All are loaded first if registers hold them: 64 bytes for each of two rows. With PINGPONG, another consumer
    // computes while this one waits, and loading further ahead gains nothing.
    static constexpr int ELEMENT_BYTES = sizeof(Program::OfElements<WIDTH>);
    static constexpr bool ARE_FEW = ELEMENT_BYTES <= 8 && STEPS * PARTS * ELEMENT_BYTES <= 64;
    static constexpr bool ALL_AHEAD = !PINGPONG && !EDGES && !HAS_RESIDUAL && ARE_FEW;
    static constexpr int AHEAD = ALL_AHEAD ? STEPS : 2;

    const EightBitOutput& of;
    int left, first, column;  // columns of y from the tile's first on; the thread's first row and column
    float x_scale;
    int x_zero, edges[ATOMS][2];  // the zero point of x; the row of w_sums for each row of the thread
    Program::OfRow of_rows[ATOMS][2];
    GroupColumns columns[2];
    GroupElements elements[AHEAD + 1];

    // `origin` is the first row and column.
    __device__ __forceinline__ EightBitResults(const EightBitOutput& of, int2 origin) : of(of), left(of.n - origin.y) {
        const int thread = threadIdx.x % 128;
        first = origin.x + thread / 32 * 16 + thread % 32 / 4;
        column = origin.y + thread % 4 * OWN_COLUMNS;
        x_scale = ColumnVectors::value(of.x_scale);
        x_zero = X_ZERO ? *of.x_zero : 0;
#pragma unroll
        for (int atom = 0; atom < ATOMS; ++atom)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = first + 64 * atom + 8 * i;
                edges[atom][i] = EDGES ? of.edges.row(row) : 0;
                of.epilogue.program.load(of_rows[atom][i], min(row, of.m - 1), true);
            }
        columns[0].load(of, column);
#pragma unroll
        for (int step = 0; step < AHEAD && step < STEPS; ++step) load_elements(step);
    }

    __device__ __forceinline__ void finish(const Sum (&d)[ATOMS][COLUMNS / 2]) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int group = step / ATOMS, atom = step % ATOMS;
            if (GROUP * group >= left) return;
            if (atom == 0 && step + ATOMS < STEPS) columns[(group + 1) % 2].load(of, column + GROUP * (group + 1));
            if (step + AHEAD < STEPS) load_elements(step + AHEAD);
            finish_group(&d[atom][2 * OWN_COLUMNS * group], columns[group % 2], elements[step % (AHEAD + 1)], atom,
                         column + GROUP * group);
        }
    }

private:
    __device__ __forceinline__ void load_elements(int step) {
        const int atom = step % ATOMS, row = first + 64 * atom;
        elements[step % (AHEAD + 1)].load(of, edges[atom], row, column + GROUP * (step / ATOMS));
    }

    // Applies the epilogue to two rows of a group, and stores the results. `sums` has a thread's sums: two columns of
    // the first row, the same columns of the second row, the next two columns of the first, and so on.
    __device__ __forceinline__ void finish_group(const Sum* sums, const GroupColumns& of_columns,
                                                 const GroupElements& of_elements, int atom, int column) const {
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const Pack<f32, WIDTH>& of_weights = EDGES ? of_elements.sums[part][i] : of_columns.sums[part];
                EpilogueLoads<WIDTH, false> loads = of_columns.loads[part];
                loads.residual = of_elements.loads[part][i].residual;
                loads.of_elements = of_elements.loads[part][i].of_elements;
                loads.of_row = of_rows[atom][i];
                float scales[SCALES], acc[WIDTH];
                unpack(of_columns.scales[part], scales);
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) {
                    const int own = part * WIDTH + j;
                    Sum sum = sums[own / 2 * 4 + 2 * i + own % 2];
                    if constexpr (X_ZERO) sum -= x_zero * int(of_weights.words[j]);
                    acc[j] = float(sum) * (x_scale * scales[W_SCALES ? j : 0]);
                }
                const int row = first + 64 * atom + 8 * i, from = column + part * WIDTH;
                const bool inside = from < of.n && row < of.m;
                of.epilogue.finish<false>((long long)row * of.n + from, loads, acc, acc, inside);  // GATED is 0
            }
    }
};

}  // namespace
