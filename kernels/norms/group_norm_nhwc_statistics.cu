// The first of two launches of group_norm for large images: means and squares of the groups of a chunk of pixels.
//
// `partials` is (n, groups, chunks); each entry is the mean of a chunk and the sum of squares around this mean.
#include "group_norm_nhwc.cuh"

constexpr int LOADS = 4;

extern "C" __global__ void __launch_bounds__(BLOCK, BLOCK <= 512 && !PRECISE ? 2 : 1)
    group_norm_nhwc_statistics(const X_T* x, float2* partials, int pixels, int chunks) {
    __shared__ GroupMemory memory;
    const Thread thread;
    const unsigned block = blockIdx.x / chunks, chunk = blockIdx.x - block * chunks;
    const unsigned image = block / SUBSETS, subset = block % SUBSETS;
    const int each = (pixels + chunks - 1) / chunks;
    const int begin = min(int(chunk) * each, pixels), end = min(begin + each, pixels);
    const X_T* first = x + ((u64)image * pixels + min(begin, pixels - 1)) * CHANNELS + subset * SUBSET;
    const X_T* from = x + (u64)image * pixels * CHANNELS + subset * SUBSET + thread.vector * WIDTH;
    release_successor();
    wait_for_predecessor();
    Moments moments(first, thread);
    if (thread.active) {
        int pixel = begin + thread.row;
        for (; pixel + (LOADS - 1) * LANES_P < end; pixel += LOADS * LANES_P) {
            Pack<X_T, WIDTH> raw[LOADS];
#pragma unroll
            for (int k = 0; k < LOADS; ++k) raw[k] = load_cached<WIDTH>(from + (u64)(pixel + k * LANES_P) * CHANNELS);
#pragma unroll
            for (int k = 0; k < LOADS; ++k) moments.add(raw[k]);
        }
#pragma unroll
        for (int k = 0; k < LOADS - 1; ++k)
            if (pixel + k * LANES_P < end)
                moments.add(load_cached<WIDTH>(from + (u64)(pixel + k * LANES_P) * CHANNELS));
    }
    block_moments(memory, thread, moments, first, end - begin);
    for (int group = threadIdx.x; group < GROUPS; group += BLOCK) {
        const u64 at = (((u64)image * SUBSETS + subset) * GROUPS + group) * chunks + chunk;
        partials[at] = make_float2(memory.means[group], memory.squares[group]);
    }
}
