// y = activation(x + bias), with a bias along the last axis of x, which has ROW elements.
//
// The kernel moves each element of x and y once, 4 bytes an element in fp16, and computes in fp32; the bias comes from
// L1. Vectors can cross the end of a row, so that rows of any length are read at full width.
#include "types.cuh"
#include "activations.cuh"
#include "elementwise.cuh"

struct BiasActivation {
    template <int W>
    struct Raw {
        Pack<X_T, W> x;
        Pack<BIAS_T, ROW % WIDTH == 0 ? W : 1> bias[ROW % WIDTH == 0 ? 1 : W];
    };

    const X_T* x;
    const BIAS_T* bias;
    Y_T* y;
    float alpha, beta;
    bool streamed;

    template <int W>
    __device__ __forceinline__ Raw<W> fetch(INDEX at) const {
        Raw<W> raw;
        raw.x = load_once<W>(x + at);
        unsigned column = unsigned(at % ROW);
        if constexpr (ROW % WIDTH == 0) {
            raw.bias[0] = load_cached<W>(bias + column);
        } else {
#pragma unroll
            for (int i = 0; i < W; ++i) {
                raw.bias[i] = load_cached<1>(bias + column);
                column = column + 1 == ROW ? 0 : column + 1;
            }
        }
        return raw;
    }

    template <int W>
    __device__ __forceinline__ void finish(INDEX at, const Raw<W>& raw) const {
        float values[W], added[W];
        unpack(raw.x, values);
        if constexpr (ROW % WIDTH == 0) {
            unpack(raw.bias[0], added);
        } else {
#pragma unroll
            for (int i = 0; i < W; ++i) {
                float one[1];
                unpack(raw.bias[i], one);
                added[i] = one[0];
            }
        }
#pragma unroll
        for (int i = 0; i < W; ++i) values[i] = activate::ACTIVATION(values[i] + added[i], alpha, beta);
        store_as(streamed, y + at, values);
    }
};

ELEMENT_KERNEL bias_activation(const X_T* x, const BIAS_T* bias, Y_T* y, float alpha, float beta, long long count) {
    each_element(BiasActivation{x, bias, y, alpha, beta, STREAMED}, INDEX(count));
}
