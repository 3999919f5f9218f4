// A causal convolution of each channel along a sequence, with a bias and SiLU, after the last columns of the sequence
// before. A thread computes COLUMNS columns of one channel, at least as many as a state has: so only the thread of the
// first columns reads the past state, and it also writes the present one, which may have the same address.
//
// Macros: T; SIZE, elements of a filter; COLUMNS; WIDTH, elements of an access, which divides the length and COLUMNS;
// BIAS, PAST, SILU: 1 or 0.
#include "types.cuh"

using i64 = long long;

constexpr int BEFORE = SIZE - 1;
constexpr int THREADS = 128;

struct Operands {
    const T *x, *weight, *bias, *past;
    T *y, *present;
};

__device__ __forceinline__ float element(const T* from) {
    float value[1];
    unpack(load_cached<1>(from), value);
    return value[0];
}

// Returns column `at` of a row's past columns and x; `at` counts from the first past column.
__device__ __forceinline__ float column(const Operands& p, i64 row, int at, int length) {
    if (at >= BEFORE) return at - BEFORE < length ? element(p.x + row * length + at - BEFORE) : 0.0f;
    return PAST ? element(p.past + row * BEFORE + at) : 0.0f;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    causal_conv_with_state(const __grid_constant__ Operands p, i64 rows, int length, int channels, int parts) {
    release_successor();
    wait_for_predecessor();
    const i64 item = (i64)blockIdx.x * THREADS + threadIdx.x, row = item / parts;
    if (row >= rows) return;
    const int first = int(item % parts) * COLUMNS, channel = int(row % channels);
    float filter[SIZE], x[BEFORE + COLUMNS];
#pragma unroll
    for (int i = 0; i < SIZE; ++i) filter[i] = element(p.weight + channel * SIZE + i);
#pragma unroll
    for (int i = 0; i < BEFORE; ++i) x[i] = column(p, row, first + i, length);
    const float bias = BIAS ? element(p.bias + channel) : 0.0f;
#pragma unroll
    for (int c = 0; c < COLUMNS; c += WIDTH) {
        if (first + c >= length) break;
        float own[WIDTH];
        unpack(load_cached<WIDTH>(p.x + row * length + first + c), own);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) x[BEFORE + c + i] = own[i];
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            float sum = bias;
#pragma unroll
            for (int j = 0; j < SIZE; ++j) sum = fmaf(filter[j], x[c + i + j], sum);
            own[i] = SILU ? sum * reciprocal(1.0f + exp2_fast(-sum * LOG2_E)) : sum;
        }
        store<false>(p.y + row * length + first + c, own);
    }
    if (first == 0) {
        float last[SIZE];
#pragma unroll
        for (int i = 0; i < BEFORE; ++i) last[i] = column(p, row, length + i, length);
#pragma unroll
        for (int i = 0; i < BEFORE; ++i) {
            const float value[1] = {last[i]};
            store<false>(p.present + row * BEFORE + i, value);
        }
    }
}
