// Reduces the pixels of each image and channel to one number: x is (n, pixels, channels), and y is (n, channels).
//
// An image's pixels are divided among `parts` blocks, and a block has LANES_C vectors of channels. Each thread merges
// every LANES_P-th pixel of its part in fp32; lanes, warps and the blocks of a cluster are then merged. If these
// blocks do not form a cluster, y is (n, parts, channels), which another launch merges.
//
//   CHANNELS, WIDTH  channels, and channels of a vector access
//   LANES_C          threads side by side in a pixel, a power of two of at most 32
//   LANES_P          threads with the same channels; LANES_C * LANES_P is a multiple of 32
//   LOADS            vectors that a thread has in flight
//   CLUSTER          blocks that share an image: `parts`, or 1
//
// A pooling op has
//   static float initial()              the result over no pixels
//   static float merge(float, float)
//   float finish(float)                 the result from the merged value of all pixels
#pragma once
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

#define GLOBAL_POOL_KERNEL extern "C" __global__ void __launch_bounds__(THREADS) CLUSTER_DIMS

template <class Op>
__device__ __forceinline__ void merge_pixel(const Pack<X_T, WIDTH>& raw, float (&merged)[WIDTH]) {
    float values[WIDTH];
    unpack(raw, values);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) merged[i] = Op::merge(merged[i], values[i]);
}

template <class Op>
__device__ __forceinline__ void global_pool(const Op& op, const X_T* x, Y_T* y, int pixels, int parts) {
    Memory& memory = *reinterpret_cast<Memory*>(pool_memory);
    cluster_arrive();
    wait_for_predecessor();
    const unsigned block = blockIdx.x / parts, part = blockIdx.x - block * parts;
    const unsigned image = block / BLOCKS_C, first_vector = block % BLOCKS_C * LANES_C;
    const int vector = first_vector + threadIdx.x % LANES_C, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int each = (pixels + parts - 1) / parts, end = min(pixels, int(part + 1) * each);
    const X_T* from = x + (u64)image * pixels * CHANNELS + vector * WIDTH;
    float merged[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) merged[i] = Op::initial();
    if (VECTORS % LANES_C == 0 || vector < VECTORS) {
        int pixel = int(part) * each + threadIdx.x / LANES_C;
        for (; pixel + (LOADS - 1) * LANES_P < end; pixel += LOADS * LANES_P) {
            Pack<X_T, WIDTH> raw[LOADS];
#pragma unroll
            for (int k = 0; k < LOADS; ++k) raw[k] = load_once<WIDTH>(from + (u64)(pixel + k * LANES_P) * CHANNELS);
#pragma unroll
            for (int k = 0; k < LOADS; ++k) merge_pixel<Op>(raw[k], merged);
        }
        Pack<X_T, WIDTH> raw[LOADS - 1];
#pragma unroll
        for (int k = 0; k < LOADS - 1; ++k)
            if (pixel + k * LANES_P < end) raw[k] = load_once<WIDTH>(from + (u64)(pixel + k * LANES_P) * CHANNELS);
#pragma unroll
        for (int k = 0; k < LOADS - 1; ++k)
            if (pixel + k * LANES_P < end) merge_pixel<Op>(raw[k], merged);
    }
    release_successor();
#pragma unroll
    for (int offset = LANES_C; offset < 32; offset *= 2)
#pragma unroll
        for (int i = 0; i < WIDTH; ++i)
            merged[i] = Op::merge(merged[i], __shfl_xor_sync(0xffffffffu, merged[i], offset));
    if (lane < LANES_C) {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) memory.warps[warp][lane * WIDTH + i] = merged[i];
    }
    if constexpr (CLUSTER > 1) cluster_wait();  // now the other blocks have started: their shared memory exists
    __syncthreads();
    const unsigned writer = CLUSTER > 1 ? 0 : part;
    for (int column = threadIdx.x; column < COLUMNS; column += THREADS) {
        float of_block = Op::initial();
#pragma unroll
        for (int i = 0; i < WARPS; ++i) of_block = Op::merge(of_block, memory.warps[i][column]);
        store_peer(&memory.parts[cluster_rank()][column], 0, of_block);
    }
    cluster_arrive();
    cluster_wait();
    if (part != writer) return;
    for (int column = threadIdx.x; column < COLUMNS; column += THREADS) {
        const int channel = first_vector * WIDTH + column;
        if (channel >= CHANNELS) break;
        float result[1] = {Op::initial()};
#pragma unroll
        for (int i = 0; i < CLUSTER; ++i) result[0] = Op::merge(result[0], memory.parts[i][column]);
        result[0] = op.finish(result[0]);
        store<false>(y + (u64)(CLUSTER > 1 ? image : image * parts + part) * CHANNELS + channel, result);
    }
}
