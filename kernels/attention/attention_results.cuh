// Definitions shared by all attention kernels: the maximum of a row without scores, and the division by a row's sum.
#pragma once

#include "types.cuh"

using i64 = long long;

#define MINUS_INFINITY __uint_as_float(0xff800000u)  // -inf

// Divides `value` by the sum of a row's weights. A row without weights gives 0 with ZERO_MASKED_ROWS, else NaN.
__device__ __forceinline__ float normalized(float value, float sum) {
    const bool some = sum > 0.0f && sum <= LARGEST;
    return some ? __fdividef(value, sum) : ZERO_MASKED_ROWS ? 0.0f : __uint_as_float(0x7fffffffu);
}
