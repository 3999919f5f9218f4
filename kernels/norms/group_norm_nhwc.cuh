// Mean and variance of groups of channels of channels-last tensors: x is (n, pixels, CHANNELS).
//
// A block works on SUBSET channels, which are whole groups of GROUP channels, of some pixels of one image. VECTORS
// threads side by side read a pixel, and a block has LANES_P such rows of threads. For each group, one of its values is
// the shift. The block adds up the differences of all values from the shift, and the squares of these differences. The
// sum of squares around the mean follows from both sums. Because the shift is one of the n values, the relative error
// of this result is at most about n times the error of a plain sum.
//
//   WIDTH       channels of a vector access; divides SUBSET
//   BLOCK       threads of a block: VECTORS * LANES_P, and idle ones up to a multiple of 32
//   PRECISE, ACTIVATION, STREAMED, WEIGHTS_CONSTANT  as in activations.cuh and rows.cuh; STREAMED may depend on the
//               arguments and gridDim
#pragma once
#include "types.cuh"
#include "activations.cuh"
#include "cluster.cuh"
#include "program.cuh"

constexpr int VECTORS = SUBSET / WIDTH;
constexpr int SUBSETS = CHANNELS / SUBSET;
constexpr int GROUPS = SUBSET / GROUP;  // groups per block
constexpr int WARPS = BLOCK / 32;

static_assert(SUBSET % WIDTH == 0 && SUBSET % GROUP == 0 && CHANNELS % SUBSET == 0, "whole vectors and groups");
static_assert(BLOCK % 32 == 0 && VECTORS * LANES_P <= BLOCK, "whole warps");

constexpr int common_divisor(int a, int b) { return b ? common_divisor(b, a % b) : a; }

constexpr int SPAN = common_divisor(GROUP, WIDTH);  // neighbouring channels per thread within one group
constexpr int SPANS = WIDTH / SPAN, GROUP_SPANS = GROUP / SPAN;

// Returns how many threads add up a block's part of a group: a power of two.
constexpr int group_lanes() {
    int lanes = 1;
    while (lanes < 32 && 2 * lanes * GROUPS <= BLOCK) lanes *= 2;
    return lanes;
}
constexpr int GROUP_LANES = group_lanes();

// A span is SPAN neighbouring channels of one thread. GroupMemory::spans holds the sums of spans as a matrix: it has a
// row for each row of threads, and a column for each span of a row. `fold_rows` adds all rows to the first FOLDED_ROWS
// rows. Rows are folded only if a span is a whole group. The lanes that add up such a group read different rows of a
// single column, which lies in one bank of shared memory; folding leaves fewer rows to read.
constexpr int COLUMNS = SPANS * VECTORS;

constexpr int folded_rows() {
    if (GROUP_SPANS > 1 || COLUMNS * LANES_P <= BLOCK) return LANES_P;
    return COLUMNS < BLOCK ? BLOCK / COLUMNS : 1;
}
constexpr int FOLDED_ROWS = folded_rows();

struct GroupMemory {
    float2 spans[LANES_P][SPANS][VECTORS];  // sums of differences, and of their squares
    float means[GROUPS], squares[GROUPS];   // sums of squares around the means
};

struct Thread {
    int vector, row;  // position of the thread in its block
    bool active;

    __device__ __forceinline__ Thread()
        : vector(threadIdx.x % VECTORS), row(threadIdx.x / VECTORS), active(threadIdx.x < VECTORS * LANES_P) {}

    __device__ __forceinline__ int group(int i) const { return (vector * WIDTH + i) / GROUP; }
};

// The sums of a thread's values and of their squares. The group's shift is subtracted from each value first: the value
// of the group's first channel at `pixel`, the block's first pixel.
struct Moments {
    float shifts[SPANS], sums[SPANS], squares[SPANS];

    __device__ __forceinline__ Moments(const X_T* pixel, const Thread& thread) {
#pragma unroll
        for (int i = 0; i < SPANS; ++i) {
            shifts[i] = shift_of(pixel, thread.group(i * SPAN));
            sums[i] = squares[i] = 0.0f;
        }
    }
    __device__ __forceinline__ static float shift_of(const X_T* pixel, int group) {
        float shift[1];
        unpack(load_cached<1>(pixel + group * GROUP), shift);
        return shift[0];
    }
    __device__ __forceinline__ void add(const Pack<X_T, WIDTH>& raw) {
        float values[WIDTH];
        unpack(raw, values);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const float difference = values[i] - shifts[i / SPAN];
            sums[i / SPAN] += difference;
            squares[i / SPAN] = fmaf(difference, difference, squares[i / SPAN]);
        }
    }
};

