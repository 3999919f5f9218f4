// y (pixels, CHANNELS) is the concatenation of PARTS tensors along channels.
//
// Each thread writes vectors of y, and neighbouring threads write neighbouring vectors, so together they write whole
// rows.
#include "row_parts.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) concat(Parts<const T> parts, T* y, long long pixels) {
    const Place place(pixels);
    const Part<const T> part = part_of(parts, place.channel);
    copy_pixels(part.at, part.channels, y + place.channel, CHANNELS, place, INDEX(pixels));
}
