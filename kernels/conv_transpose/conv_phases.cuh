// The filter taps that contribute to a pixel of y in a transposed convolution. They depend on the pixel's phase: its
// coordinates modulo the stride.
#pragma once

constexpr int common_divisor(int a, int b) { return b ? common_divisor(b, a % b) : a; }

// The taps r of one axis for which y + pad - r * DILATION is a multiple of STRIDE; tap r reads x at the quotient.
template <int KERNEL, int STRIDE, int DILATION>
struct AxisTaps {
    static constexpr int STEP = STRIDE / common_divisor(STRIDE, DILATION);  // from a tap of a phase to its next tap
    static constexpr int SHIFT = DILATION * STEP / STRIDE;                  // the next tap reads SHIFT pixels earlier
    int first, count;                                                       // the first tap, and the number of taps
    int from;                                                               // index in x that the first tap reads

    __device__ __forceinline__ AxisTaps(int y, int pad) : first(KERNEL) {
#pragma unroll 1
        for (int tap = (STEP < KERNEL ? STEP : KERNEL) - 1; tap >= 0; --tap)
            if ((y + pad - tap * DILATION) % STRIDE == 0) first = tap;
        count = (KERNEL - first + STEP - 1) / STEP;
        from = (y + pad - first * DILATION) / STRIDE;
    }
    __device__ __forceinline__ int tap(int index) const { return first + index * STEP; }
};
