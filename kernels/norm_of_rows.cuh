// Normalizes the rows of x that a block of a product multiplies: y = v / sqrt(mean(v^2) + epsilon) * scale, where v is
// x or x + added, as in norms/norm.cuh. Each block normalizes its rows once, while its first weights arrive.
//
// Macros:
//   NORM_ADDS      1: v is x + added
//   NORM_SCALE_T   the storage type of the scale
//   WEIGHTS_CONSTANT   1: no kernel writes the scale
// Constants that the kernel declares, or macros:
//   T, K, THREADS, WARPS   the storage type of x; the elements of a row, a multiple of 8; the threads of a block
//   NORM_ROWS      maximum rows of a block
//   NORM_PITCH     bytes from a normalized row to the next one, a multiple of 16; zeros fill what is not in the row
#pragma once

constexpr int NORM_VECTORS = (K / 8 + THREADS - 1) / THREADS;  // vectors of a row of x per thread

#define NORM_PARAMETERS , Norm norm

// The operands of an RMSNorm of x, or of x + added. That sum is written to `sum`, unless `sum` is null.
struct Norm {
    const T* added;
    const NORM_SCALE_T* scale;
    T* sum;
    float epsilon;
};

struct NormalizedRows {
    Pack<NORM_SCALE_T, 8> scales[NORM_VECTORS] = {};

    static __device__ __forceinline__ int vector(int i) { return i * THREADS + threadIdx.x; }

    __device__ __forceinline__ void load_scales(const Norm& norm) {
#pragma unroll
        for (int i = 0; i < NORM_VECTORS; ++i)
            if (vector(i) < K / 8) scales[i] = load_cached<8, WEIGHTS_CONSTANT>(norm.scale + vector(i) * 8);
    }

    // Passes each vector of `rows` rows, from row `first` of x on, to `store_vector`, with its offset in shared memory.
    // `sums` has room for NORM_ROWS floats per warp.
    template <class Store>
    __device__ __forceinline__ void normalize(float* sums, const T* x, const Norm& norm, long long first, int rows,
                                              const Store& store_vector) const {
        float values[NORM_ROWS][NORM_VECTORS][8] = {}, squares[NORM_ROWS] = {};
#pragma unroll
        for (int row = 0; row < NORM_ROWS; ++row)
#pragma unroll
            for (int i = 0; i < NORM_VECTORS; ++i) {
                if (vector(i) >= K / 8 || row >= rows) continue;
                const long long at = (first + row) * K + vector(i) * 8;
                unpack(load_cached<8>(x + at), values[row][i]);
                if constexpr (NORM_ADDS) {
                    float added[8];
                    unpack(load_cached<8>(norm.added + at), added);
#pragma unroll
                    for (int j = 0; j < 8; ++j) values[row][i][j] += added[j];
                    if (norm.sum && blockIdx.x == 0) store<false>(norm.sum + at, values[row][i]);
                }
#pragma unroll
                for (int j = 0; j < 8; ++j) squares[row] += values[row][i][j] * values[row][i][j];
            }
#pragma unroll
        for (int row = 0; row < NORM_ROWS; ++row)
#pragma unroll
            for (int lanes = 16; lanes > 0; lanes /= 2)
                squares[row] += __shfl_xor_sync(0xffffffffu, squares[row], lanes);
        if (threadIdx.x % 32 == 0)
#pragma unroll
            for (int row = 0; row < NORM_ROWS; ++row) sums[threadIdx.x / 32 * NORM_ROWS + row] = squares[row];
        __syncthreads();
#pragma unroll
        for (int row = 0; row < NORM_ROWS; ++row) {
            float sum = 0.0f;
#pragma unroll
            for (int warp = 0; warp < WARPS; ++warp) sum += sums[warp * NORM_ROWS + row];
            const float slope = rsqrtf(sum * (1.0f / K) + norm.epsilon);
#pragma unroll
            for (int i = 0; i < (NORM_PITCH / 16 + THREADS - 1) / THREADS; ++i) {
                float results[8] = {};
                if (i < NORM_VECTORS && vector(i) < K / 8) {
                    unpack(scales[i], results);
#pragma unroll
                    for (int j = 0; j < 8; ++j) results[j] *= values[row][i][j] * slope;
                }
                if (vector(i) < NORM_PITCH / 16)
                    store_vector(row * NORM_PITCH + vector(i) * 16, pack<T>(results).words);
            }
        }
        __syncthreads();
    }
};
