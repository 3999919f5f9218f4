// The operands of a convolution with one to three spatial axes, as the producer of gemm_hopper.cuh loads them:
// x (n, d, h, w, c) comes by TMA's im2col mode.
//
// The rows of the product are the pixels of y, images first; k counts the filter's taps, and within a tap the channels
// of x. A block of k belongs to one tap. It has TILE_M pixels of x, from the tile's first pixel on, shifted by the
// offset of the tap; pixels in the padding are zeros. Channels beyond c are zeros in x and, unless it has 8 bits, in w.
//
// Macros, besides those of gemm_hopper.cuh:
//   CHANNELS            channels of x
//   DIMS                spatial axes: 1 (W), 2 (H, W) or 3 (D, H, W)
//   KERNEL_D, KERNEL_H, KERNEL_W    sizes of the filter, 1 for axes that are missing
//   DILATION_*                      by axis
// Strides and pads are arguments, which cost a tile a few instructions. The macros are for each block of k.
#pragma once
#include "gemm_hopper.cuh"

namespace {

constexpr int CHANNEL_BLOCKS = (CHANNELS + K_BLOCK - 1) / K_BLOCK;
constexpr int ALL_BLOCKS = KERNEL_D * KERNEL_H * KERNEL_W * CHANNEL_BLOCKS;

// The sizes of the product, as an argument of kernels; hopper.py writes the fields in this order.
struct PixelSizes {
    int pixels, filters;  // pixels and channels of y: the rows and columns of the product
    int d, h, w;          // the sizes of y
    int stride_d, stride_h, stride_w;
    int pad_d, pad_h, pad_w;  // elements before x
    int group_m;              // as in Tiles of gemm_hopper.cuh
};

// Loads x and w for one tile. w has the dimensions channels, taps, filters, or is a matrix.
struct PixelOperands {
    const TensorMap &x, &w;
    const PixelSizes& sizes;
    int image, d, h, w_at, column;

    __device__ __forceinline__ void begin(int2 origin) {
        image = origin.x / sizes.w;
        w_at = (origin.x - image * sizes.w) * sizes.stride_w - sizes.pad_w;
        if constexpr (DIMS > 1) {
            const int rows = image;
            image = rows / sizes.h;
            h = (rows - image * sizes.h) * sizes.stride_h - sizes.pad_h;
        }
        if constexpr (DIMS > 2) {
            const int planes = image;
            image = planes / sizes.d;
            d = (planes - image * sizes.d) * sizes.stride_d - sizes.pad_d;
        }
        column = origin.y;
    }
    static __device__ __forceinline__ int blocks(int step) { return min(BLOCKS, ALL_BLOCKS - step * BLOCKS); }
    static __device__ __forceinline__ u32 bytes(int step) { return blocks(step) * (TILE_M + TILE_N) * BLOCK_ROW_BYTES; }
    __device__ __forceinline__ void load_x(u32 stage, u32 full, int step) const {
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) {
            const int block = step * BLOCKS + i, tap = block / CHANNEL_BLOCKS;
            if (block >= ALL_BLOCKS) break;
            const int channel = block % CHANNEL_BLOCKS * K_BLOCK, right = tap % KERNEL_W * DILATION_W;
            const u32 to = stage + i * TILE_M * BLOCK_ROW_BYTES;
            if constexpr (DIMS == 1) {
                hopper::load_im2col(x, to, full, channel, w_at, image, right);
            } else if constexpr (DIMS == 2) {
                hopper::load_im2col(x, to, full, channel, w_at, h, image, right, tap / KERNEL_W * DILATION_H);
            } else {
                hopper::load_im2col(x, to, full, channel, w_at, h, d, image, right,
                                    tap / KERNEL_W % KERNEL_H * DILATION_H, tap / (KERNEL_W * KERNEL_H) * DILATION_D);
            }
        }
    }
    __device__ __forceinline__ void load_weights(u32 stage, u32 full, int step) const {
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) {
            const int block = step * BLOCKS + i;
            if (block >= ALL_BLOCKS) break;
            const int channel = block % CHANNEL_BLOCKS * K_BLOCK, tap = block / CHANNEL_BLOCKS;
            const u32 to = stage + X_BYTES + i * TILE_N * BLOCK_ROW_BYTES;
#if EIGHT_BITS  // w is a matrix of (taps, channels) x filters; beyond the channels, x has zeros
            load_columns(w, to, full, tap * CHANNELS + channel, column);
#else
            hopper::load(w, to, full, channel, tap, column);
#endif
        }
    }
};

}  // namespace
