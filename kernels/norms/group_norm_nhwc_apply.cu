// The second of two launches of group_norm for large images: it merges the `partials` that
// group_norm_nhwc_statistics.cu left, and computes y = activation((x - mean) / sqrt(var + epsilon) * scale + bias).
//
// Blocks begin with the pixels that the first launch read last, which L2 may still have.
#include "group_norm_nhwc.cuh"

constexpr int LOADS = 4;

extern "C" __global__ void __launch_bounds__(BLOCK, BLOCK <= 512 && !PRECISE ? 2 : 1)
group_norm_nhwc_apply(const X_T* x, const SCALE_T* scale, const BIAS_T* bias, const float* partials, Y_T* y,
                      float epsilon, int pixels, int chunks) {
    __shared__ float means[GROUPS], slopes[GROUPS];
    const Thread thread;
    const unsigned reversed = gridDim.x - 1 - blockIdx.x, block = reversed / chunks, chunk = reversed - block * chunks;
    const unsigned image = block / SUBSETS, subset = block % SUBSETS;
    const int each = (pixels + chunks - 1) / chunks;
    const int begin = min(int(chunk) * each, pixels), end = min(begin + each, pixels);
    const int channel = subset * SUBSET + thread.vector * WIDTH;
    wait_for_predecessor();
    Normalization normalization;
    if (thread.active) normalization.load_weights(scale + channel, bias + channel);
    for (int group = threadIdx.x / 32; group < GROUPS; group += WARPS) {
        const float* parts = partials + 2 * (((u64)image * SUBSETS + subset) * GROUPS + group) * chunks;
        float mean = 0.0f, squares = 0.0f;
        for (int i = threadIdx.x % 32; i < chunks; i += 32)
            mean += parts[2 * i] * float(min((i + 1) * each, pixels) - min(i * each, pixels));
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) mean += __shfl_xor_sync(0xffffffffu, mean, offset);
        mean = __fdiv_rn(mean, float(pixels));
        for (int i = threadIdx.x % 32; i < chunks; i += 32) {
            const float delta = parts[2 * i] - mean;
            const float elements = float(min((i + 1) * each, pixels) - min(i * each, pixels)) * GROUP;
            squares += fmaf(elements * delta, delta, parts[2 * i + 1]);
        }
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
        if (threadIdx.x % 32 == 0) {
            means[group] = mean;
            slopes[group] = rsqrtf(__fdiv_rn(squares, float(pixels) * GROUP) + epsilon);
        }
    }
    __syncthreads();
    if (!thread.active) return;
    normalization.set(thread, means, slopes);
    const u64 first = (u64)image * pixels * CHANNELS + channel;
    int pixel = begin + thread.row;
    for (; pixel + (LOADS - 1) * LANES_P < end; pixel += LOADS * LANES_P) {
        Pack<X_T, WIDTH> raw[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; ++k) raw[k] = load_once<WIDTH>(x + first + (u64)(pixel + k * LANES_P) * CHANNELS);
#pragma unroll
        for (int k = 0; k < LOADS; ++k)
            normalization.store_result(y + first + (u64)(pixel + k * LANES_P) * CHANNELS, raw[k], STREAMED);
    }
    for (; pixel < end; pixel += LANES_P)
        normalization.store_result(y + first + (u64)pixel * CHANNELS,
                                   load_once<WIDTH>(x + first + (u64)pixel * CHANNELS), STREAMED);
}
