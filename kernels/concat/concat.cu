// y (pixels, CHANNELS) is the concatenation of PARTS tensors x0, x1, ... along channels; the pointers after the last of
// these tensors are null.
//
// A thread writes vectors of y, so that neighbouring threads write a whole row.
#include "row_parts.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) concat(
    const T* x0, const T* x1, const T* x2, const T* x3, const T* x4, const T* x5, const T* x6, const T* x7,
    const T* x8, const T* x9, const T* x10, const T* x11, const T* x12, const T* x13, const T* x14, const T* x15,
    const T* x16, const T* x17, const T* x18, const T* x19, const T* x20, const T* x21, const T* x22, const T* x23,
    const T* x24, const T* x25, const T* x26, const T* x27, const T* x28, const T* x29, const T* x30, const T* x31,
    T* y, long long pixels) {
    const T* const parts[MAX_PARTS] = {
        x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15, x16, x17, x18, x19, x20, x21, x22, x23,
        x24, x25, x26, x27, x28, x29, x30, x31};
    const Place place(pixels);
    const Part<const T> part = part_of(parts, place.channel);
    copy_pixels(part.at, part.channels, y + place.channel, CHANNELS, place, INDEX(pixels));
}
