// y (pixels, CHANNELS) is the concatenation of PARTS tensors along channels.
//
// A thread writes vectors of y, so that neighbouring threads write a whole row.
#include "row_parts.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) concat(Parts<const T> parts, T* y, long long pixels) {
    const Place place(pixels);
    const Part<const T> part = part_of(parts, place.channel);
    copy_pixels(part.at, part.channels, y + place.channel, CHANNELS, place, INDEX(pixels));
}
