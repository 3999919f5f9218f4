// y = activation(x * gate) for x (n, ..., CHANNELS), where each image has a gate for each channel: (n, CHANNELS).
//
// The kernel moves each element of x and y once, 4 bytes an element in fp16, and computes in fp32; the gate comes from
// L1. A vector does not cross pixels. `image` is the number of elements of an image.
#include "types.cuh"
#include "activations.cuh"
#include "elementwise.cuh"

static_assert(CHANNELS % WIDTH == 0, "a vector would cross pixels");

struct ChannelScale {
    template <int W>
    struct Raw {
        Pack<X_T, W> x;
        Pack<GATE_T, W> gate;
    };

    const X_T* x;
    const GATE_T* gate;
    Y_T* y;
    float alpha, beta;
    INDEX image;

    template <int W>
    __device__ __forceinline__ Raw<W> fetch(INDEX at) const {
        return {load_once<W>(x + at), load_cached<W>(gate + at / image * CHANNELS + at % CHANNELS)};
    }

    template <int W>
    __device__ __forceinline__ void finish(INDEX at, const Raw<W>& raw) const {
        float values[W], gates[W];
        unpack(raw.x, values);
        unpack(raw.gate, gates);
#pragma unroll
        for (int i = 0; i < W; ++i) values[i] = activate::ACTIVATION(values[i] * gates[i], alpha, beta);
        store<STREAMED>(y + at, values);
    }
};

ELEMENT_KERNEL channel_scale(const X_T* x, const GATE_T* gate, Y_T* y, float alpha, float beta, long long image,
                             long long count) {
    each_element(ChannelScale{x, gate, y, alpha, beta, INDEX(image)}, INDEX(count));
}
