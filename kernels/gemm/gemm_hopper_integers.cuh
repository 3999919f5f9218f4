// The epilogue of gemm_hopper_threads.cuh for products of integers: by row, in the words of epilogue.cuh.
//
//   acc = (sum - x_zero * w_sums[row, column]) * x_scale * w_scale[column]
//
// x stands for (x - x_zero) * x_scale, w for w * w_scale, and sum is that of x w. w_sums[0, column] is the sum of the
// column of w. A convolution reads zeros in its padding, where x stands for 0: its sums are those of the taps inside x,
// one row for each range of them (conv_edges.cuh).
//
// Four lanes hold eight columns of a row in wgmma's layout, two each. They exchange the sums of 32 columns through shared
// memory, so that each finishes eight neighbouring ones; the integers that they mostly store then fill a sector of L2.
// After the barriers, which have BARRIER_BYTES, each warp has EXCHANGE_BYTES for 16 rows of 32 sums.
//
// Macros, besides those of gemm_hopper.cuh:
//   BARRIER_BYTES, EXCHANGE_PITCH    as the host counts them; the second is in sums, from a row to the next
//   WIDTH      columns that are finished together: 8, 4, 2 or 1; they divide n
//   W_SCALES   1: w_scale has one number per column; 0: one number
//   OPERAND    s8 or u8, the type of x and of x_zero
//   X_ZERO     1: x has a zero point, and w_sums the numbers above; 0: it is 0
//   EDGES      1: taps may lie outside x, and conv_edges.cuh has the struct Edges, which tells the row of sums; else 0
#pragma once
#include "gemm_hopper_threads.cuh"

namespace {

constexpr int EXCHANGE_AT = BARRIERS_AT + BARRIER_BYTES;
constexpr int EXCHANGE_BYTES = 16 * EXCHANGE_PITCH * sizeof(int);

static_assert(TILE_N % 32 == 0 && 8 % WIDTH == 0);
static_assert(EXCHANGE_PITCH % 32 == 8, "stores of four rows use different banks");

#ifndef DIMS  // a product of matrices
struct Edges {
    __device__ __forceinline__ int row(int pixel) const { return 0; }
};
#endif

struct IntegerOutput {
    Epilogue epilogue;
    const T *x_scale, *w_scale;
    const OPERAND* x_zero;
    const f32* w_sums;  // the bits of integers
    Edges edges;
    int m, n;
};

// Two or four neighbouring sums.
struct alignas(8) TwoSums { int at[2]; };
struct alignas(16) FourSums { int at[4]; };

// Called by a warp: exchanges sums of 16 rows and 32 columns through its shared memory. `d` has a thread's sums in
// wgmma's layout, and `sums` gets eight neighbouring columns of the same two rows.
__device__ __forceinline__ void exchange(char* memory, const int* d, int (&sums)[2][8]) {
    const int lane = threadIdx.x % 32, row = lane / 4 * EXCHANGE_PITCH;
    int* base = reinterpret_cast<int*>(memory) + row;
    __syncwarp();  // all lanes have read the sums before
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
            *reinterpret_cast<TwoSums*>(base + i * 8 * EXCHANGE_PITCH + 8 * j + lane % 4 * 2) =
                TwoSums{{d[4 * j + 2 * i], d[4 * j + 2 * i + 1]}};
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const FourSums four =
                *reinterpret_cast<const FourSums*>(base + i * 8 * EXCHANGE_PITCH + lane % 4 * 8 + 4 * half);
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[i][4 * half + j] = four.at[j];
        }
}

constexpr int ROWS_OF_SUMS = EDGES ? 2 : 1;  // of the two rows of a thread

// The parts of WIDTH columns that few rows share.
struct IntegerColumns {
    float scale[WIDTH];
    Pack<f32, WIDTH> sums[ROWS_OF_SUMS];

