// Transposed convolutions as matrix products by mma.sync, or by fma if products must be exact: for any filter, stride,
// dilation, padding, number of groups and alignment, with one to three spatial axes.
//
//   y = epilogue(conv_transpose(x, w))
//
// The pixels of y fall into phases by their coordinates modulo the stride, and all pixels of a phase read x by the same
// taps of the filter (conv_phases.cuh). So a phase is a convolution of x at unit stride with every STEP-th tap, and its
// results lie STRIDE apart in y. Each phase is a matrix product:
//   - Rows of the product are the positions of a phase in all images. All phases have equally many positions; results
//     at positions beyond the end of y are not stored.
//   - Columns are the filters of one group.
//   - k runs over the taps of the phase and, within a tap, over the channels of the group.
// Tap j of a phase is tap first + j * STEP of the filter, so w is read without a rearranged copy. Blocks that compute
// the same rows for different phases run at about the same time, so that they find x in L2.
//
// SHUFFLED: the filter is as large as the stride, and there is no padding. Then each phase has one tap, and all phases
// read the same x. So there is one product x w for all phases, where w is read as a matrix (channels, taps * filters)
// without a copy. Columns of the product are scattered to the pixels of their phases. Columns that belong to one row of
// y are neighbours in w and also in y.
//
// Elementwise operators that are fused into the node run in the epilogue; each access then belongs to one pixel of y.
//
// Tiles, stages and the main loop are those of gemm_mma.cuh, and x is gathered as conv_gather.cuh says. With SPLIT,
// each block along z sums over a slice of k and stores fp32 sums in the layout of y, which epilogue.cu adds up.
//
// Macros:
//   KERNEL_D, KERNEL_H, KERNEL_W, STRIDE_*, DILATION_*    sizes, strides and dilations of the filter, by axis
//   FILTERS            channels of y in one group; w is (GROUPS * CHANNELS, taps, FILTERS)
//   SHUFFLED, SPLIT    1: as above
//   EXACT              1: products by fma, 0: by mma.sync
//   W_COPY             bytes of a copy of w to shared memory: 16, 8, 4 or 2; divides the bytes of a row of w
//   GROUP_M            rows of tiles per group; groups are computed one after the other
//   MIN_BLOCKS         blocks that must fit on a multiprocessor: a bound on registers
//   WIDTH              elements of an access to y and the residual; divides FILTERS, or if SHUFFLED, KERNEL_W * FILTERS
//   and the macros of conv_gather.cuh, of gemm_mma.cuh (TRANSPOSED is 0) and of epilogue.cuh
#include "types.cuh"
#include "epilogue.cuh"
#include "gemm_mma.cuh"
#include "conv_gather.cuh"
#include "conv_phases.cuh"
#if EXACT
#include "conv_fma.cuh"
using Sums = FmaSums;
#else
using Sums = MmaSums;
#endif

constexpr int TAPS = KERNEL_D * KERNEL_H * KERNEL_W, COLUMNS = GROUPS * FILTERS;  // COLUMNS: channels of y
constexpr int PHASES = SHUFFLED ? 1 : STRIDE_D * STRIDE_H * STRIDE_W;
constexpr int ROW = KERNEL_W * FILTERS;                    // with SHUFFLED, columns that are contiguous in y
constexpr int WIDE = SHUFFLED ? TAPS * FILTERS : FILTERS;  // columns of a group's product
constexpr int TILES_N = (WIDE + TILE_N - 1) / TILE_N;
constexpr int SUMS_BYTES = 4 * TILE_M * SUMS_PITCH;
constexpr i64 LINE = i64(TAPS) * FILTERS * ITEM;  // bytes of w from one channel of x to the next

static_assert(!TRANSPOSED && !X_NCHW, "w has a row for each channel, and x is channels-last");
static_assert((SHUFFLED ? ROW : FILTERS) % WIDTH == 0 && TILE_N % WIDTH == 0, "a row of a tile is whole vectors");
static_assert(WIDE * ITEM % W_COPY == 0, "a row of w is whole copies");
static_assert(!SHUFFLED || GROUPS == 1, "the columns of a pixel are neighbours");
static_assert(!HAS_PROGRAM || (!SPLIT && FILTERS % WIDTH == 0), "a program reads what belongs to one pixel, once");

using CopyW = TileCopy<W_ROWS, W_ROW_BYTES, LINE, W_COPY, false, TF32>;

// The taps of a phase.
struct PhaseTaps {
    static constexpr bool WHOLE = CHANNELS % TILE_K == 0;
    AxisTaps<KERNEL_D, STRIDE_D, DILATION_D> d;
    AxisTaps<KERNEL_H, STRIDE_H, DILATION_H> h;
    AxisTaps<KERNEL_W, STRIDE_W, DILATION_W> w;

