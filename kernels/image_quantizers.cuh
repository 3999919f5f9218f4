// The quantizers before and after an operator on images of 8-bit integers (T), which computes on integers: sums of them
// are exact in fp32. The scale of x multiplies the result.
#pragma once
#include "types.cuh"

struct ImageQuantizers {
    float x_scale, x_zero, y_scale, y_zero;

    __device__ __forceinline__ ImageQuantizers(const f32* x_scale, const T* x_zero, const f32* y_scale, const T* y_zero)
        : x_scale(__uint_as_float(x_scale->bits)), x_zero(float(*x_zero)), y_scale(__uint_as_float(y_scale->bits)),
          y_zero(float(*y_zero)) {}

    // Returns the integer, as a number, of a result without the zero point of x; stores saturate it.
    __device__ __forceinline__ float quantized(float result) const {
        return rintf(__fdiv_rn(__fmul_rn(result, x_scale), y_scale)) + y_zero;
    }
};

#define IMAGE_QUANTIZERS const f32 *x_scale, const T *x_zero, const f32 *y_scale, const T *y_zero
