// x (pixels, CHANNELS) is split along channels into PARTS tensors y0, y1, ...; the pointers after the last of these
// tensors are null.
//
// A thread reads vectors of x, so that neighbouring threads read a whole row.
#include "row_parts.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) split(
    const T* x,
    T* y0, T* y1, T* y2, T* y3, T* y4, T* y5, T* y6, T* y7, T* y8, T* y9, T* y10, T* y11, T* y12, T* y13, T* y14,
    T* y15, T* y16, T* y17, T* y18, T* y19, T* y20, T* y21, T* y22, T* y23, T* y24, T* y25, T* y26, T* y27, T* y28,
    T* y29, T* y30, T* y31,
    long long pixels) {
    T* const parts[MAX_PARTS] = {
        y0, y1, y2, y3, y4, y5, y6, y7, y8, y9, y10, y11, y12, y13, y14, y15, y16, y17, y18, y19, y20, y21, y22, y23,
        y24, y25, y26, y27, y28, y29, y30, y31};
    const Place place(pixels);
    const Part<T> part = part_of(parts, place.channel);
    copy_pixels(x + place.channel, CHANNELS, part.at, part.channels, place, INDEX(pixels));
}
