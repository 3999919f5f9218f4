// The first of two launches of group_norm for large images: means and squares of the groups of a chunk of pixels.
//
// `partials` is (n, groups, chunks, 2) in fp32: the mean of a chunk, and the sum of squares around it.
#include "group_norm_nhwc.cuh"

constexpr int LOADS = 4;

extern "C" __global__ void __launch_bounds__(BLOCK, BLOCK <= 512 && !PRECISE ? 2 : 1)
group_norm_nhwc_statistics(const X_T* x, float* partials, int pixels, int chunks) {
    __shared__ GroupMemory memory;
    const Thread thread;
    const unsigned block = blockIdx.x / chunks, chunk = blockIdx.x - block * chunks;
    const unsigned image = block / SUBSETS, subset = block % SUBSETS;
    const int each = (pixels + chunks - 1) / chunks;
    const int begin = min(int(chunk) * each, pixels), end = min(begin + each, pixels);
    const X_T* from = x + (u64)image * pixels * CHANNELS + subset * SUBSET + thread.vector * WIDTH;
    wait_for_predecessor();
    ChannelMoments moments;
    moments.count = 0.0f;
    int pixel = begin + thread.row;
    if (thread.active && pixel < end) {
        moments.begin(load_cached<WIDTH>(from + (u64)pixel * CHANNELS));
        for (; pixel + (LOADS - 1) * LANES_P < end; pixel += LOADS * LANES_P) {
            Pack<X_T, WIDTH> raw[LOADS];
#pragma unroll
            for (int k = 0; k < LOADS; ++k) raw[k] = load_cached<WIDTH>(from + (u64)(pixel + k * LANES_P) * CHANNELS);
#pragma unroll
            for (int k = 0; k < LOADS; ++k) moments.add(raw[k]);
        }
        for (; pixel < end; pixel += LANES_P) moments.add(load_cached<WIDTH>(from + (u64)pixel * CHANNELS));
    }
    release_successor();
    block_moments(memory, thread, moments, end - begin);
    for (int group = threadIdx.x; group < GROUPS; group += BLOCK) {
        const u64 at = (((u64)image * SUBSETS + subset) * GROUPS + group) * chunks + chunk;
        partials[2 * at] = memory.means[group];
        partials[2 * at + 1] = memory.sums[group];
    }
}
