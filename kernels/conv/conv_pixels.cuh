// Stores y for tiles of TP x TQ pixels from sums in the layout of mma.sync: applies the epilogue in registers, and
// writes whole vectors through each warp's shared memory.
//
// Macros:
//   FILTERS   channels of y              TP, TQ   pixels of a tile along height and width
//   WIDTH     elements of an access to y: divides FILTERS
//   and those of epilogue.cuh
#pragma once
#include "types.cuh"
#include "conv_sizes.cuh"
#include "epilogue.cuh"
#include "gemm_multiply.cuh"

constexpr int ITEM = sizeof(T);

// Writes two elements to shared memory; read_vector reads WIDTH elements from it.
__device__ __forceinline__ void write_pair(char* to, const u32* words) {
    if constexpr (ITEM == 4) *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    else *reinterpret_cast<u32*>(to) = words[0];
}

__device__ __forceinline__ void read_vector(const char* from, u32 (&words)[4]) {
    if constexpr (WIDTH * ITEM == 16) {
        const uint4 four = *reinterpret_cast<const uint4*>(from);
        words[0] = four.x;
        words[1] = four.y;
        words[2] = four.z;
        words[3] = four.w;
    } else if constexpr (WIDTH * ITEM == 8) {
        const uint2 two = *reinterpret_cast<const uint2*>(from);
        words[0] = two.x;
        words[1] = two.y;
    } else if constexpr (WIDTH * ITEM == 4) {
        words[0] = *reinterpret_cast<const u32*>(from);
    } else {
        words[0] = *reinterpret_cast<const unsigned short*>(from);
    }
}

// The output of a warp: its sums for FILTER_TILES mma tiles of 8 filters each. The warp applies the epilogue to 16
// pixels of the block's tile at a time.
template <int FILTER_TILES>
struct WarpOutput : EpilogueOperands {
    static constexpr int STAGE_PITCH = FILTER_TILES * 8 * ITEM + 16;  // bytes of shared memory for a pixel
    static constexpr int STAGE = 16 * STAGE_PITCH;

    int height, width, first_filter;  // sizes of y, and the warp's first filter
    ColumnValues<2> values[FILTER_TILES];

    __device__ __forceinline__ void load_columns() {
#pragma unroll
        for (int j = 0; j < FILTER_TILES; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int filter = first_filter + j * 8 + threadIdx.x % 4 * 2 + i;
                if (filter < FILTERS) vectors().load(values[j], i, filter);
            }
    }

    // Returns the position in y of a pixel of the tile whose first pixel is at (p, q), or -1 if y has no such pixel.
    __device__ __forceinline__ i64 position(int image, int p, int q, int pixel) const {
        const int row = p + pixel / TQ, column = q + pixel % TQ;
        if (pixel >= TP * TQ || row >= height || column >= width) return -1;
        return ((i64(image) * height + row) * width + column) * FILTERS + first_filter;
    }

    // Loads the residual of two neighbouring filters.
    __device__ __forceinline__ void load_residual(i64 at, int filter, float (&to)[2]) const {
        if constexpr (HAS_RESIDUAL) {
            if constexpr (WIDTH > 1) {
                if (at >= 0 && first_filter + filter < FILTERS) unpack(load_once<2>(residual + at + filter), to);
            } else {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int each = filter + i;
                    float one[1] = {0.0f};
                    if (at >= 0 && first_filter + each < FILTERS) unpack(load_once<1>(residual + at + each), one);
                    to[i] = one[0];
                }
            }
        }
    }

    // Applies the epilogue to 16 pixels of the tile and stores them, through the warp's shared memory `stage`.
    __device__ __forceinline__ void store_pixels(const float (&sums)[FILTER_TILES][4], char* stage, int image, int p,
                                                 int q, int pixel) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = lane / 4 + half * 8;
            const i64 at = HAS_RESIDUAL ? position(image, p, q, pixel + row) : 0;
#pragma unroll
            for (int j = 0; j < FILTER_TILES; ++j) {
                const int filter = j * 8 + lane % 4 * 2;
                float added[2] = {}, results[2];
                load_residual(at, filter, added);
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    results[i] = epilogue_columns(sums[j][2 * half + i], 0.0f, values[j], i, added[i], alpha, beta);
                write_pair(stage + row * STAGE_PITCH + filter * ITEM, pack<T>(results).words);
            }
        }
        __syncwarp();
        constexpr int VECTORS = FILTER_TILES * 8 / WIDTH;
#pragma unroll
        for (int i = lane; i < 16 * VECTORS; i += 32) {
            const int row = i / VECTORS, filter = i % VECTORS * WIDTH;
            const i64 at = position(image, p, q, pixel + row);
            if (at < 0 || first_filter + filter >= FILTERS) continue;
            u32 words[4];
            read_vector(stage + row * STAGE_PITCH + filter * ITEM, words);
            store_bytes<false, WIDTH * ITEM>(reinterpret_cast<char*>(y + at + filter), words);
        }
        __syncwarp();
    }
};
