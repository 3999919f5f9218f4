// The epilogue: the operations on the fp32 accumulators of a matrix product or a convolution before y is stored.
//
//   y = activation(acc + bias) [* (up + up_bias)] * column_scale + column_shift + residual, or, with RESIDUAL_FIRST,
//   y = activation(acc + bias + residual) [* (up + up_bias)] * column_scale + column_shift
//
// All of it is computed in fp32 and rounded once, to ELEMENT. acc is the accumulator of an element of y; for a gated
// product, up is the accumulator of the second product. y and residual are row-major. A column is a position on the
// last axis of y: an output feature of a product, a channel of a convolution. bias, up_bias, slope, column_scale and
// column_shift have one value per column; residual has the shape of y. slope takes the place of the activation's alpha,
// which turns leaky_relu into a PRelu. An epilogue has at most one of up_bias, slope and column_shift, which kernels
// call `extra`.
//
// A kernel applies the epilogue to its accumulators in one of two ways:
//   by row       The kernel has the accumulators of W adjacent columns of one row, and calls Epilogue::finish, which
//                loads the column vectors and the residual and stores y. load_columns and load_residual only load, for
//                kernels that start these loads earlier.
//   by fragment  The kernel has accumulators in the layout of mma or wgmma, loads column vectors and residual in that
//                layout itself, calls epilogue_columns for each accumulator and its residual, and stores y.
//
// Macros, which epilogue_defines of kernels/epilogue.py sets:
//   ELEMENT               storage type of y, residual and the column vectors: f32, f16 or bf16
//   ACTIVATION, PRECISE   a function of activations.cuh; 1: as accurate as fp32 results need, 0: as 16-bit results
//   GATED                 1: there is a second product
//   HAS_BIAS HAS_COLUMN_SCALE HAS_RESIDUAL    1: the operand is present
//   HAS_UP_BIAS HAS_SLOPE HAS_COLUMN_SHIFT    1: the operand is present, as the vector `extra`
//   RESIDUAL_FIRST        1: the residual is added before the activation; 0 without a residual
//   OPTIONAL_BIAS         1: only some products of this launch have a bias; a null pointer counts as zeros
//
// Then follow the elementwise operators that were fused after the product: the `Program` of program.cuh.
//   STORES_Y              1: y is stored; 0: the program stores all outputs
//   PROGRAM_RESIDUAL      1: the residual is one of the program's operands, and not added
#pragma once
#include "types.cuh"
#include "activations.cuh"
#include "program.cuh"

using T = ELEMENT;

constexpr bool HAS_EXTRA = HAS_UP_BIAS || HAS_SLOPE || HAS_COLUMN_SHIFT;
static_assert(GATED || !HAS_UP_BIAS, "up_bias belongs to the second product");
static_assert(HAS_UP_BIAS + HAS_SLOPE + HAS_COLUMN_SHIFT <= 1, "there is one extra vector");

// The values of the column vectors at W neighbouring columns; values of absent vectors are uninitialized.
template <int W>
struct ColumnValues {
    float bias[W], extra[W], scale[W];
};

// Returns y from the accumulators at column i of `values`; `residual` is used only with HAS_RESIDUAL.
template <int W>
__device__ __forceinline__ float epilogue_columns(float acc, float up, const ColumnValues<W>& values, int i,
                                                  float residual, float alpha, float beta) {
    if constexpr (HAS_BIAS) acc += values.bias[i];
    if constexpr (RESIDUAL_FIRST) acc += residual;
    float y = activate::ACTIVATION(acc, HAS_SLOPE ? values.extra[i] : alpha, beta);
    if constexpr (GATED) y *= HAS_UP_BIAS ? up + values.extra[i] : up;
    if constexpr (HAS_COLUMN_SCALE) y *= values.scale[i];
    if constexpr (HAS_COLUMN_SHIFT) y += values.extra[i];
    return HAS_RESIDUAL && !RESIDUAL_FIRST && !PROGRAM_RESIDUAL ? y + residual : y;
}

// Pointers to the column vectors, for kernels that apply the epilogue "by fragment" and load column by column.
struct ColumnVectors {
    const T *bias, *extra, *scale;

    // Loads the elements at `column` of all column vectors into element i of `values`.
    template <int W>
    __device__ __forceinline__ void load(ColumnValues<W>& values, int i, int column) const {
        if constexpr (HAS_BIAS) values.bias[i] = value(bias + column);
        if constexpr (HAS_EXTRA) values.extra[i] = value(extra + column);
        if constexpr (HAS_COLUMN_SCALE) values.scale[i] = value(scale + column);
    }

    __device__ __forceinline__ static float value(const T* at) {
        float one[1];
        unpack(load_cached<1>(at), one);
        return one[0];
    }
};

// The operands of the epilogue and y, as an argument of kernels; epilogue.py writes the fields in this order.
struct EpilogueOperands {
    const T *bias, *extra, *column_scale, *residual;
    T* y;
    float alpha, beta;

    __device__ __forceinline__ ColumnVectors vectors() const { return {bias, extra, column_scale}; }
};

// ---- by row ------------------------------------------------------------------------------------------------------