// Replaces a and b by their sums over LANES neighbouring lanes.
template <int LANES>
__device__ __forceinline__ void sum_lanes(float& a, float& b) {
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) {
        a += __shfl_xor_sync(0xffffffffu, a, offset);
        b += __shfl_xor_sync(0xffffffffu, b, offset);
    }
}

// Adds up the spans of the rows of threads into the first FOLDED_ROWS rows. Neighbouring threads read neighbouring
// columns.
__device__ __forceinline__ void fold_rows(GroupMemory& memory) {
    for (int at = threadIdx.x; at < COLUMNS * FOLDED_ROWS; at += BLOCK) {
        const int column = at % COLUMNS, first = at / COLUMNS;
        float2 sum = make_float2(0.0f, 0.0f);
        for (int row = first; row < LANES_P; row += FOLDED_ROWS) {
            const float2 span = memory.spans[row][column / VECTORS][column % VECTORS];
            sum.x += span.x;
            sum.y += span.y;
        }
        memory.spans[first][column / VECTORS][column % VECTORS] = sum;
    }
    __syncthreads();
}

// Sets memory.means to the means of the block's groups over `pixels` pixels, and memory.squares to the sums of squares
// around these means.
__device__ __forceinline__ void block_moments(GroupMemory& memory, const Thread& thread, const Moments& moments,
                                              const X_T* pixel, int pixels) {
    if (thread.active) {
#pragma unroll
        for (int i = 0; i < SPANS; ++i)
            memory.spans[thread.row][i][thread.vector] = make_float2(moments.sums[i], moments.squares[i]);
    }
    __syncthreads();
    if constexpr (FOLDED_ROWS < LANES_P) fold_rows(memory);
#pragma unroll
    for (int first = 0; first < GROUPS; first += BLOCK / GROUP_LANES) {
        const int group = first + threadIdx.x / GROUP_LANES;
        float sum = 0.0f, squares = 0.0f, shift = 0.0f;
        if (group < GROUPS) {
            shift = Moments::shift_of(pixel, group);
            for (int at = threadIdx.x % GROUP_LANES; at < FOLDED_ROWS * GROUP_SPANS; at += GROUP_LANES) {
                const int span = group * GROUP_SPANS + at % GROUP_SPANS;
                const float2 both = memory.spans[at / GROUP_SPANS][span % SPANS][span / SPANS];
                sum += both.x;
                squares += both.y;
            }
        }
        sum_lanes<GROUP_LANES>(sum, squares);
        if (group < GROUPS && threadIdx.x % GROUP_LANES == 0) {
            // The mean of the differences between the elements and `shift`.
            const float mean = __fdiv_rn(sum, fmaxf(float(pixels) * GROUP, 1.0f));
            memory.means[group] = shift + mean;
            const float around = fmaf(-sum, mean, squares);
            memory.squares[group] = around < 0.0f ? 0.0f : around;  // a NaN stays a NaN
        }
    }
    __syncthreads();
}

// The factors and offsets that normalize the elements of a thread's channels.
struct Normalization {
    Pack<SCALE_T, WIDTH> scale;
    Pack<BIAS_T, WIDTH> bias;
    float means[WIDTH], slopes[WIDTH], offsets[WIDTH];

    __device__ __forceinline__ void load_weights(const SCALE_T* from_scale, const BIAS_T* from_bias) {
        scale = load_cached<WIDTH, WEIGHTS_CONSTANT>(from_scale);
        bias = load_cached<WIDTH, WEIGHTS_CONSTANT>(from_bias);
    }
    __device__ __forceinline__ void set(const Thread& thread, const float* group_means, const float* group_slopes) {
        unpack(scale, slopes);
        unpack(bias, offsets);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            means[i] = group_means[thread.group(i)];
            slopes[i] *= group_slopes[thread.group(i)];
        }
    }
    // Stores the results of pixel number `pixel`, from the thread's first channel `channel` on.
    __device__ __forceinline__ void store_result(Y_T* y, u64 pixel, int channel, const Pack<X_T, WIDTH>& raw,
                                                 bool streamed, const Program& program) const {
        float values[WIDTH];
        unpack(raw, values);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i)
            values[i] = activate::ACTIVATION(fmaf(values[i] - means[i], slopes[i], offsets[i]), 0.0f, 0.0f);
        const u64 at = pixel * CHANNELS;
        if constexpr (HAS_PROGRAM) apply_program(program, {int(pixel), 0, (long long)at}, channel, values);
        store_as(streamed, y + at + channel, values);
    }
};
