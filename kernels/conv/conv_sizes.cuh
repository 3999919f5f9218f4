// The sizes of a convolution, as an argument of kernels.
#pragma once

// Coordinates or sizes along D, H and W.
struct Position { int d, h, w; };

// problem.py writes the fields in this order. An axis that the convolution lacks has the size 1 and the padding 0.
struct ConvSizes {
    int images;
    Position x, y, pads;  // pads: zeros before x; for a transposed convolution, elements that are cut off before y

    __device__ __forceinline__ int pixels() const { return images * y.d * y.h * y.w; }  // pixels of y
};