    __device__ __forceinline__ PhaseTaps(const Position& phase, const Position& pads)
        : d(phase.d, pads.d), h(phase.h, pads.h), w(phase.w, pads.w) {}

    __device__ __forceinline__ int k() const { return SHUFFLED ? CHANNELS : d.count * h.count * w.count * CHANNELS; }

    __device__ __forceinline__ Position index(unsigned tap) const {
        Position at{};
        if constexpr (!SHUFFLED) at.w = tap % unsigned(w.count);
        if constexpr (!SHUFFLED && HAS_HEIGHT) {
            tap /= unsigned(w.count);
            at.h = tap % unsigned(h.count);
            if constexpr (HAS_DEPTH) at.d = tap / unsigned(h.count);
        }
        return at;
    }

    // Returns the offset in x from the phase's first tap to its tap number `tap`.
    __device__ __forceinline__ Position operator()(unsigned tap) const {
        const Position at = index(tap);
        return {-at.d * decltype(d)::SHIFT, -at.h * decltype(h)::SHIFT, -at.w * decltype(w)::SHIFT};
    }

    // Returns the bytes of w from the filter's first tap to a tap of the phase.
    __device__ __forceinline__ i64 offset(unsigned tap) const {
        const Position at = index(tap);
        return i64((d.tap(at.d) * KERNEL_H + h.tap(at.h)) * KERNEL_W + w.tap(at.w)) * (FILTERS * ITEM);
    }
};

// Copies the part of w that belongs to one stage.
struct WeightCopy {
    CopyW tile;

    // `w` points to the weight of the block's first column, for the first tap and the group's first channel. From the
    // block's first column on, a row of w has `bytes` bytes.
    __device__ __forceinline__ void begin(const PhaseTaps& taps, unsigned to, const char* w, int k, i64 bytes) {
        if constexpr (SHUFFLED) {
            tile.begin(to, w + k * LINE, CHANNELS - k, bytes);
        } else if constexpr (PhaseTaps::WHOLE) {
            tile.begin(to, w + taps.offset(unsigned(k) / CHANNELS) + k % CHANNELS * LINE, W_ROWS, bytes);
        } else {
            CopyW::each([&](int i, int row, int chunk) {
                const unsigned at = k + row;
                const i64 left = int(at) < taps.k() ? bytes - chunk * 16 : 0;
                const char* source = w + taps.offset(at / CHANNELS) + at % CHANNELS * LINE + chunk * 16;
                if constexpr (CopyW::THROUGH_REGISTERS) {
                    CopyW::fetch(tile.registers[i], source, left);
                } else {
                    const unsigned target = to + weight_offset<W_ROW_BYTES, TF32>(row, chunk);
#pragma unroll
                    for (int part = 0; part < 16; part += W_COPY)
                        copy_async<W_COPY>(target + part, part < left ? source + part : w, part < left ? W_COPY : 0);
                }
            });
        }
    }
};

struct Operands {
    struct Stage {
        PixelCopy<PhaseTaps> x;
        WeightCopy w;
    };
    // The number of stages that are loaded ahead. Copies of fewer than 16 bytes can go through registers, which hold
    // the elements of only one stage.
    static constexpr int AHEAD = is_asynchronous(16) && X_COPY == 16 && W_COPY == 16 ? STAGES : 1;

    const Pixels& pixels;
    const PhaseTaps& taps;
    const char* w;  // address of the weight for the group's first channel and the block's first column
    int columns;    // number of the group's columns from the block's first column on

    __device__ __forceinline__ void begin(Stage& stage, unsigned to, int k) const {
        stage.x.begin(pixels, taps, to, k);
        stage.w.begin(taps, to + X_BYTES, w, k, i64(columns) * ITEM);
    }
    __device__ __forceinline__ static void end(const Stage& stage, unsigned to) {
        stage.x.end(to);
        stage.w.tile.end(to + X_BYTES);
    }
};

// Returns the pixel of y at a position of a phase; -1 if it lies outside of y.
__device__ __forceinline__ int pixel_of(unsigned position, const Position& counts, const Position& y,
                                        const Position& phase) {
    const int w = position % counts.w * STRIDE_W + phase.w;
    unsigned rest = position / counts.w;
    bool inside = w < y.w;
    int found = w, pitch = y.w;
    if constexpr (HAS_HEIGHT) {
        const int h = rest % counts.h * STRIDE_H + phase.h;
        rest /= counts.h;
        inside = inside && h < y.h;
        found += h * pitch;
        pitch *= y.h;
    }
    if constexpr (HAS_DEPTH) {
        const int d = rest % counts.d * STRIDE_D + phase.d;
        rest /= counts.d;
        inside = inside && d < y.d;
        found += d * pitch;
        pitch *= y.d;
    }
    return inside ? found + int(rest) * pitch : -1;
}

