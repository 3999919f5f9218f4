// Rows of CHANNELS elements, one per pixel, that are divided among PARTS tensors: the i-th tensor has the channels from
// the i-th number of BEGINS up to the next number, for all pixels.
#pragma once
#include "types.cuh"

// The addresses of the parts, as an argument of the kernels.
template <class P>
struct Parts {
    P* first_pixel[PARTS];
};

// The part that contains a channel: the address of this channel in the part's first pixel, and the part's number of
// channels.
template <class P>
struct Part {
    P* at;
    u32 channels;
};

template <class P>
__device__ __forceinline__ Part<P> part_of(const Parts<P>& parts, u32 channel) {
    constexpr u32 begins[PARTS + 1] = {BEGINS, CHANNELS};
    P* data = parts.first_pixel[0];
    u32 begin = 0, end = begins[1];
#pragma unroll
    for (int i = 1; i < PARTS; ++i)
        if (channel >= begins[i]) {
            data = parts.first_pixel[i];
            begin = begins[i];
            end = begins[i + 1];
        }
    return {data + (channel - begin), end - begin};
}
