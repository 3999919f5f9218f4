// y = activation((x - mean) * scale / sqrt(var + epsilon) + bias) for x (pixels, CHANNELS), which may be divided among
// PARTS tensors (channel_parts.cuh): then no kernel writes them side by side first.
//
// The kernel moves each element of x and y once, 4 bytes an element in fp16. In fp32 it computes x * slope + offset,
// with slope = scale / sqrt(var + epsilon) and offset = bias - mean * slope. A thread computes slope and offset once
// for all of its PIXELS pixels.
//
//   LANES_C, LANES_P  threads of a block along vectors of channels and along pixels
//   STREAMED, RELEASE, WEIGHTS_CONSTANT  as in elementwise.cuh and rows.cuh
#include "types.cuh"
#include "activations.cuh"
#include "channel_parts.cuh"

constexpr int VECTORS = CHANNELS / WIDTH;
constexpr int BLOCKS_C = (VECTORS + LANES_C - 1) / LANES_C;

static_assert(CHANNELS % WIDTH == 0, "a vector would cross pixels");

template <class W>
__device__ __forceinline__ void load_weights(const W* from, float (&values)[WIDTH]) {
    unpack(load_cached<WIDTH, WEIGHTS_CONSTANT>(from), values);
}

extern "C" __global__ void __launch_bounds__(LANES_C* LANES_P)
    batch_norm_activation(Parts<const X_T> x, const SCALE_T* scale, const BIAS_T* bias, const MEAN_T* mean,
                          const VAR_T* var, Y_T* y, float epsilon, float alpha, float beta, long long pixels) {
    const int channel = (blockIdx.x % BLOCKS_C * LANES_C + threadIdx.x % LANES_C) * WIDTH;
    const long long first = (long long)(blockIdx.x / BLOCKS_C) * (LANES_P * PIXELS) + threadIdx.x / LANES_C;
    if (channel >= CHANNELS || first >= pixels) return;
    const Part<const X_T> part = part_of(x, channel);
    wait_for_predecessor();
    const long long start = first * CHANNELS + channel;
    Pack<X_T, WIDTH> raw[PIXELS];
#pragma unroll
    for (int k = 0; k < PIXELS; ++k)
        if (first + k * LANES_P < pixels) raw[k] = load_once<WIDTH>(part.at + (first + k * LANES_P) * part.channels);
    float slopes[WIDTH], offsets[WIDTH], means[WIDTH], variances[WIDTH];
    load_weights(var + channel, variances);
    load_weights(scale + channel, slopes);
    load_weights(mean + channel, means);
    load_weights(bias + channel, offsets);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
        slopes[i] = __fdiv_rn(slopes[i], __fsqrt_rn(variances[i] + epsilon));
        offsets[i] = fmaf(-means[i], slopes[i], offsets[i]);
    }
    if (RELEASE) release_successor();
#pragma unroll
    for (int k = 0; k < PIXELS; ++k) {
        if (first + k * LANES_P >= pixels) break;
        float values[WIDTH];
        unpack(raw[k], values);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i)
            values[i] = activate::ACTIVATION(fmaf(values[i], slopes[i], offsets[i]), alpha, beta);
        store_as(STREAMED, y + start + (long long)k * (LANES_P * CHANNELS), values);
    }
}
