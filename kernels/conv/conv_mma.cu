// Convolutions as matrix products by mma.sync, or by fma where they must be exact: for any filter, stride, dilation,
// padding and number of groups, of one to three spatial axes, at every alignment.
//
//   y = epilogue(conv(x, w))
//
// Rows of the product are the pixels of y, of all images; columns are the filters of one group; k runs over the taps of
// the filter and, within a tap, over the channels of the group. The tiles, their stages and the main loop are those of
// gemm_mma.cuh; this file gathers x. A thread copies chunks of one position along k for several pixels, so that it
// finds the tap and the channel once for all of them, and holds for each pixel the address and the coordinates that the
// first tap has. What lies in the padding becomes zero. A copy never crosses from tap to tap, because the channels of a
// group are whole copies.
//
// With SPLIT, the blocks along z each sum over a slice of k, and leave fp32 sums for epilogue.cu to add up.
//
// Macros:
//   DIMS               spatial axes: 1 (W), 2 (H, W) or 3 (D, H, W); sizes of others are 1 and not read
//   KERNEL_D, KERNEL_H, KERNEL_W, STRIDE_*, DILATION_*    of the filter, by axis
//   GROUPS, CHANNELS, FILTERS    groups; channels of x and of y in one group
//   X_NCHW             1: x is (N, C, spatial...), 0: (N, spatial..., C)
//   TRANSPOSED         1: w is (filters, taps, channels), 0: (taps, channels, filters)
//   EXACT              1: products by fma, 0: by mma.sync
//   SPLIT              1: as above
//   X_COPY, W_COPY     bytes of a copy to shared memory: 16, 8, 4, or 2; they divide the bytes of a group's channels of
//                      x, and of a row of w
//   GROUP_M            rows of tiles that are computed before the next columns, so that they find w in L2
//   MIN_BLOCKS         blocks that must fit on a multiprocessor: a bound on registers
//   WIDTH              elements of an access to y, the residual and the bias; divides FILTERS
//   and those of gemm_mma.cuh and of epilogue.cuh
#include "types.cuh"
#include "epilogue.cuh"
#include "gemm_mma.cuh"
#if EXACT
#include "conv_fma.cuh"
using Sums = FmaSums;
#else
using Sums = MmaSums;
#endif

constexpr int TAPS = KERNEL_D * KERNEL_H * KERNEL_W, K = TAPS * CHANNELS, COLUMNS = GROUPS * FILTERS;
constexpr int TILES_N = (FILTERS + TILE_N - 1) / TILE_N, TILES_K = (K + TILE_K - 1) / TILE_K;
constexpr bool HAS_DEPTH = DIMS > 2, HAS_HEIGHT = DIMS > 1;
constexpr int NOWHERE = -(1 << 30);  // a coordinate that no tap brings into the image

static_assert(FILTERS % WIDTH == 0 && TILE_N % WIDTH == 0, "a row of a tile is whole vectors");
static_assert(CHANNELS * ITEM % X_COPY == 0 && (!X_NCHW || X_COPY == ITEM), "a copy is of one tap");
static_assert((TRANSPOSED ? K : FILTERS) * ITEM % W_COPY == 0, "a row of w is whole copies");
static_assert((KERNEL_W - 1) * i64(DILATION_W) < -NOWHERE, "NOWHERE is far enough");

using CopyW = TileCopy<W_ROWS, W_ROW_BYTES, i64(TRANSPOSED ? K : COLUMNS) * ITEM, W_COPY, false, TF32 && !TRANSPOSED>;

// Along D, H and W; an axis that the convolution lacks is 0 and not read.
struct Position { int d, h, w; };

struct Shape {
    Position sizes, y_sizes, pads;  // of x, of y, and before the first element of x

    __device__ __forceinline__ i64 pixels() const {  // of an image of x
        return (HAS_DEPTH ? i64(sizes.d) : 1) * (HAS_HEIGHT ? sizes.h : 1) * sizes.w;
    }

