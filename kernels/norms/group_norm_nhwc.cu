// y = activation((x - mean) / sqrt(var + epsilon) * scale + bias) over groups of channels of x (n, pixels, CHANNELS).
//
// One launch: the blocks of a cluster divide the pixels of some groups of an image among them, and each keeps its part
// in shared memory. So the kernel moves each element of x and y once, 4 bytes an element in fp16.
#include "group_norm_nhwc.cuh"

struct Memory {
    GroupMemory block;
    float part_means[CLUSTER][GROUPS], part_squares[CLUSTER][GROUPS];  // one entry per block of the cluster
    float means[GROUPS], slopes[GROUPS];
};
extern __shared__ uint4 norm_memory[];
static_assert(sizeof(Memory) <= MEMORY_BYTES, "the host reserves as much");

extern "C" __global__ void __launch_bounds__(BLOCK, 1) CLUSTER_DIMS
    group_norm_nhwc(const X_T* x, const SCALE_T* scale, const BIAS_T* bias, Y_T* y, float epsilon,
                    int pixels PROGRAM_PARAMETERS) {
    Memory& memory = *reinterpret_cast<Memory*>(norm_memory);
    Pack<X_T, WIDTH>* slots = reinterpret_cast<Pack<X_T, WIDTH>*>(norm_memory + MEMORY_BYTES / 16) + threadIdx.x;
    const Thread thread;
    const unsigned cluster = blockIdx.x / CLUSTER, image = cluster / SUBSETS;
    const int channel = cluster % SUBSETS * SUBSET + thread.vector * WIDTH;
    const int each = (pixels + CLUSTER - 1) / CLUSTER;
    const int begin = min(int(cluster_rank()) * each, pixels), end = min(begin + each, pixels);
    const u64 first = (u64)image * pixels * CHANNELS + channel;
    cluster_arrive();
    wait_for_predecessor();

    const X_T* pixel = x + (u64)image * pixels * CHANNELS + cluster % SUBSETS * SUBSET;
    pixel += (u64)min(begin, pixels - 1) * CHANNELS;
    int count = 0;
    Normalization normalization;
    if (thread.active) {
#pragma unroll 4
        for (int at = begin + thread.row; at < end; at += LANES_P, ++count)
            copy_to_shared<WIDTH>(slots[count * BLOCK], x + first + (u64)at * CHANNELS);
        normalization.load_weights(scale + channel, bias + channel);
    }
    Moments moments(pixel, thread);
    wait_for_copies();
    for (int k = 0; k < count; ++k) moments.add(slots[k * BLOCK]);
    block_moments(memory.block, thread, moments, pixel, end - begin);

    if constexpr (CLUSTER > 1) cluster_wait();  // now the other blocks have started: their shared memory exists
    for (int at = threadIdx.x; at < GROUPS * CLUSTER; at += BLOCK) {
        const int group = at % GROUPS;
        store_peer(&memory.part_means[cluster_rank()][group], at / GROUPS, memory.block.means[group]);
        store_peer(&memory.part_squares[cluster_rank()][group], at / GROUPS, memory.block.squares[group]);
    }
    cluster_arrive();
    cluster_wait();
    release_successor();
    for (int group = threadIdx.x; group < GROUPS; group += BLOCK) {
        float mean = 0.0f, squares = 0.0f;
#pragma unroll
        for (int i = 0; i < CLUSTER; ++i)
            mean += memory.part_means[i][group] * float(min((i + 1) * each, pixels) - min(i * each, pixels));
        mean = __fdiv_rn(mean, float(pixels));
#pragma unroll
        for (int i = 0; i < CLUSTER; ++i) {
            const float delta = memory.part_means[i][group] - mean;
            const float elements = float(min((i + 1) * each, pixels) - min(i * each, pixels)) * GROUP;
            squares += fmaf(elements * delta, delta, memory.part_squares[i][group]);
        }
        memory.means[group] = mean;
        memory.slopes[group] = rsqrtf(__fdiv_rn(squares, float(pixels) * GROUP) + epsilon);
    }
    __syncthreads();
    if (!thread.active) return;
    normalization.set(thread, memory.means, memory.slopes);
    const Program program{PROGRAM_ARGUMENTS};
    const u64 first_pixel = (u64)image * pixels + begin + thread.row;
#pragma unroll 2
    for (int k = 0; k < count; ++k)
        normalization.store_result(y, first_pixel + k * LANES_P, channel, slots[k * BLOCK], STREAMED, program);
}
