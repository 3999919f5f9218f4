// The second of two launches of group_norm for large images: it merges the `partials` that
// group_norm_nhwc_statistics.cu left, and computes y = activation((x - mean) / sqrt(var + epsilon) * scale + bias).
//
// Blocks begin with the pixels that the first launch read last, which L2 may still have. They load their first pixels
// while they merge partials. To merge, they sum the differences of the chunks' means from the first chunk's mean.
#include "group_norm_nhwc.cuh"

constexpr int LOADS = 3;

extern "C" __global__ void __launch_bounds__(BLOCK, BLOCK <= 512 && !PRECISE && !HAS_PROGRAM ? 2 : 1)
    group_norm_nhwc_apply(const X_T* x, const SCALE_T* scale, const BIAS_T* bias, const float2* partials, Y_T* y,
                          float epsilon, int pixels, int chunks PROGRAM_PARAMETERS) {
    __shared__ float means[GROUPS], slopes[GROUPS];
    const Thread thread;
    const unsigned reversed = gridDim.x - 1 - blockIdx.x, block = reversed / chunks, chunk = reversed - block * chunks;
    const unsigned image = block / SUBSETS, subset = block % SUBSETS;
    const int each = (pixels + chunks - 1) / chunks;
    const int begin = min(int(chunk) * each, pixels), end = min(begin + each, pixels);
    const int channel = subset * SUBSET + thread.vector * WIDTH;
    const u64 image_pixels = (u64)image * pixels, first = image_pixels * CHANNELS + channel;
    int pixel = begin + thread.row;
    Pack<X_T, WIDTH> raw[LOADS];
    const auto load_pixels = [&] {
#pragma unroll
        for (int k = 0; k < LOADS; ++k)
            if (pixel + k * LANES_P < end) raw[k] = load_once<WIDTH>(x + first + (u64)(pixel + k * LANES_P) * CHANNELS);
    };
    release_successor();
    Normalization normalization;
    if (WEIGHTS_CONSTANT && thread.active) normalization.load_weights(scale + channel, bias + channel);
    wait_for_predecessor();
    if (thread.active) {
        if (!WEIGHTS_CONSTANT) normalization.load_weights(scale + channel, bias + channel);
        load_pixels();
    }
#pragma unroll
    for (int from = 0; from < GROUPS; from += BLOCK / GROUP_LANES) {
        const int group = from + threadIdx.x / GROUP_LANES;
        float sum = 0.0f, squares = 0.0f, shift = 0.0f;
        if (group < GROUPS) {
            const float2* parts = partials + (((u64)image * SUBSETS + subset) * GROUPS + group) * chunks;
            shift = parts[0].x;
#pragma unroll 2
            for (int i = threadIdx.x % GROUP_LANES; i < chunks; i += GROUP_LANES) {
                const float2 part = parts[i];
                const float difference = part.x - shift;
                const float elements = float(max(min(each, pixels - i * each), 0)) * GROUP;
                sum = fmaf(elements, difference, sum);
                squares += fmaf(elements * difference, difference, part.y);
            }
        }
        sum_lanes<GROUP_LANES>(sum, squares);
        if (group < GROUPS && threadIdx.x % GROUP_LANES == 0) {
            const float elements = float(pixels) * GROUP, mean = __fdiv_rn(sum, elements);
            const float around = fmaf(-sum, mean, squares);
            means[group] = shift + mean;
            slopes[group] = rsqrtf(__fdiv_rn(around < 0.0f ? 0.0f : around, elements) + epsilon);
        }
    }
    __syncthreads();
    if (!thread.active) return;
    normalization.set(thread, means, slopes);
    const Program program{PROGRAM_ARGUMENTS};
#pragma unroll 1
    while (pixel < end) {
#pragma unroll
        for (int k = 0; k < LOADS; ++k)
            if (pixel + k * LANES_P < end)
                normalization.store_result(y, image_pixels + pixel + k * LANES_P, channel, raw[k], STREAMED, program);
        pixel += LOADS * LANES_P;
        load_pixels();
    }
}
