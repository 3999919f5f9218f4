// The operands and results of a transposed convolution for the kernels of gemm_hopper_tiles.cuh. Along each axis, the
// sizes of the filter and of y are multiples of the stride, so that all phases have equally many taps and equally many
// pixels.
//
// The rows of the product are the positions of a phase, images first; its columns are the filters of all phases,
// FILTERS for each phase. A tile belongs to one phase. k counts the taps of a phase, and within a tap the channels of
// x. A block of k belongs to one tap: TMA loads TILE_M pixels of x in im2col mode. The walk of TMA over x begins at the
// first pixel that any phase reads for its first position. The offset in the instruction is the distance from this
// pixel to the pixel of the tap. Channels beyond CHANNELS are zeros.
//
// y and the residual are tensors (images * positions along H, STRIDE_H, positions along W, STRIDE_W * FILTERS). TMA
// copies a subtile of 64 positions in boxes that end where rows of positions end.
//
// Macros, besides those of gemm_hopper.cuh, where TRANSPOSED is 0:
//   CHANNELS, FILTERS   channels of x and of y; w is (CHANNELS, taps, FILTERS)
//   PERIOD              the number of filters after which column vectors repeat: FILTERS, unless neighbouring pixels
//                       of y along W count as one pixel. Then it is the number of filters of one of these pixels
//   KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W, PAD_H, PAD_W    PAD: rows and columns that are cut off before y
#pragma once
#include "gemm_hopper_tiles.cuh"

namespace {

constexpr int CHANNEL_BLOCKS = (CHANNELS + TILE_K - 1) / TILE_K;
constexpr int TAPS_H = KERNEL_H / STRIDE_H, TAPS_W = KERNEL_W / STRIDE_W;  // taps per phase
constexpr int ALL_BLOCKS = TAPS_H * TAPS_W * CHANNEL_BLOCKS;
// Row and column of the pixel of x at which TMA begins for an image's first position.
constexpr int FROM_H = PAD_H / STRIDE_H - (TAPS_H - 1), FROM_W = PAD_W / STRIDE_W - (TAPS_W - 1);

static_assert(KERNEL_H % STRIDE_H == 0 && KERNEL_W % STRIDE_W == 0, "phases have equally many taps");
static_assert(FILTERS % PERIOD == 0 && PERIOD % 2 == 0, "pairs of column vectors");
static_assert(FILTERS % TILE_N == 0 && SUBTILE_N == 64 && K_BLOCK == TILE_K && !TRANSPOSED, "see above");

// The sizes of the product, as an argument of the kernel; hopper.py writes the fields in this order.
struct PhaseSizes {
    int positions, columns;  // the rows and columns of the product
    int rows, row;           // positions of a phase along H and along W
    int box;                 // positions per box, a divisor of 64
    int group_m;             // as in Tiles of gemm_hopper.cuh
};

// Loads x and w for one tile. w has the dimensions filters, taps, channels.
struct PhaseOperands {
    const TensorMap &x, &w;
    int rows, row;  // positions of a phase along H and along W
    int image, h, w_at, column;
    int ahead_h, ahead_w;  // the phase's first pixel of y, counted from the start of the elements that PAD cuts off

    __device__ __forceinline__ void begin(int2 origin) {
        const int above = origin.x / row, phase = origin.y / FILTERS;
        image = above / rows;
        h = above - image * rows + FROM_H;
        w_at = origin.x - above * row + FROM_W;
        column = origin.y - phase * FILTERS;
        ahead_h = phase / STRIDE_W + PAD_H;
        ahead_w = phase % STRIDE_W + PAD_W;
    }
    static __device__ __forceinline__ u32 bytes(int) { return STAGE_BYTES; }

    __device__ __forceinline__ void load_x(u32 stage, u32 full, int step) const {
        const int tap = step / CHANNEL_BLOCKS;
        hopper::load_im2col(x, stage, full, step % CHANNEL_BLOCKS * TILE_K, w_at, h, image,
                            ahead_w / STRIDE_W - tap % TAPS_W - FROM_W, ahead_h / STRIDE_H - tap / TAPS_W - FROM_H);
    }
    __device__ __forceinline__ void load_weights(u32 stage, u32 full, int step) const {
        const int tap = step / CHANNEL_BLOCKS;
        const int r = ahead_h % STRIDE_H + tap / TAPS_W * STRIDE_H, s = ahead_w % STRIDE_W + tap % TAPS_W * STRIDE_W;
#pragma unroll
        for (int i = 0; i < TILE_N / 64; ++i)
            hopper::load(w, stage + X_BYTES + i * TILE_K * ROW_BYTES, full, column + 64 * i, r * KERNEL_W + s,
                         step % CHANNEL_BLOCKS * TILE_K);
    }
};

// The coordinates of subtiles of y and of the residual.
struct PhasePlace {
    int row, box;  // positions along W, and positions per box, a divisor of 64

    template <class Move>
    __device__ __forceinline__ void each_box(int2 origin, Move move) const {
        const int phase = origin.y / FILTERS, column = phase % STRIDE_W * FILTERS + origin.y % FILTERS;
        for (int i = 0; i < 64; i += box)
            move(i * SUBTILE_ROW_BYTES, column, (origin.x + i) % row, phase / STRIDE_W, (origin.x + i) / row);
    }
    __device__ __forceinline__ void load(const TensorMap& from, u32 to, u32 full, int2 origin) const {
        each_box(origin, [&](int bytes, int c, int w, int phase, int h) {
            hopper::load(from, to + bytes, full, c, w, phase, h);
        });
    }
    __device__ __forceinline__ void store(const TensorMap& to, u32 from, int2 origin) const {
        each_box(origin,
                 [&](int bytes, int c, int w, int phase, int h) { hopper::store(to, from + bytes, c, w, phase, h); });
    }
    static __device__ __forceinline__ int column(int column) { return column % PERIOD; }
};

}  // namespace
