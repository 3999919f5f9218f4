// x (pixels, CHANNELS) is split along channels into PARTS tensors.
//
// Each thread reads vectors of x, and neighbouring threads read neighbouring vectors, so together they read whole rows.
#include "row_parts.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) split(const T* x, Parts<T> parts, long long pixels) {
    const Place place(pixels);
    const Part<T> part = part_of(parts, place.channel);
    copy_pixels(x + place.channel, CHANNELS, part.at, part.channels, place, INDEX(pixels));
}
