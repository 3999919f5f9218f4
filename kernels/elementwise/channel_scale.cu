// y = activation(x * gate + residual) for x (n, ..., CHANNELS), where each image has a gate for each channel:
// (n, CHANNELS).
//
// The kernel moves each element of x, y and the residual once, and computes in fp32; the gate comes from L1. A vector
// does not cross pixels. `image` is the number of elements of an image. HAS_RESIDUAL is 0 where there is no residual.
#include "types.cuh"
#include "activations.cuh"
#include "elementwise.cuh"

static_assert(CHANNELS % WIDTH == 0, "a vector would cross pixels");

struct ChannelScale {
    template <int W>
    struct Raw {
        Pack<X_T, W> x;
        Pack<GATE_T, W> gate;
        Pack<RESIDUAL_T, W> residual;
    };

    const X_T* x;
    const GATE_T* gate;
    const RESIDUAL_T* residual;
    Y_T* y;
    float alpha, beta;
    INDEX image;
    bool streamed;

    template <int W>
    __device__ __forceinline__ Raw<W> fetch(INDEX at) const {
        Raw<W> raw;
        raw.x = load_once<W>(x + at);
        raw.gate = load_cached<W>(gate + at / image * CHANNELS + at % CHANNELS);
        if constexpr (HAS_RESIDUAL) raw.residual = load_once<W>(residual + at);
        return raw;
    }

    template <int W>
    __device__ __forceinline__ void finish(INDEX at, const Raw<W>& raw) const {
        float values[W], gates[W], added[W] = {};
        unpack(raw.x, values);
        unpack(raw.gate, gates);
        if constexpr (HAS_RESIDUAL) unpack(raw.residual, added);
#pragma unroll
        for (int i = 0; i < W; ++i)
            values[i] = activate::ACTIVATION(HAS_RESIDUAL ? fmaf(values[i], gates[i], added[i]) : values[i] * gates[i],
                                             alpha, beta);
        store_as(streamed, y + at, values);
    }
};

ELEMENT_KERNEL channel_scale(const X_T* x, const GATE_T* gate, const RESIDUAL_T* residual, Y_T* y, float alpha,
                             float beta, long long image, long long count) {
    each_element(ChannelScale{x, gate, residual, y, alpha, beta, INDEX(image), STREAMED}, INDEX(count));
}
