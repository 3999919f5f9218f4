// gate = activation_2(w_2 activation(w mean(x) + bias) + bias_2), with the mean over the pixels of each image: x is
// (n, pixels, CHANNELS), w (SQUEEZED, CHANNELS), w_2 (CHANNELS, SQUEEZED), and gate (n, CHANNELS).
//
// A cluster computes the gates of IMAGES images. Their channels are divided into CHANNEL_PARTS parts and their pixels
// into CLUSTER / CHANNEL_PARTS parts; each block reads one part of the channels in one part of the pixels. Because the
// mean and the first product are linear, each block multiplies the columns of w for its channels by the sums over its
// pixels, and sends only the SQUEEZED results to the other blocks. Each block then adds up all results, and computes
// its share of the channels of the gate. All arithmetic is in fp32.
//
//   WIDTH, WIDTH_2   elements of a vector access to x and w, and to w_2
//   LANES, LANES_2   threads that multiply a row of w, and of w_2: powers of two of at most 32
//   THREADS          threads of a block
//   LOADS            vectors of x that a thread has in flight
//   ACTIVATION_1, ACTIVATION_2   functions of activations.cuh    HAS_BIAS, HAS_BIAS_2   1: the operand is present
//   PREFETCHED       1: no kernel writes the weights, so they are prefetched to L2 while the kernel waits for x
#include "types.cuh"
#include "activations.cuh"
#include "cluster.cuh"

constexpr int PIXEL_PARTS = CLUSTER / CHANNEL_PARTS;
constexpr int VECTORS = CHANNELS / WIDTH;                            // vectors per pixel
constexpr int PART = (VECTORS + CHANNEL_PARTS - 1) / CHANNEL_PARTS;  // vectors of a pixel that a block reads
constexpr int ROWS = PART < THREADS ? THREADS / PART : 1;            // pixels that a block reads at once
constexpr int PART_CHANNELS = PART * WIDTH;
constexpr int SHARE = (CHANNELS + CLUSTER - 1) / CLUSTER;  // channels of the gate per block
constexpr int VECTORS_2 = SQUEEZED / WIDTH_2;
constexpr int LINE = 128;  // bytes per prefetch instruction

static_assert(CHANNELS % WIDTH == 0 && SQUEEZED % WIDTH_2 == 0 && 32 % LANES == 0 && 32 % LANES_2 == 0);
static_assert(CLUSTER % CHANNEL_PARTS == 0 && THREADS % 32 == 0);

struct Memory {
    float rows[ROWS][PART_CHANNELS];         // sums over every ROWS-th pixel of an image
    float sums[IMAGES][PART_CHANNELS];       // sums over this block's pixels
    float parts[CLUSTER][IMAGES][SQUEEZED];  // parts of the first product, one from each block
    float squeezed[IMAGES][SQUEEZED];
};
extern __shared__ uint4 squeeze_memory[];

// The operands of one of the products: squeeze by w, excite by w_2; host.py writes the fields in this order.
struct Product {
    const X_T *w, *bias;
    float alpha, beta;  // of the activation
};

// Returns, in each of LANES_OF neighbouring lanes, the sum of their values.
template <int LANES_OF>
__device__ __forceinline__ float sum_of_lanes(float value) {
#pragma unroll
    for (int offset = 1; offset < LANES_OF; offset *= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

// Prefetches `count` rows of `bytes` bytes, which lie `pitch` bytes apart, to L2.
__device__ __forceinline__ void prefetch_rows(const char* from, int count, int bytes, int pitch) {
#if __CUDA_ARCH__ >= 800
    if (bytes <= 0) return;
    const int lines = bytes / LINE + 2;  // a row can begin within a line
    for (int at = threadIdx.x; at < count * lines; at += THREADS) {
        const int within = min(at % lines * LINE, bytes - 1);
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from + u64(at / lines) * pitch + within));
    }
#endif
}

