// Where the producer of gemm_hopper.cuh finds the operands of a convolution: x (n, h, w, c) by TMA's im2col mode.
//
// The rows of the product are the pixels of y, images first; k counts the filter's taps, and within a tap the channels
// of x. A block of k belongs to one tap: TILE_M pixels of x from the tile's first one on, moved by the tap's offset, with
// zeros where they lie in the padding. Channels beyond c are zeros of both operands.
//
// Macros, besides those of gemm_hopper.cuh:
//   CHANNELS            of x
//   KERNEL_H, KERNEL_W  sizes of the filter
//   STRIDE_H, STRIDE_W, PAD_H, PAD_W, DILATION_H, DILATION_W    PAD: rows and columns in front of x
#pragma once
#include "gemm_hopper.cuh"

namespace {

constexpr int CHANNEL_BLOCKS = (CHANNELS + K_BLOCK - 1) / K_BLOCK;
constexpr int ALL_BLOCKS = KERNEL_H * KERNEL_W * CHANNEL_BLOCKS;

// x and w at one tile. w has the dimensions channels, taps, filters.
struct PixelOperands {
    const TensorMap &x, &w;
    int y_h, y_w;  // the sizes of y
    int image, h, w_at, column;

    __device__ __forceinline__ void begin(int2 origin) {
        const int rows = origin.x / y_w;
        image = rows / y_h;
        h = (rows - image * y_h) * STRIDE_H - PAD_H;
        w_at = (origin.x - rows * y_w) * STRIDE_W - PAD_W;
        column = origin.y;
    }
    static __device__ __forceinline__ int blocks(int step) { return min(BLOCKS, ALL_BLOCKS - step * BLOCKS); }
    static __device__ __forceinline__ u32 bytes(int step) {
        return blocks(step) * (TILE_M + TILE_N) * BLOCK_ROW_BYTES;
    }
    __device__ __forceinline__ void load_x(u32 stage, u32 full, int step) const {
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) {
            const int block = step * BLOCKS + i, tap = block / CHANNEL_BLOCKS;
            if (block >= ALL_BLOCKS) break;
            hopper::load_im2col(x, stage + i * TILE_M * BLOCK_ROW_BYTES, full, block % CHANNEL_BLOCKS * K_BLOCK, w_at,
                                h, image, tap % KERNEL_W * DILATION_W, tap / KERNEL_W * DILATION_H);
        }
    }
    __device__ __forceinline__ void load_weights(u32 stage, u32 full, int step) const {
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) {
            const int block = step * BLOCKS + i;
            if (block >= ALL_BLOCKS) break;
            hopper::load(w, stage + X_BYTES + i * TILE_N * BLOCK_ROW_BYTES, full, block % CHANNEL_BLOCKS * K_BLOCK,
                         block / CHANNEL_BLOCKS, column);
        }
    }
};

}  // namespace
