// Normalizes the rows of x that a block of nbits_mma.cu multiplies: y = v / sqrt(mean(v^2) + epsilon) * scale, where v
// is x or x + added, as in norms/norm.cuh. Each block normalizes its rows once, while its first weights arrive.
//
// Macros:
//   NORM_ADDS      1: v is x + added
//   NORM_SCALE_T   the storage type of the scale
//   and those of nbits_mma.cu
#pragma once

constexpr int NORM_VECTORS = (K / 8 + THREADS - 1) / THREADS;  // vectors of a row of x per thread
// Bytes from row to row, so that two rows are in different banks.
constexpr int NORM_PITCH = 2 * STAGE_K * STAGES + (TILE_M == 1 ? 0 : 64);
constexpr int NORM_BYTES = (TILE_M * NORM_PITCH + 127) / 128 * 128;

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

    // Writes `rows` rows to shared memory at `to`, with zeros after each row up to a whole stage. `sums` has room for
    // TILE_M floats per warp.
    __device__ __forceinline__ void normalize(unsigned to, float* sums, const T* x, const Norm& norm, long long first,
                                              int rows) const {
        float values[TILE_M][NORM_VECTORS][8] = {}, squares[TILE_M] = {};
#pragma unroll
        for (int row = 0; row < TILE_M; ++row)
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
        for (int row = 0; row < TILE_M; ++row)
#pragma unroll
            for (int lanes = 16; lanes > 0; lanes /= 2)
                squares[row] += __shfl_xor_sync(0xffffffffu, squares[row], lanes);
        if (threadIdx.x % 32 == 0)
#pragma unroll
            for (int row = 0; row < TILE_M; ++row) sums[threadIdx.x / 32 * TILE_M + row] = squares[row];
        __syncthreads();
#pragma unroll
        for (int row = 0; row < TILE_M; ++row) {
            float sum = 0.0f;
#pragma unroll
            for (int warp = 0; warp < WARPS; ++warp) sum += sums[warp * TILE_M + row];
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
                    store_chunk(to + row * NORM_PITCH + vector(i) * 16, pack<T>(results).words);
            }
        }
        __syncthreads();
    }
};