// Applies the epilogue to WIDTH neighbouring sums and stores them, or writes the sums to `partial`. `pixel` is the
// pixel of y at the first column of this row of the product.
__device__ __forceinline__ void finish(const Epilogue& epilogue, f32* partial, const float* sum, int pixel, int group,
                                       int column, const Position& y) {
    int filter = column;
    if constexpr (SHUFFLED) {
        const int row = column / ROW;
        pixel += (row / KERNEL_H * y.h + row % KERNEL_H) * y.w;
        filter = column % ROW;
    }
    if constexpr (HAS_PROGRAM) {
        epilogue.finish<WIDTH>(sum, 0, pixel + filter / FILTERS, group * FILTERS + filter % FILTERS, COLUMNS);
        return;
    }
    const i64 at = i64(pixel) * COLUMNS + group * FILTERS + filter;
    float values[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) values[i] = sum[i];
    if constexpr (SPLIT) {
        store<false>(partial + at, values);
    } else {
        EpilogueLoads<WIDTH, FILTERS % WIDTH != 0> loads;
        epilogue.load_columns(loads, group * FILTERS + filter % FILTERS, COLUMNS);
        epilogue.load_residual(loads, at);
        epilogue.finish<false>(at, loads, values, values);
    }
}

// Calls finish for all sums of a tile; `pixels` has the pixel of y for each row.
__device__ __forceinline__ void finish_tile(const Epilogue& epilogue, f32* partial, const float* sums,
                                            const int* pixels, int group, int column, const Position& y) {
    constexpr int VECTORS = TILE_N / WIDTH;
#pragma unroll 4
    for (int at = threadIdx.x; at < TILE_M * VECTORS; at += THREADS) {
        const int i = at / VECTORS, j = at % VECTORS * WIDTH, pixel = pixels[i];
        if (column + j < WIDE && pixel >= 0)
            finish(epilogue, partial, sums + i * SUMS_PITCH + j, pixel, group, column + j, y);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    conv_transpose_mma(const T* x, const T* w, EpilogueOperands epilogue_operands, ConvSizes sizes,
                       f32* partial PROGRAM_PARAMETERS) {
    extern __shared__ __align__(128) char memory[];
    const Position counts{(sizes.y.d + STRIDE_D - 1) / STRIDE_D, (sizes.y.h + STRIDE_H - 1) / STRIDE_H,
                          (sizes.y.w + STRIDE_W - 1) / STRIDE_W};
    const int positions = sizes.images * counts.d * counts.h * counts.w;
    constexpr int ACROSS = PHASES * GROUPS * TILES_N, SIDE = GROUP_M * ACROSS;
    const int tile = blockIdx.x, tiles_m = (positions + TILE_M - 1) / TILE_M;
    const int first = tile / SIDE * GROUP_M, high = min(tiles_m - first, GROUP_M);
    const int row = (first + tile % SIDE % high) * TILE_M, across = tile % SIDE / high;
    const int column = across % TILES_N * TILE_N, group = across / TILES_N % GROUPS, index = across / TILES_N / GROUPS;
    const Position phase{index / (STRIDE_W * STRIDE_H), index / STRIDE_W % STRIDE_H, index % STRIDE_W};

    release_successor();
    const PhaseTaps taps(phase, sizes.pads);
    const Pixels of_tile(x, Shape{sizes.x, counts, {-taps.d.from, -taps.h.from, -taps.w.from}}, {1, 1, 1}, group, row,
                         positions);
    const char* weights = reinterpret_cast<const char*>(w + column) + i64(group) * CHANNELS * LINE;
    const Operands operands{of_tile, taps, weights, WIDE - column};
    int from = 0, to = (taps.k() + TILE_K - 1) / TILE_K;
    if constexpr (SPLIT) {
        from = i64(to) * blockIdx.z / gridDim.z;
        to = i64(to) * (blockIdx.z + 1) / gridDim.z;
        partial += blockIdx.z * (i64(sizes.pixels()) * COLUMNS);
    }
    wait_for_predecessor();
    Sums sums = {};
    multiply_tiles(operands, shared_address(memory), from, to, sums);

    __syncthreads();  // the sums overwrite the stages, and the pixel of each row lies after them
    float* staged = reinterpret_cast<float*>(memory);
    int* pixels = reinterpret_cast<int*>(memory + SUMS_BYTES);
    sums.store(staged);
    for (int i = threadIdx.x; i < TILE_M; i += THREADS)
        pixels[i] = row + i < positions ? pixel_of(row + i, counts, sizes.y, phase) : -1;
    __syncthreads();
    const Epilogue epilogue{epilogue_operands, {PROGRAM_ARGUMENTS}};
    finish_tile(epilogue, partial, staged, pixels, group, column, sizes.y);
}
