// Convolutions as matrix products by mma.sync, or by fma if products must be exact: for any filter, stride, dilation,
// padding, number of groups and alignment, with one to three spatial axes.
//
//   y = epilogue(conv(x, w))
//
// Rows of the product are the pixels of y, of all images; columns are the filters of one group; k runs over the taps of
// the filter and, within a tap, over the channels of the group. The tiles, their stages and the main loop are those of
// gemm_mma.cuh, and x is gathered as conv_gather.cuh says.
//
// With SPLIT, each block along z sums over a slice of k and stores fp32 sums, which epilogue.cu adds up.
//
// Macros:
//   KERNEL_D, KERNEL_H, KERNEL_W, STRIDE_*, DILATION_*    sizes, strides and dilations of the filter, by axis
//   FILTERS            channels of y in one group
//   TRANSPOSED         1: w is (filters, taps, channels), 0: (taps, channels, filters)
//   EXACT              1: products by fma, 0: by mma.sync
//   SPLIT              1: as above
//   W_COPY             bytes of a copy of w to shared memory: 16, 8, 4, or 2; divides the bytes of a row of w
//   GROUP_M            rows of tiles per group; groups are computed one after the other, so that tiles find w in L2
//   MIN_BLOCKS         blocks that must fit on a multiprocessor: a bound on registers
//   WIDTH              elements of an access to y, the residual and the bias; divides FILTERS
//   and those of conv_gather.cuh, of gemm_mma.cuh and of epilogue.cuh
#include "types.cuh"
#include "epilogue.cuh"
#include "gemm_mma.cuh"
#include "conv_gather.cuh"
#if EXACT
#include "conv_fma.cuh"
using Sums = FmaSums;
#else
using Sums = MmaSums;
#endif

constexpr int TAPS = KERNEL_D * KERNEL_H * KERNEL_W, K = TAPS * CHANNELS, COLUMNS = GROUPS * FILTERS;
constexpr int TILES_N = (FILTERS + TILE_N - 1) / TILE_N, TILES_K = (K + TILE_K - 1) / TILE_K;

static_assert(!(SPLIT && HAS_PROGRAM), "epilogue.cu has no program");
static_assert(FILTERS % WIDTH == 0 && TILE_N % WIDTH == 0, "a row of a tile is whole vectors");
static_assert((TRANSPOSED ? K : FILTERS) * ITEM % W_COPY == 0, "a row of w is whole copies");
static_assert((KERNEL_W - 1) * i64(DILATION_W) < -NOWHERE, "NOWHERE is far enough");

using CopyW = TileCopy<W_ROWS, W_ROW_BYTES, i64(TRANSPOSED ? K : COLUMNS) * ITEM, W_COPY, false, TF32 && !TRANSPOSED>;

// The offset of each tap of the filter from the first tap.
struct FilterTaps {
    static constexpr bool WHOLE = K % TILE_K == 0;
    __device__ __forceinline__ static int k() { return K; }
    __device__ __forceinline__ Position operator()(unsigned index) const {
        Position at{};
        if constexpr (HAS_DEPTH) at.d = index / (KERNEL_W * KERNEL_H) * DILATION_D;
        if constexpr (HAS_HEIGHT) at.h = index / KERNEL_W % KERNEL_H * DILATION_H;
        at.w = index % KERNEL_W * DILATION_W;
        return at;
    }
};

struct Operands {
    struct Stage {
        PixelCopy<FilterTaps> x;
        CopyW w;
    };
    // The number of stages that are loaded ahead. Copies of fewer than 16 bytes can go through registers, which hold
    // the elements of only one stage.
    static constexpr int AHEAD = is_asynchronous(16) && X_COPY == 16 && W_COPY == 16 ? STAGES : 1;

    const Pixels& pixels;
    const char* w;  // address of the block's first column
    int columns;    // number of the group's columns from the block's first column on

    __device__ __forceinline__ void begin(Stage& stage, unsigned to, int k) const {
        stage.x.begin(pixels, FilterTaps{}, to, k);
        const i64 from = i64(k) * ITEM;
        if constexpr (TRANSPOSED) stage.w.begin(to + X_BYTES, w + from, columns, K * ITEM - from);
        else stage.w.begin(to + X_BYTES, w + from * COLUMNS, K - k, i64(columns) * ITEM);
    }

    __device__ __forceinline__ static void end(const Stage& stage, unsigned to) {
        stage.x.end(to);
        stage.w.end(to + X_BYTES);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    conv_mma(const T* x, const T* w, EpilogueOperands epilogue_operands, ConvSizes sizes,
             f32* partial PROGRAM_PARAMETERS) {
    extern __shared__ __align__(128) char memory[];
    constexpr int ACROSS = GROUPS * TILES_N, SIDE = GROUP_M * ACROSS;
    const int pixels = sizes.pixels(), tile = blockIdx.x, tiles_m = (pixels + TILE_M - 1) / TILE_M;
    const int first = tile / SIDE * GROUP_M, high = min(tiles_m - first, GROUP_M);
    const int row = (first + tile % SIDE % high) * TILE_M, across = tile % SIDE / high;
    const int group = across / TILES_N, column = across % TILES_N * TILE_N, filter = group * FILTERS + column;

    release_successor();
    const Pixels of_tile(x, Shape{sizes.x, sizes.y, sizes.pads}, {STRIDE_D, STRIDE_H, STRIDE_W}, group, row, pixels);
    const char* weights = reinterpret_cast<const char*>(w + (TRANSPOSED ? i64(filter) * K : filter));
    const Operands operands{of_tile, weights, FILTERS - column};
    int from = 0, to = TILES_K;
    if constexpr (SPLIT) {
        from = i64(TILES_K) * blockIdx.z / gridDim.z;
        to = i64(TILES_K) * (blockIdx.z + 1) / gridDim.z;
    }
    wait_for_predecessor();
    Sums sums = {};
    multiply_tiles(operands, shared_address(memory), from, to, sums);

    __syncthreads();  // the sums overwrite the stages
    float* staged = reinterpret_cast<float*>(memory);
    sums.store(staged);
    __syncthreads();
    const Epilogue epilogue{epilogue_operands, {PROGRAM_ARGUMENTS}};
    constexpr int VECTORS = TILE_N / WIDTH;
    const int last = min(pixels - row, TILE_M) * VECTORS;
#pragma unroll 4
    for (int at = threadIdx.x; at < last; at += THREADS) {
        const int i = at / VECTORS, j = at % VECTORS * WIDTH;
        if (column + j >= FILTERS) continue;
        const float* sum = staged + i * SUMS_PITCH + j;
        if constexpr (SPLIT) {
            float values[WIDTH];
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) values[k] = sum[k];
            store<false>(partial + (i64(blockIdx.z) * pixels + row + i) * COLUMNS + filter + j, values);
        } else {
            epilogue.finish<WIDTH>(sum, 0, row + i, filter + j, COLUMNS);
        }
    }
}
