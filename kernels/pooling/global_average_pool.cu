// y = factor * (sum of x over the pixels of each image), for x (n, pixels, channels) and y (n, channels).
//
// An image's pixels are divided among `parts` blocks, and a block has LANES_C vectors of channels. Each thread adds up
// every LANES_P-th pixel of its part in fp32; lanes, warps and the blocks of a cluster are then added up. Where blocks
// form no cluster, y is (n, parts, channels), which another launch adds up.
//
//   CHANNELS, WIDTH  channels, and channels of a vector access
//   LANES_C          threads side by side in a pixel, a power of two of at most 32
//   LANES_P          threads with the same channels; LANES_C * LANES_P is a multiple of 32
//   LOADS            vectors that a thread has in flight
//   CLUSTER          blocks that share an image: `parts`, or 1
#include "types.cuh"
#include "cluster.cuh"

constexpr int THREADS = LANES_C * LANES_P;
constexpr int WARPS = THREADS / 32;
constexpr int VECTORS = CHANNELS / WIDTH;
constexpr int BLOCKS_C = (VECTORS + LANES_C - 1) / LANES_C;
constexpr int COLUMNS = LANES_C * WIDTH;  // channels of a block

static_assert(CHANNELS % WIDTH == 0 && THREADS % 32 == 0 && 32 % LANES_C == 0, "see above");

struct Memory {
    float warps[WARPS][COLUMNS];
    float parts[CLUSTER][COLUMNS];
};
extern __shared__ uint4 pool_memory[];

__device__ __forceinline__ void add(const Pack<X_T, WIDTH>& raw, float (&sums)[WIDTH]) {
    float values[WIDTH];
    unpack(raw, values);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) sums[i] += values[i];
}

extern "C" __global__ void __launch_bounds__(THREADS) CLUSTER_DIMS
global_average_pool(const X_T* x, Y_T* y, float factor, int pixels, int parts) {
    Memory& memory = *reinterpret_cast<Memory*>(pool_memory);
    cluster_arrive();
    wait_for_predecessor();
    const unsigned block = blockIdx.x / parts, part = blockIdx.x - block * parts;
    const unsigned image = block / BLOCKS_C, first_vector = block % BLOCKS_C * LANES_C;
    const int vector = first_vector + threadIdx.x % LANES_C, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int each = (pixels + parts - 1) / parts, end = min(pixels, int(part + 1) * each);
    const X_T* from = x + (u64)image * pixels * CHANNELS + vector * WIDTH;
    float sums[WIDTH] = {};
    if (VECTORS % LANES_C == 0 || vector < VECTORS) {
        int pixel = int(part) * each + threadIdx.x / LANES_C;
        for (; pixel + (LOADS - 1) * LANES_P < end; pixel += LOADS * LANES_P) {
            Pack<X_T, WIDTH> raw[LOADS];
#pragma unroll
            for (int k = 0; k < LOADS; ++k) raw[k] = load_once<WIDTH>(from + (u64)(pixel + k * LANES_P) * CHANNELS);
#pragma unroll
            for (int k = 0; k < LOADS; ++k) add(raw[k], sums);
        }
        Pack<X_T, WIDTH> raw[LOADS - 1];
#pragma unroll
        for (int k = 0; k < LOADS - 1; ++k)
            if (pixel + k * LANES_P < end) raw[k] = load_once<WIDTH>(from + (u64)(pixel + k * LANES_P) * CHANNELS);
#pragma unroll
        for (int k = 0; k < LOADS - 1; ++k)
            if (pixel + k * LANES_P < end) add(raw[k], sums);
    }
    release_successor();
#pragma unroll
    for (int offset = LANES_C; offset < 32; offset *= 2)
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], offset);
    if (lane < LANES_C) {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) memory.warps[warp][lane * WIDTH + i] = sums[i];
    }
    if constexpr (CLUSTER > 1) cluster_wait();  // the peers have started, so that their shared memory exists
    __syncthreads();
    const unsigned writer = CLUSTER > 1 ? 0 : part;
    for (int column = threadIdx.x; column < COLUMNS; column += THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) sum += memory.warps[i][column];
        store_peer(&memory.parts[cluster_rank()][column], 0, sum);
    }
    cluster_arrive();
    cluster_wait();
    if (part != writer) return;
    for (int column = threadIdx.x; column < COLUMNS; column += THREADS) {
        const int channel = first_vector * WIDTH + column;
        if (channel >= CHANNELS) break;
        float result[1] = {0.0f};
#pragma unroll
        for (int i = 0; i < CLUSTER; ++i) result[0] += memory.parts[i][column];
        result[0] *= factor;
        store<false>(y + (u64)(CLUSTER > 1 ? image : image * parts + part) * CHANNELS + channel, result);
    }
}
