// What follows a matrix product whose sums lie in shared memory: bias, activation, gate, column scale, residual.
//
//   ITEM_T  storage of all tensors    COLUMNS, DEPTH  n and k
//   WIDTH   elements of an access to y, residual and the vectors of n; divides n
//   PARTS   2: a gated product        BIAS, UP_BIAS, COLUMN_SCALE, RESIDUAL  1: there is one    ACTIVATION, PRECISE
#pragma once

using T = ITEM_T;
using i64 = long long;

constexpr int N = COLUMNS, K = DEPTH;
static_assert(N % WIDTH == 0, "vectors end with a row");

__device__ __forceinline__ unsigned shared_address(const void* place) {
    return static_cast<unsigned>(__cvta_generic_to_shared(place));
}

struct Epilogue {
    const T *bias, *up_bias, *column_scale, *residual;
    T* y;
    float alpha, beta;
    int n = N;  // columns of y

    // `sums` is where those of the first of WIDTH columns are, those of the other part `part` floats further.
    __device__ __forceinline__ void finish(const float* sums, int part, i64 row, int column) const {
        float values[WIDTH], up[WIDTH];
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            values[i] = sums[i];
            if constexpr (PARTS == 2) up[i] = sums[part + i];
        }
        finish(values, up, row, column);
    }

    // `values`: the sums of WIDTH columns; `up`: those of the other part.
    __device__ __forceinline__ void finish(float (&values)[WIDTH], float (&up)[WIDTH], i64 row, int column) const {
        float other[WIDTH];
        if (BIAS && bias) {
            unpack(load_cached<WIDTH>(bias + column), other);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) values[i] += other[i];
        }
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) values[i] = activate::ACTIVATION(values[i], alpha, beta);
        if constexpr (UP_BIAS) {
            unpack(load_cached<WIDTH>(up_bias + column), other);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) up[i] += other[i];
        }
        if constexpr (PARTS == 2)
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) values[i] *= up[i];
        if constexpr (COLUMN_SCALE) {
            unpack(load_cached<WIDTH>(column_scale + column), other);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) values[i] *= other[i];
        }
        if constexpr (RESIDUAL) {
            unpack(load_once<WIDTH>(residual + row * n + column), other);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) values[i] += other[i];
        }
        store<false>(y + row * n + column, values);
    }
};