    // The index of a pixel of x in its image.
    __device__ __forceinline__ i64 index(const Position& at) const {
        i64 found = at.w;
        if constexpr (HAS_HEIGHT) found += i64(at.h) * sizes.w;
        if constexpr (HAS_DEPTH) found += i64(at.d) * sizes.h * sizes.w;
        return found;
    }

    __device__ __forceinline__ bool has(const Position& at, const Position& tap) const {
        bool inside = unsigned(at.w + tap.w) < unsigned(sizes.w);
        if constexpr (HAS_HEIGHT) inside = inside && unsigned(at.h + tap.h) < unsigned(sizes.h);
        if constexpr (HAS_DEPTH) inside = inside && unsigned(at.d + tap.d) < unsigned(sizes.d);
        return inside;
    }
};

// How far tap `index` of a filter lies from the first one.
__device__ __forceinline__ Position tap_position(unsigned index) {
    Position at{};
    if constexpr (HAS_DEPTH) at.d = index / (KERNEL_W * KERNEL_H) * DILATION_D;
    if constexpr (HAS_HEIGHT) at.h = index / KERNEL_W % KERNEL_H * DILATION_H;
    at.w = index % KERNEL_W * DILATION_W;
    return at;
}

// The pixels of a tile, of which each thread copies every CHUNK_ROWS-th.
struct Pixels {
    static constexpr int CHUNKS = TILE_K_BYTES / 16, CHUNK_ROWS = THREADS / CHUNKS;
    static constexpr int EACH = (TILE_M + CHUNK_ROWS - 1) / CHUNK_ROWS;
    static_assert(THREADS % CHUNKS == 0, "a thread copies chunks of one position along k");

    const char* x;             // the group's first channel of the first pixel
    Shape shape;
    const char* corners[EACH]; // of each pixel, where the first tap reads; may lie outside x
    Position at[EACH];         // the coordinates there

    __device__ __forceinline__ static int chunk() { return threadIdx.x % CHUNKS; }
    __device__ __forceinline__ static int row(int i) { return threadIdx.x / CHUNKS + i * CHUNK_ROWS; }
    __device__ __forceinline__ static bool is_in_tile(int i) { return TILE_M % CHUNK_ROWS == 0 || row(i) < TILE_M; }

    // The bytes from the first channel of an image's first pixel to that of another pixel.
    __device__ __forceinline__ i64 offset(const Position& pixel) const {
        return shape.index(pixel) * (X_NCHW ? 1 : GROUPS * CHANNELS) * ITEM;
    }

    __device__ __forceinline__ Pixels(const T* whole, const Shape& given, int group, int first, int count)
        : shape(given) {
        const i64 volume = shape.pixels();
        x = reinterpret_cast<const char*>(whole + i64(group) * CHANNELS * (X_NCHW ? volume : 1));
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            unsigned rest = first + row(i);
            const bool exists = rest < unsigned(count);
            at[i] = {};
            at[i].w = int(rest % shape.y_sizes.w) * STRIDE_W - shape.pads.w;
            rest /= shape.y_sizes.w;
            if constexpr (HAS_HEIGHT) {
                at[i].h = int(rest % shape.y_sizes.h) * STRIDE_H - shape.pads.h;
                rest /= shape.y_sizes.h;
            }
            if constexpr (HAS_DEPTH) {
                at[i].d = int(rest % shape.y_sizes.d) * STRIDE_D - shape.pads.d;
                rest /= shape.y_sizes.d;
            }
            corners[i] = x + rest * volume * (GROUPS * CHANNELS * ITEM) + offset(at[i]);
            if (!exists) at[i].w = NOWHERE;
        }
    }
};

// Copies x's share of a stage.
struct PixelCopy {
    static constexpr bool THROUGH_REGISTERS = !is_asynchronous(X_COPY);
    unsigned registers[THROUGH_REGISTERS ? Pixels::EACH : 1][4];

    // A piece of X_COPY bytes along k: the tap and the channel where it begins.
    struct Piece {
        Position tap;
        i64 offset;   // from the corner of a pixel
        bool exists;  // k goes that far

