// Sums the products of a tile on CUDA cores, exactly in fp32, in the main loop of gemm_mma.cuh. This is for fp32
// operands that must not be rounded to TF32, and for dtypes that mma.sync does not support on the GPU.
//
// A warp has 64 rows and 32 columns of the tile; a thread has every eighth of the rows and every fourth of the columns.
// For four neighbouring k, a thread loads its 8 rows of x once and then a column of w at a time: 16 loads for 256 fma.
// The loads have no bank conflicts, because the lanes of a warp read 8 neighbouring rows or 4 neighbouring columns.
#pragma once
#include "gemm_mma.cuh"

constexpr int FMA_K = 4;  // elements of k that a thread loads and multiplies at a time
static_assert(TILE_M == 64 * WARPS_M && TILE_N == 32 * WARPS_N, "warps of 64 x 32");

struct FmaSums {
    float at[8][8];

    __device__ __forceinline__ void prepare() {}

    __device__ __forceinline__ static int row() { return threadIdx.x / 32 / WARPS_N * 64 + threadIdx.x % 32 / 4; }
    __device__ __forceinline__ static int column() { return threadIdx.x / 32 % WARPS_N * 32 + threadIdx.x % 4; }

    // Loads FMA_K elements along k of row `row` of a tile.
    __device__ __forceinline__ static void load_row(unsigned tile, int row, int step, float (&to)[FMA_K]) {
        constexpr int BYTES = FMA_K * ITEM;
        Pack<T, FMA_K> packed;
        const int at = step * BYTES;
        load_words(tile + swizzled_offset<TILE_K_BYTES>(row, at / 16) + at % 16, packed.words);
        unpack(packed, to);
    }

    // Loads FMA_K elements along k of column `column` of w.
    __device__ __forceinline__ static void load_weights(unsigned tile, int column, int step, float (&to)[FMA_K]) {
        if constexpr (TRANSPOSED) {
            load_row(tile, column, step, to);
        } else {
            const int at = column * ITEM;
#pragma unroll
            for (int i = 0; i < FMA_K; ++i) {
                const int chunk = weight_offset<W_ROW_BYTES, TF32>(step * FMA_K + i, at / 16);
                float both[2];
                widen(T(), load_word(tile + chunk + (at % 16 & ~3)) >> at % 4 * 8, both);
                to[i] = both[0];
            }
        }
    }

    __device__ __forceinline__ void add(unsigned stage) {
#pragma unroll 1  // otherwise the compiler moves loads ahead, and registers do not suffice
        for (int step = 0; step < TILE_K / FMA_K; ++step) {
            float x[8][FMA_K];
#pragma unroll
            for (int i = 0; i < 8; ++i) load_row(stage, row() + i * 8, step, x[i]);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                float w[FMA_K];
                load_weights(stage + X_BYTES, column() + j * 4, step, w);
#pragma unroll
                for (int k = 0; k < FMA_K; ++k)
#pragma unroll
                    for (int i = 0; i < 8; ++i) at[i][j] = fmaf(x[i][k], w[k], at[i][j]);
            }
        }
    }

    // Stores the sums to shared memory, in rows of SUMS_PITCH.
    __device__ __forceinline__ void store(float* to) const {
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) to[(row() + i * 8) * SUMS_PITCH + column() + j * 4] = at[i][j];
    }
};