// W neighbouring elements of a column vector as they lie in memory. WRAPS: the columns can pass the end of a row, so
// that the elements are loaded one by one.
template <int W, bool WRAPS>
struct ColumnLoads {
    static constexpr int EACH = WRAPS ? 1 : W;
    Pack<T, EACH> packs[W / EACH];

    __device__ __forceinline__ void load(const T* from, int column, int columns) {
#pragma unroll
        for (int i = 0; i < W / EACH; ++i) {
            packs[i] = load_cached<EACH>(from + column);
            column = column + EACH == columns ? 0 : column + EACH;
        }
    }

    __device__ __forceinline__ void unpack_to(float (&values)[W]) const {
#pragma unroll
        for (int i = 0; i < W / EACH; ++i) {
            float some[EACH];
            unpack(packs[i], some);
#pragma unroll
            for (int j = 0; j < EACH; ++j) values[i * EACH + j] = some[j];
        }
    }
};

// The operands of the epilogue for W neighbouring elements of y.
template <int W, bool WRAPS>
struct EpilogueLoads {
    Pack<T, W> residual;
    ColumnLoads<W, WRAPS> bias, extra, scale;
    Program::OfRow of_row;
    Program::OfColumns<W> of_columns;
    Program::OfElements<W> of_elements;
};

struct Epilogue : EpilogueOperands {
    Program program;

    // Loads the W elements of each column vector from `column` on; a row has `columns` columns.
    template <int W, bool WRAPS>
    __device__ __forceinline__ void load_columns(EpilogueLoads<W, WRAPS>& loads, int column, int columns) const {
        if constexpr (HAS_BIAS) {
            if (!OPTIONAL_BIAS || bias) loads.bias.load(bias, column, columns);
            else loads.bias = {};
        }
        if constexpr (HAS_EXTRA) loads.extra.load(extra, column, columns);
        if constexpr (HAS_COLUMN_SCALE) loads.scale.load(column_scale, column, columns);
    }

    template <int W, bool WRAPS, class Index>
    __device__ __forceinline__ void load_residual(EpilogueLoads<W, WRAPS>& loads, Index at) const {
        if constexpr (HAS_RESIDUAL) loads.residual = load_once<W>(residual + at);
    }

    // Computes y from W accumulators and the loaded operands; `at` is the index in y, which may be outside of it.
    template <int W, bool WRAPS, class Index>
    __device__ __forceinline__ void compute(Index at, const EpilogueLoads<W, WRAPS>& loads, const float (&acc)[W],
                                            const float (&up)[W], bool inside, float (&results)[W]) const {
        ColumnValues<W> values;
        float added[W];
        if constexpr (HAS_BIAS) loads.bias.unpack_to(values.bias);
        if constexpr (HAS_EXTRA) loads.extra.unpack_to(values.extra);
        if constexpr (HAS_COLUMN_SCALE) loads.scale.unpack_to(values.scale);
        if constexpr (HAS_RESIDUAL) unpack(loads.residual, added);
#pragma unroll
        for (int i = 0; i < W; ++i) {
            results[i] =
                epilogue_columns(acc[i], GATED ? up[i] : 0.0f, values, i, HAS_RESIDUAL ? added[i] : 0.0f, alpha, beta);
        }
        program.apply<true>(results, added, loads.of_row, loads.of_columns, loads.of_elements, at, inside ? W : 0);
    }

    // Computes y from W accumulators and the loaded operands, and stores it at index `at` if that is `inside` y.
    // STREAM: y is stored so that it is evicted from L2 first.
    template <bool STREAM, int W, bool WRAPS, class Index>
    __device__ __forceinline__ void finish(Index at, const EpilogueLoads<W, WRAPS>& loads, const float (&acc)[W],
                                           const float (&up)[W], bool inside = true) const {
        float results[W];
        compute(at, loads, acc, up, inside, results);
        if constexpr (STORES_Y)
            if (inside) store<STREAM>(y + at, results);
    }

    // Loads the operands for W elements of a row of `columns`, from `column` on.
    template <int W>
    __device__ __forceinline__ void load(EpilogueLoads<W, false>& loads, long long row, int column, int columns) const {
        load_columns(loads, column, columns);
        load_residual(loads, row * columns + column);
        program.load(loads.of_row, int(row), true);
        program.load<true>(loads.of_columns, column, W);
        program.load<true>(loads.of_elements, int(row), column, row * columns + column, W);
    }

    // Computes and stores W elements of a row of `columns`, from `column` on; `up` is used only if GATED.
    template <int W>
    __device__ __forceinline__ void finish(const float (&acc)[W], const float (&up)[W], long long row, int column,
                                           int columns) const {
        EpilogueLoads<W, false> loads;
        load(loads, row, column, columns);
        finish<false>(row * columns + column, loads, acc, up);
    }

    // Computes and stores W elements like `finish`, from W accumulators in shared memory; the second product's
    // accumulators lie `up` floats after these.
    template <int W>
    __device__ __forceinline__ void finish(const float* acc, int up, long long row, int column, int columns) const {
        float values[W], ups[W];
#pragma unroll
        for (int i = 0; i < W; ++i) {
            values[i] = acc[i];
            if constexpr (GATED) ups[i] = acc[up + i];
        }
        finish(values, ups, row, column, columns);
    }
};