        __device__ __forceinline__ Piece(const Pixels& pixels, int k) {
            const unsigned channel = unsigned(k) % CHANNELS;
            tap = tap_position(unsigned(k) / CHANNELS);
            offset = pixels.offset(tap) + channel * (X_NCHW ? pixels.shape.pixels() : 1) * ITEM;
            exists = K % TILE_K == 0 || k < K;
        }
    };

    __device__ __forceinline__ void begin(const Pixels& pixels, unsigned to, int k) {
        constexpr int PIECES = 16 / X_COPY;
        const int first = k + Pixels::chunk() * (16 / ITEM);
        if constexpr (THROUGH_REGISTERS) {
#pragma unroll
            for (int i = 0; i < Pixels::EACH; ++i) {
                const auto piece = [&](int at) { return Piece(pixels, first + at / ITEM); };
                fetch_chunk<X_COPY>(
                    registers[i],
                    [&](int at) {
                        const Piece found = piece(at);
                        return found.exists && pixels.shape.has(pixels.at[i], found.tap);
                    },
                    [&](int at) { return pixels.corners[i] + piece(at).offset; });
            }
        } else {
#pragma unroll
            for (int part = 0; part < PIECES; ++part) {
                const Piece piece(pixels, first + part * (X_COPY / ITEM));
#pragma unroll
                for (int i = 0; i < Pixels::EACH; ++i) {
                    if (!Pixels::is_in_tile(i)) continue;
                    const bool inside = piece.exists && pixels.shape.has(pixels.at[i], piece.tap);
                    const unsigned target = to + swizzled_offset<TILE_K_BYTES>(Pixels::row(i), Pixels::chunk());
                    copy_async<X_COPY>(target + part * X_COPY, inside ? pixels.corners[i] + piece.offset : pixels.x,
                                       inside ? X_COPY : 0);
                }
            }
        }
    }

    __device__ __forceinline__ void end(unsigned to) const {
        if constexpr (THROUGH_REGISTERS) {
#pragma unroll
            for (int i = 0; i < Pixels::EACH; ++i)
                if (Pixels::is_in_tile(i))
                    store_chunk(to + swizzled_offset<TILE_K_BYTES>(Pixels::row(i), Pixels::chunk()), registers[i]);
        }
    }
};

struct Operands {
    struct Stage {
        PixelCopy x;
        CopyW w;
    };
    // Registers do not hold the elements of several stages.
    static constexpr int AHEAD = is_asynchronous(16) && X_COPY == 16 && W_COPY == 16 ? STAGES : 1;

    const Pixels& pixels;
    const char* w;  // from the block's first column on
    int columns;    // of the group that are left from there on

    __device__ __forceinline__ void begin(Stage& stage, unsigned to, int k) const {
        stage.x.begin(pixels, to, k);
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
conv_mma(const T* x, const T* w, const T* bias, const T* extra, const T* scale, const T* residual, T* y, f32* partial,
         float alpha, float beta, int pixels, int d, int h, int width, int y_d, int y_h, int y_w, int pad_d, int pad_h,
         int pad_w) {
    extern __shared__ __align__(128) char memory[];
    constexpr int ACROSS = GROUPS * TILES_N, SIDE = GROUP_M * ACROSS;
    const int tile = blockIdx.x, tiles_m = (pixels + TILE_M - 1) / TILE_M;
    const int first = tile / SIDE * GROUP_M, high = min(tiles_m - first, GROUP_M);
    const int row = (first + tile % SIDE % high) * TILE_M, across = tile % SIDE / high;
    const int group = across / TILES_N, column = across % TILES_N * TILE_N, filter = group * FILTERS + column;

    release_successor();
    const Pixels of_tile(x, Shape{{d, h, width}, {y_d, y_h, y_w}, {pad_d, pad_h, pad_w}}, group, row, pixels);
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
    const Epilogue epilogue{bias, extra, scale, residual, y, alpha, beta};
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
