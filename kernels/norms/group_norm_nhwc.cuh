// Mean and variance of groups of channels of channels-last tensors: x is (n, pixels, CHANNELS).
//
// A block has SUBSET channels, which are whole groups of GROUP, of some pixels of one image: VECTORS threads side by
// side in a pixel, and LANES_P such rows of threads. A vector may belong to several groups, so each thread has moments
// of each channel of its own, which are merged as by Chan, Golub and LeVeque (1979): sums over the block give the means
// of its groups, and then the squares around these.
//
//   WIDTH       channels of a vector access; divides SUBSET
//   BLOCK       threads of a block: VECTORS * LANES_P, and idle ones up to a multiple of 32
//   SHARES      rows of partial sums on the way from LANES_P rows to one
//   PRECISE, ACTIVATION, STREAMED, WEIGHTS_CONSTANT  as in activations.cuh and rows.cuh; STREAMED may depend on the
//               arguments and gridDim
#pragma once
#include "types.cuh"
#include "activations.cuh"
#include "cluster.cuh"

constexpr int VECTORS = SUBSET / WIDTH;
constexpr int SUBSETS = CHANNELS / SUBSET;
constexpr int GROUPS = SUBSET / GROUP;  // of a block
constexpr int WARPS = BLOCK / 32;

static_assert(SUBSET % WIDTH == 0 && SUBSET % GROUP == 0 && CHANNELS % SUBSET == 0, "whole vectors and groups");
static_assert(BLOCK % 32 == 0 && VECTORS * LANES_P <= BLOCK, "whole warps");

struct GroupMemory {
    float values[LANES_P][SUBSET];
    float shares[SHARES][SUBSET];
    float sums[GROUPS];
    float means[GROUPS];
};

struct Thread {
    int vector, row;  // of the block
    bool active;

    __device__ __forceinline__ Thread()
        : vector(threadIdx.x % VECTORS), row(threadIdx.x / VECTORS), active(threadIdx.x < VECTORS * LANES_P) {}

    __device__ __forceinline__ int group(int i) const { return (vector * WIDTH + i) / GROUP; }
};

// Moments of the channels of a thread, from sums around the first value: the error of `squares` is at most that of a
// number `count` times as large.
struct ChannelMoments {
    float first[WIDTH], sums[WIDTH], squares[WIDTH];
    float count;

    __device__ __forceinline__ void begin(const Pack<X_T, WIDTH>& raw) {
        unpack(raw, first);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) sums[i] = squares[i] = 0.0f;
        count = 0.0f;
    }
    __device__ __forceinline__ void add(const Pack<X_T, WIDTH>& raw) {
        float values[WIDTH];
        unpack(raw, values);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const float centred = values[i] - first[i];
            sums[i] += centred;
            squares[i] = fmaf(centred, centred, squares[i]);
        }
        count += 1.0f;
    }
};

// Sets memory.sums to the sums of `values` over the channels of each group and the threads of the block.
__device__ __forceinline__ void sum_groups(GroupMemory& memory, const Thread& thread, const float (&values)[WIDTH]) {
    if (thread.active) {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) memory.values[thread.row][thread.vector * WIDTH + i] = values[i];
    }
    __syncthreads();
    for (int at = threadIdx.x; at < SHARES * SUBSET; at += BLOCK) {
        const int share = at / SUBSET, channel = at % SUBSET;
        float sum = 0.0f;
        for (int row = share; row < LANES_P; row += SHARES) sum += memory.values[row][channel];
        memory.shares[share][channel] = sum;
    }
    __syncthreads();
    for (int group = threadIdx.x / 32; group < GROUPS; group += WARPS) {
        float sum = 0.0f;
        for (int at = threadIdx.x % 32; at < SHARES * GROUP; at += 32)
            sum += memory.shares[at / GROUP][group * GROUP + at % GROUP];
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        if (threadIdx.x % 32 == 0) memory.sums[group] = sum;
    }
    __syncthreads();
}

// Sets memory.means to the means of the block's groups, over `pixels`, and memory.sums to the squares around these.
__device__ __forceinline__ void block_moments(GroupMemory& memory, const Thread& thread, const ChannelMoments& moments,
                                              int pixels) {
    float values[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i)
        values[i] = moments.count > 0.0f ? fmaf(moments.count, moments.first[i], moments.sums[i]) : 0.0f;
    sum_groups(memory, thread, values);
    for (int group = threadIdx.x; group < GROUPS; group += BLOCK)
        memory.means[group] = __fdiv_rn(memory.sums[group], max(float(pixels) * GROUP, 1.0f));
    __syncthreads();
    const float each = __fdividef(1.0f, fmaxf(moments.count, 1.0f));
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
        if (!(moments.count > 0.0f)) continue;
        const float mean = moments.sums[i] * each;  // around the first value
        const float delta = moments.first[i] + mean - memory.means[thread.group(i)];
        const float squares = moments.squares[i] - moments.sums[i] * mean;
        values[i] = fmaf(moments.count * delta, delta, squares < 0.0f ? 0.0f : squares);
    }
    sum_groups(memory, thread, values);
}

// What turns the elements of a thread's channels into results.
struct Normalization {
    float means[WIDTH], slopes[WIDTH], offsets[WIDTH];

    template <class S, class B>
    __device__ __forceinline__ void load_weights(const S* scale, const B* bias) {
        unpack(load_cached<WIDTH, WEIGHTS_CONSTANT>(scale), slopes);
        unpack(load_cached<WIDTH, WEIGHTS_CONSTANT>(bias), offsets);
    }
    __device__ __forceinline__ void set(const Thread& thread, const float* group_means, const float* group_slopes) {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            means[i] = group_means[thread.group(i)];
            slopes[i] *= group_slopes[thread.group(i)];
        }
    }
    __device__ __forceinline__ void store_result(Y_T* to, const Pack<X_T, WIDTH>& raw, bool streamed) const {
        float values[WIDTH];
        unpack(raw, values);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i)
            values[i] = activate::ACTIVATION(fmaf(values[i] - means[i], slopes[i], offsets[i]), 0.0f, 0.0f);
        store_as(streamed, to, values);
    }
};
