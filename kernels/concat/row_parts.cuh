// Copies of rows of CHANNELS elements, one per pixel, that are divided among PARTS tensors, as channel_parts.cuh says.
//
// A thread copies one vector of channels for CHUNKS pixels. The distance between these pixels is the number of all
// pixels divided by CHUNKS. As all of them use the same channels, the thread looks up the part only once, before the
// preceding kernel has ended, and has all loads in flight together. Elements are copied as they are. Neighbouring
// threads copy neighbouring vectors.
//
//   T         storage type                          WIDTH    elements of a vector access; divides all parts' channels
//   STREAMED  1: L2 evicts written elements first   RELEASE  1: the next kernel may start before this one stores
//   INDEX     u32, or u64 where u32 cannot count all elements
//
// STREAMED and RELEASE may depend on `pixels` and gridDim.
#pragma once
#include "channel_parts.cuh"
#include "types.cuh"

static_assert(CHANNELS % WIDTH == 0, "a vector would cross pixels");

constexpr u32 ROW = CHANNELS / WIDTH;  // vectors per pixel

// The place of this thread's first vector: a channel, and a pixel below `pixels_apart`, which is the number of all
// pixels divided by CHUNKS, rounded up. The thread's next pixel is `pixels_apart` pixels later.
struct Place {
    INDEX pixel, pixels_apart;
    u32 channel;

    __device__ __forceinline__ explicit Place(INDEX pixels) {
        const INDEX at = INDEX(blockIdx.x) * THREADS + threadIdx.x;
        pixels_apart = (pixels + CHUNKS - 1) / CHUNKS;
        pixel = at / ROW;
        channel = u32(at % ROW) * WIDTH;
    }
};

// Copies the vectors of a thread from one tensor to another. `from` and `to` are the addresses of the thread's first
// channel in the first pixel of either tensor. The pitches are the numbers of channels of the two tensors.
__device__ __forceinline__ void copy_pixels(const T* from, INDEX from_pitch, T* to, INDEX to_pitch, const Place& place,
                                            INDEX pixels) {
    wait_for_predecessor();
    if (place.pixel >= place.pixels_apart) return;
    Pack<T, WIDTH> raw[CHUNKS];
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
        const INDEX pixel = place.pixel + k * place.pixels_apart;
        if (k == 0 || pixel < pixels) raw[k] = load_once<WIDTH>(from + pixel * from_pitch);
    }
    if (RELEASE) release_successor();
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
        const INDEX pixel = place.pixel + k * place.pixels_apart;
        if (k == 0 || pixel < pixels) store_pack_as(STREAMED, to + pixel * to_pitch, raw[k]);
    }
}
