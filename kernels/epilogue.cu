// y = activation(product + bias) [* (up + up_bias)] * column_scale + residual, after a library's matrix products.
//
//   COLUMNS  of all matrices      T  y's type, and that of bias, up_bias, column_scale and residual
//   HAS_BIAS HAS_UP HAS_UP_BIAS HAS_SCALE HAS_RESIDUAL  1: that operand is there
//
// Products are fp32, so that y is rounded once. Moves 6 bytes an element in fp16, 4 more for a second product and 2 for
// a residual; values by column come from L1. Vectors do not stop at the end of a row.
#include "types.cuh"
#include "activations.cuh"
#include "elementwise.cuh"

// W elements from a column on, of a vector that is shared by all rows.
template <int W>
struct ByColumn {
    static constexpr int EACH = COLUMNS % WIDTH == 0 ? W : 1;
    Pack<T, EACH> parts[W / EACH];

    __device__ __forceinline__ void fetch(const T* from, unsigned column) {
#pragma unroll
        for (int i = 0; i < W / EACH; ++i) {
            parts[i] = load_cached<EACH>(from + column);
            column = column + EACH == COLUMNS ? 0 : column + EACH;
        }
    }

    __device__ __forceinline__ float operator[](int i) const {
        float values[EACH];
        unpack(parts[i / EACH], values);
        return values[i % EACH];
    }
};

struct Epilogue {
    template <int W>
    struct Raw {
        Pack<f32, W> product, up;
        ByColumn<W> bias, up_bias, scale;
        Pack<T, W> residual;
    };

    const f32 *product, *up;
    const T *bias, *up_bias, *scale, *residual;
    T* y;
    float alpha, beta;

    template <int W>
    __device__ __forceinline__ Raw<W> fetch(INDEX at) const {
        Raw<W> raw;
        const unsigned column = unsigned(at % COLUMNS);
        raw.product = load_once<W>(product + at);
        if constexpr (HAS_UP) raw.up = load_once<W>(up + at);
        if constexpr (HAS_RESIDUAL) raw.residual = load_once<W>(residual + at);
        if constexpr (HAS_BIAS) raw.bias.fetch(bias, column);
        if constexpr (HAS_UP_BIAS) raw.up_bias.fetch(up_bias, column);
        if constexpr (HAS_SCALE) raw.scale.fetch(scale, column);
        return raw;
    }

    template <int W>
    __device__ __forceinline__ void finish(INDEX at, const Raw<W>& raw) const {
        float values[W], ups[W], residuals[W];
        unpack(raw.product, values);
        if constexpr (HAS_UP) unpack(raw.up, ups);
        if constexpr (HAS_RESIDUAL) unpack(raw.residual, residuals);
#pragma unroll
        for (int i = 0; i < W; ++i) {
            if constexpr (HAS_BIAS) values[i] += raw.bias[i];
            values[i] = activate::ACTIVATION(values[i], alpha, beta);
            if constexpr (HAS_UP_BIAS) ups[i] += raw.up_bias[i];
            if constexpr (HAS_UP) values[i] *= ups[i];
            if constexpr (HAS_SCALE) values[i] *= raw.scale[i];
            if constexpr (HAS_RESIDUAL) values[i] += residuals[i];
        }
        store<STREAMED>(y + at, values);
    }
};

ELEMENT_KERNEL epilogue(const f32* product, const f32* up, const T* bias, const T* up_bias, const T* scale,
                        const T* residual, T* y, float alpha, float beta, long long count) {
    each_element(Epilogue{product, up, bias, up_bias, scale, residual, y, alpha, beta}, INDEX(count));
}