// Writes the sums over the pixels [first, end) of an image to `to`, one for each channel of the block. `x` points to
// the block's first channel of the image's first pixel, and `vectors` of the block's PART vectors exist.
__device__ __forceinline__ void add_pixels(Memory& memory, const X_T* x, int first, int end, int vectors, float* to) {
    const int row = ROWS > 1 ? threadIdx.x / PART : 0;
    for (int vector = ROWS > 1 ? threadIdx.x % PART : threadIdx.x; vector < PART; vector += THREADS) {
        if (row >= ROWS) break;
        float sums[WIDTH] = {};
        if (vector < vectors) {
            for (int pixel = first + row; pixel < end; pixel += LOADS * ROWS) {
                Pack<X_T, WIDTH> raw[LOADS];
#pragma unroll
                for (int i = 0; i < LOADS; ++i)
                    if (pixel + i * ROWS < end)
                        raw[i] = load_cached<WIDTH>(x + u64(pixel + i * ROWS) * CHANNELS + vector * WIDTH);
#pragma unroll
                for (int i = 0; i < LOADS; ++i)
                    if (pixel + i * ROWS < end) {
                        float values[WIDTH];
                        unpack(raw[i], values);
#pragma unroll
                        for (int j = 0; j < WIDTH; ++j) sums[j] += values[j];
                    }
            }
        }
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) memory.rows[row][vector * WIDTH + j] = sums[j];
    }
    __syncthreads();
    for (int channel = threadIdx.x; channel < PART_CHANNELS; channel += THREADS) {
        float sum = 0.0f;
#pragma unroll 8
        for (int i = 0; i < ROWS; ++i) sum += memory.rows[i][channel];
        to[channel] = sum;
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS) CLUSTER_DIMS
    squeeze_excite(const X_T* x, Product squeeze, Product excite, X_T* gate, float factor, int images, int pixels) {
    Memory& memory = *reinterpret_cast<Memory*>(squeeze_memory);
    const int rank = int(cluster_rank()), first_image = int(blockIdx.x) / CLUSTER * IMAGES;
    const int first_vector = rank % CHANNEL_PARTS * PART, vectors = min(PART, VECTORS - first_vector);
    const int first_channel = first_vector * WIDTH;
    const int first_result = rank * SHARE, end_result = min(first_result + SHARE, CHANNELS);
    cluster_arrive();
    if constexpr (PREFETCHED) {
        prefetch_rows(reinterpret_cast<const char*>(squeeze.w + first_channel), SQUEEZED,
                      vectors * WIDTH * int(sizeof(X_T)), CHANNELS * int(sizeof(X_T)));
        prefetch_rows(reinterpret_cast<const char*>(excite.w + first_result * SQUEEZED), 1,
                      (end_result - first_result) * SQUEEZED * int(sizeof(X_T)), 0);
    }
    wait_for_predecessor();

    const int each = (pixels + PIXEL_PARTS - 1) / PIXEL_PARTS, first_pixel = rank / CHANNEL_PARTS * each;
#pragma unroll 1
    for (int i = 0; i < IMAGES; ++i) {
        const bool there = first_image + i < images;
        add_pixels(memory, x + u64(first_image + i) * pixels * CHANNELS + first_channel, first_pixel,
                   there ? min(first_pixel + each, pixels) : 0, vectors, memory.sums[i]);
    }
    release_successor();

    // The first product: the columns of w for this block's channels, times the sums over its pixels.
    const int lane = threadIdx.x % LANES, lane_2 = threadIdx.x % LANES_2;
    cluster_wait();  // the other blocks have started, so that their shared memory exists
#pragma unroll 2
    for (int group = 0; group < SQUEEZED; group += THREADS / LANES) {  // a warp's sums need all of its lanes
        const int row = group + threadIdx.x / LANES;
        float found[IMAGES] = {};
#pragma unroll
        for (int first = 0; first < PART; first += LANES) {
            const int vector = first + lane;
            if (row >= SQUEEZED || vector >= vectors) continue;
            float weights[WIDTH];
            unpack(load_cached<WIDTH>(squeeze.w + row * CHANNELS + first_channel + vector * WIDTH), weights);
#pragma unroll
            for (int i = 0; i < IMAGES; ++i)
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) found[i] += weights[j] * memory.sums[i][vector * WIDTH + j];
        }
#pragma unroll
        for (int i = 0; i < IMAGES; ++i) {
            const float sum = sum_of_lanes<LANES>(found[i]);
            if (row < SQUEEZED)
                for (int peer = lane; peer < CLUSTER; peer += LANES) store_peer(&memory.parts[rank][i][row], peer, sum);
        }
    }
    cluster_arrive();
    cluster_wait();
    for (int at = threadIdx.x; at < IMAGES * SQUEEZED; at += THREADS) {
        const int i = at / SQUEEZED, row = at % SQUEEZED;
        float sum = 0.0f, added[1] = {};
#pragma unroll
        for (int part = 0; part < CLUSTER; ++part) sum += memory.parts[part][i][row];
        if constexpr (HAS_BIAS) unpack(load_cached<1>(squeeze.bias + row), added);
        memory.squeezed[i][row] = activate::ACTIVATION_1(sum * factor + added[0], squeeze.alpha, squeeze.beta);
    }
    __syncthreads();

    // The second product, by w_2: this block computes its share of the gate's channels.
#pragma unroll 2
    for (int group = first_result; group < end_result; group += THREADS / LANES_2) {
        const int row = group + threadIdx.x / LANES_2;
        float found[IMAGES] = {};
#pragma unroll
        for (int first = 0; first < VECTORS_2; first += LANES_2) {
            const int vector = first + lane_2;
            if (row >= end_result || vector >= VECTORS_2) continue;
            float weights[WIDTH_2];
            unpack(load_cached<WIDTH_2>(excite.w + row * SQUEEZED + vector * WIDTH_2), weights);
#pragma unroll
            for (int i = 0; i < IMAGES; ++i)
#pragma unroll
                for (int j = 0; j < WIDTH_2; ++j) found[i] += weights[j] * memory.squeezed[i][vector * WIDTH_2 + j];
        }
#pragma unroll
        for (int i = 0; i < IMAGES; ++i) {
            const float sum = sum_of_lanes<LANES_2>(found[i]);
            if (row >= end_result || lane_2 > 0 || first_image + i >= images) continue;
            float added[1] = {};
            if constexpr (HAS_BIAS_2) unpack(load_cached<1>(excite.bias + row), added);
            const float result[1] = {activate::ACTIVATION_2(sum + added[0], excite.alpha, excite.beta)};
            store<false>(gate + u64(first_image + i) * CHANNELS + row, result);
        }
    }
}
