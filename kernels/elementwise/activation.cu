// y = activation(x), a function of activations.cuh; alpha and beta are its parameters, if it has any.
//
// The kernel moves each element of x and y once, 4 bytes an element in fp16, and computes in fp32.
#include "types.cuh"
#include "activations.cuh"
#include "elementwise.cuh"

struct Activation {
    template <int W>
    using Raw = Pack<X_T, W>;

    const X_T* x;
    Y_T* y;
    float alpha, beta;
    bool streamed;

    template <int W>
    __device__ __forceinline__ Raw<W> fetch(INDEX at) const {
        return load_once<W>(x + at);
    }

    template <int W>
    __device__ __forceinline__ void finish(INDEX at, const Raw<W>& raw) const {
        float values[W];
        unpack(raw, values);
#pragma unroll
        for (int i = 0; i < W; ++i) values[i] = activate::ACTIVATION(values[i], alpha, beta);
        store_as(streamed, y + at, values);
    }
};

ELEMENT_KERNEL activation(const X_T* x, Y_T* y, float alpha, float beta, long long count) {
    each_element(Activation{x, y, alpha, beta, STREAMED}, INDEX(count));
}
