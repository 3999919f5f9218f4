// Moves blocks of BLOCK x BLOCK pixels to the channels of one pixel, or back, in channels-last tensors.
//
// The deep tensor is (n, height, width, BLOCK * BLOCK * CHANNELS), and the wide one (n, height * BLOCK, width * BLOCK,
// CHANNELS). The channels of a deep pixel are (block row, block column, channel) or, with BY_CHANNEL, (channel, block
// row, block column). A thread moves WIDTH channels of one block, with all of its loads in flight together.
//
//   T           storage type                       WIDTH       channels of an access to the wide tensor
//   TO_SPACE    1: x is the deep tensor, 0: y is   DEEP_WIDTH  elements of an access to the deep one
//   STREAMED    1: L2 evicts y first               RELEASE     1: the next kernel can start before this one stores
//
// STREAMED and RELEASE can be expressions of `count` and gridDim.
#include "types.cuh"

constexpr int PIXELS = BLOCK * BLOCK, HELD = PIXELS * WIDTH;  // pixels per block, elements per thread

static_assert(CHANNELS % WIDTH == 0 && HELD % DEEP_WIDTH == 0, "a vector would cross pixels");
static_assert(!BY_CHANNEL || TO_SPACE, "SpaceToDepth has one order");

using Vector = Pack<T, WIDTH>;

// Loads the same WIDTH channels of all pixels of a block from a deep pixel. With BY_CHANNEL, the deep pixel has all
// these elements contiguous and ordered by channel. Otherwise only the WIDTH channels of one pixel are contiguous.
__device__ __forceinline__ void load_deep(Vector (&block)[PIXELS], const T* from) {
    if constexpr (!BY_CHANNEL) {
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) block[i] = load_once<WIDTH>(from + i * CHANNELS);
    } else {
        Pack<T, DEEP_WIDTH> raw[HELD / DEEP_WIDTH];
        float elements[HELD];
#pragma unroll
        for (int i = 0; i < HELD / DEEP_WIDTH; ++i) raw[i] = load_once<DEEP_WIDTH>(from + i * DEEP_WIDTH);
#pragma unroll
        for (int i = 0; i < HELD / DEEP_WIDTH; ++i) {
            float some[DEEP_WIDTH];
            unpack(raw[i], some);
#pragma unroll
            for (int k = 0; k < DEEP_WIDTH; ++k) elements[i * DEEP_WIDTH + k] = some[k];
        }
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) {
            float channels[WIDTH];
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) channels[k] = elements[k * PIXELS + i];
            block[i] = pack<T, WIDTH>(channels);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) pixel_blocks(const T* x, T* y, int width, long long count) {
    constexpr int VECTORS = CHANNELS / WIDTH;
    const long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (at >= count) return;
    wait_for_predecessor();
    const long long pixel = at / VECTORS, row = pixel / width;  // in the deep tensor; rows are counted over all images
    const int channel = int(at - pixel * VECTORS) * WIDTH, column = int(pixel - row * width);
    const long long deep = pixel * (PIXELS * CHANNELS) + channel * (BY_CHANNEL ? PIXELS : 1);
    const long long pitch = (long long)width * (BLOCK * CHANNELS);  // elements per row of the wide tensor
    const long long wide = row * BLOCK * pitch + (long long)column * (BLOCK * CHANNELS) + channel;

    Vector block[PIXELS];
    if constexpr (TO_SPACE) {
        load_deep(block, x + deep);
    } else {
#pragma unroll
        for (int i = 0; i < PIXELS; ++i)
            block[i] = load_once<WIDTH>(x + wide + i / BLOCK * pitch + i % BLOCK * CHANNELS);
    }
    if (RELEASE) release_successor();
#pragma unroll
    for (int i = 0; i < PIXELS; ++i) {
        if constexpr (TO_SPACE) store_pack_as(STREAMED, y + wide + i / BLOCK * pitch + i % BLOCK * CHANNELS, block[i]);
        else store_pack_as(STREAMED, y + deep + i * CHANNELS, block[i]);
    }
}
