// Definitions shared by attention kernels: the maximum of a row without scores, the division by a row's sum, and the
// results of blocks that share the keys of a head.
#pragma once

#include "types.cuh"

using i64 = long long;

#define MINUS_INFINITY __uint_as_float(0xff800000u)  // -inf

// Divides `value` by the sum of a row's weights. A row without weights gives 0 with ZERO_MASKED_ROWS, else NaN.
__device__ __forceinline__ float normalized(float value, float sum) {
    const bool some = sum > 0.0f && sum <= LARGEST;
    return some ? value * reciprocal(sum) : ZERO_MASKED_ROWS ? 0.0f : __uint_as_float(0x7fffffffu);
}

// A kernel argument: `count` slices of the keys, each for one block, and the addresses of the slices' results in
// scratch memory. For each slice, `partial` has BLOCK_M rows of HEAD_DIM_V floats, and `totals` has the maximum and the
// sum of each row. If the addresses are null and there are several slices, their blocks form one cluster. decode.py
// writes the fields in this order.
struct Splits {
    float* partial;
    float2* totals;
    int count;
};