    // `rows` are the rows of w_sums.
    __device__ __forceinline__ void load(const IntegerOutput& of, float x_scale, const int (&rows)[2], int column) {
        if constexpr (W_SCALES) unpack(load_cached<WIDTH>(of.w_scale + column), scale);
        else scale[0] = ColumnVectors::value(of.w_scale);
        if constexpr (X_ZERO)
#pragma unroll
            for (int i = 0; i < ROWS_OF_SUMS; ++i)
                sums[i] = load_cached<WIDTH>(of.w_sums + size_t(rows[i]) * of.n + column);
#pragma unroll
        for (int i = WIDTH - 1; i >= 0; --i) scale[i] = x_scale * scale[W_SCALES ? i : 0];
    }
    // Returns the number that the sum of a column stands for, in the first or the second row of the thread.
    __device__ __forceinline__ float number(int sum, int x_zero, int row, int i) const {
        if constexpr (X_ZERO) sum -= x_zero * int(sums[EDGES ? row : 0].words[i]);
        return float(sum) * scale[i];
    }
};

using Loads = EpilogueLoads<WIDTH, false>;

// Loads what the epilogue reads for WIDTH columns of a row.
__device__ __forceinline__ void load_columns(Loads& loads, int row, int column, const IntegerOutput& of) {
    const long long at = (long long)row * of.n + column;
    of.epilogue.load_columns(loads, column, of.n);
    of.epilogue.load_residual(loads, at);
    of.epilogue.program.load(loads.of_row, row, true);
    of.epilogue.program.template load<true>(loads.of_columns, column, WIDTH);
    of.epilogue.program.template load<true>(loads.of_elements, row, column, at, WIDTH);
}

// Finishes the 64 rows of an atom; `origin` is its first row and column. Operands are loaded before the exchange.
__device__ __forceinline__ void finish_atom(const int (&d)[COLUMNS / 2], int2 origin, const IntegerOutput& of) {
    extern __shared__ __align__(1024) char memory[];
    char* own_memory = memory + EXCHANGE_AT + (threadIdx.x / 32 - 4) * EXCHANGE_BYTES;  // the producers are 4 warps
    const int thread = threadIdx.x % 128;
    const int first = origin.x + thread / 32 * 16 + thread % 32 / 4;
    const float x_scale = ColumnVectors::value(of.x_scale);
    const int x_zero = X_ZERO ? *of.x_zero : 0;
    const int rows[2] = {EDGES ? of.edges.row(first) : 0, EDGES ? of.edges.row(first + 8) : 0};
    const bool inside[2] = {first < of.m, first + 8 < of.m};
#pragma unroll
    for (int group = 0; group < TILE_N / 32; ++group) {
        const int column = origin.y + 32 * group + thread % 4 * 8;
        Loads loads[8 / WIDTH][2];
        IntegerColumns columns[8 / WIDTH];
#pragma unroll
        for (int part = 0; part < 8 / WIDTH; ++part) {
            const int from = column + part * WIDTH;
            if (from >= of.n) break;
            columns[part].load(of, x_scale, rows, from);
#pragma unroll
            for (int row = 0; row < 2; ++row)
                if (inside[row]) load_columns(loads[part][row], first + 8 * row, from, of);
        }
        int sums[2][8];
        exchange(own_memory, &d[16 * group], sums);
#pragma unroll
        for (int part = 0; part < 8 / WIDTH; ++part) {
            const int from = column + part * WIDTH;
            if (from >= of.n) break;
#pragma unroll
            for (int row = 0; row < 2; ++row)
                if (inside[row]) {
                    float acc[WIDTH];
#pragma unroll
                    for (int i = 0; i < WIDTH; ++i)
                        acc[i] = columns[part].number(sums[row][part * WIDTH + i], x_zero, row, i);
                    const long long at = (long long)(first + 8 * row) * of.n + from;
                    of.epilogue.finish<false>(at, loads[part][row], acc, acc);  // without a gate, one acc is not used
                }
        }
    }
}

}  // namespace
