// Grouped convolutions of channels-last tensors with few channels per group, by mma.sync from sm_80 on: fp16, bf16, and
// fp32 rounded to TF32. One group is one matrix product, of pixels x (taps, channels) with (taps, channels) x filters.
//
//   y = epilogue(conv(x, w))    one or two spatial axes
//
// A block has BLOCK_GROUPS groups and computes tiles of TP x TQ pixels one after the other:
//   1. The part of x that a tile reads, its patch, is copied to shared memory by cp.async, while the previous tile
//      is computed. Elements outside x are zero. Each tap reads the patch at another offset, so that ldmatrix reads
//      fragments straight from the patch: chunks of 16 bytes are neighbouring channels of a pixel at one tap.
//   2. Each warp has WARP_GROUPS groups and 32 pixels at a time. Weights are in its registers, or in shared memory.
//   3. The warp applies the epilogue in registers, and stores the results through its own part of shared memory
//      (conv_pixels.cuh).
//
// If a group's channels do not fill whole chunks, or the number of its filters is not a multiple of 8, several groups
// of the model are one group of this kernel (MERGED), with weights of zero between them. An infinity in one of the
// merged groups then makes NaN in the others.
//
// Macros:
//   CHANNELS, FILTERS    channels of x and of y, of all groups
//   GROUP_CHANNELS, GROUP_FILTERS    channels of x and of y, of one group of the model
//   MERGED               groups of the model that are one group of this kernel
//   KH, KW, SH, SW, DH, DW    filter sizes, strides, dilations
//   BLOCK_GROUPS, WARP_GROUPS    (merged) groups of a block and of a warp; BLOCK_GROUPS divides all groups
//   WARPS_M              warps along pixels; there are BLOCK_GROUPS / WARP_GROUPS along groups
//   TP, TQ               pixels of a tile along height and width
//   HELD                 1: weights are kept in registers, 0: in shared memory
//   WIDTH                elements of an access to y: divides FILTERS and 16 bytes
//   W_HWIO               1: w is (KH, KW, GROUP_CHANNELS, FILTERS); 0: (FILTERS, KH, KW, GROUP_CHANNELS)
//   WEIGHTS_CONSTANT     1: no kernel writes w
//   MIN_BLOCKS           blocks that must fit on a multiprocessor: a bound on registers
//   and those of epilogue.cuh
#include "types.cuh"
#include "epilogue.cuh"
#include "gemm_multiply.cuh"
#include "conv_pixels.cuh"

constexpr int WARPS_G = BLOCK_GROUPS / WARP_GROUPS, THREADS = 32 * WARPS_G * WARPS_M;
constexpr int EACH = 4 / ITEM, CHUNK = 16 / ITEM;                              // elements of a word and of a chunk
constexpr int DEPTH = GROUP_CHANNELS * MERGED, WIDE = GROUP_FILTERS * MERGED;  // channels and filters of a merged group
constexpr int TAP_CHUNKS = DEPTH / CHUNK, CHUNKS = KH * KW * TAP_CHUNKS, STEPS = (CHUNKS + 1) / 2;
constexpr int TILES_N = WIDE / 8;  // mma tiles of 8 filters of a group
constexpr int M_TILES = 2;         // mma tiles of 16 pixels that a warp computes at a time
constexpr int ROWS = (TP - 1) * SH + (KH - 1) * DH + 1, COLUMNS = (TQ - 1) * SW + (KW - 1) * DW + 1;
constexpr int BLOCK_CHUNKS = BLOCK_GROUPS * TAP_CHUNKS;  // chunks per pixel of the patch
constexpr int PITCH = (BLOCK_CHUNKS | 1) * 16;  // bytes per pixel: eight pixels fall into different banks if SW is 1
constexpr int PATCH = ROWS * COLUMNS * PITCH;
constexpr int WEIGHT_WORDS = BLOCK_GROUPS * STEPS * TILES_N * 64;

static_assert(DEPTH % CHUNK == 0 && WIDE % 8 == 0 && BLOCK_GROUPS % WARP_GROUPS == 0, "see above");
static_assert(CHANNELS % (BLOCK_GROUPS * DEPTH) == 0 && FILTERS % WIDTH == 0, "see above");

// ---- x -> shared memory ------------------------------------------------------------------------------------------

struct Image {
    const T* x;  // address of the block's first channel
    int height, width, pad_h, pad_w, tiles_h, tiles_w;

    // Starts the asynchronous copies of the patch of tile `tile`.
    __device__ __forceinline__ void begin(char* to, int tile) const {
        const int image = tile / (tiles_h * tiles_w), rest = tile % (tiles_h * tiles_w);
        const int top = rest / tiles_w * (TP * SH) - pad_h, left = rest % tiles_w * (TQ * SW) - pad_w;
        const T* from = x + i64(image) * height * width * CHANNELS;
#pragma unroll 4
        for (int i = threadIdx.x; i < ROWS * COLUMNS * BLOCK_CHUNKS; i += THREADS) {
            const int pixel = i / BLOCK_CHUNKS, chunk = i % BLOCK_CHUNKS;
            const int row = top + pixel / COLUMNS, column = left + pixel % COLUMNS;
            char* target = to + pixel * PITCH + chunk * 16;
            if (unsigned(row) < unsigned(height) && unsigned(column) < unsigned(width)) {
                const T* source = from + (i64(row) * width + column) * CHANNELS + chunk * CHUNK;
                copy_bytes<16>(target, reinterpret_cast<const char*>(source));
            } else {
                *reinterpret_cast<uint4*>(target) = uint4{0, 0, 0, 0};
            }
        }
    }
};

// ---- weights -----------------------------------------------------------------------------------------------------

// Stores the block's weights in the order in which the mma reads them: each lane has two words for every group, step
// and tile of 8 filters. Neighbouring threads read neighbouring channels of a tap.
__device__ __forceinline__ void store_weights(const T* w, int first_filter, u32* to) {
    // Words per filter: TAP_WORDS of one tap, WORDS of all taps with padding.
    constexpr int TAP_WORDS = DEPTH / EACH, WORDS = STEPS * 8;
#pragma unroll 4
    for (int i = threadIdx.x; i < BLOCK_GROUPS * WIDE * WORDS; i += THREADS) {
        const int word = i % WORDS, n = i / WORDS % WIDE, group = i / (WORDS * WIDE);
        const int tap = word / TAP_WORDS, channel = word % TAP_WORDS * EACH, filter = first_filter + group * WIDE + n;
        u32 bits = 0;
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            if (tap >= KH * KW || (channel + j) / GROUP_CHANNELS != n / GROUP_FILTERS) continue;
            const int c = (channel + j) % GROUP_CHANNELS;
            const int at = W_HWIO ? (tap * GROUP_CHANNELS + c) * FILTERS + filter
                                  : (filter * KH * KW + tap) * GROUP_CHANNELS + c;
            bits |= load_cached<1, WEIGHTS_CONSTANT>(w + at).words[0] << 16 * j;
        }
        if constexpr (EACH == 1) bits = nearest_tf32(bits);
        const int lane = n % 8 * 4 + word % 4;
        to[(((group * STEPS + word / 8) * TILES_N + n / 8) * 32 + lane) * 2 + word / 4 % 2] = bits;
    }
}

struct Filters {
    uint2 held[HELD ? WARP_GROUPS * STEPS : 1][TILES_N];
    const uint2* from;

    __device__ __forceinline__ void load(const u32* weights) {
        const int lane = threadIdx.x % 32, warp_g = threadIdx.x / 32 % WARPS_G;
        from = reinterpret_cast<const uint2*>(weights) + warp_g * WARP_GROUPS * STEPS * TILES_N * 32 + lane;
        if constexpr (HELD) {
#pragma unroll
            for (int i = 0; i < WARP_GROUPS * STEPS; ++i)
#pragma unroll
                for (int j = 0; j < TILES_N; ++j) held[i][j] = from[(i * TILES_N + j) * 32];
        }
    }

    __device__ __forceinline__ uint2 at(int step, int j) const {  // steps of all groups are numbered in one sequence
        if constexpr (HELD) return held[step][j];
        else return from[(step * TILES_N + j) * 32];
    }
};

// ---- shared memory -> mma ----------------------------------------------------------------------------------------

// Returns the offset of a group's chunk from the first chunk of a pixel.
__device__ __forceinline__ int chunk_offset(int group, int chunk) {
    const int tap = chunk / TAP_CHUNKS;
    return (tap / KW * DH * COLUMNS + tap % KW * DW) * PITCH + (group * TAP_CHUNKS + chunk % TAP_CHUNKS) * 16;
}

using Sums = float[WARP_GROUPS * TILES_N][4];

// Adds the products of 16 * M_TILES pixels of the tile, from `pixel` on, with the filters of the warp's group `group`.
__device__ __forceinline__ void multiply_group(Sums (&sums)[M_TILES], u32 patch, int pixel, int group,
                                               const Filters& filters) {
    const int lane = threadIdx.x % 32;
    u32 rows[M_TILES];  // lane i passes to ldmatrix the address of pixel i % 16, for chunk i / 16 of a step
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) {
        const int at = min(pixel + i * 16 + lane % 16, TP * TQ - 1);
        rows[i] = patch + (at / TQ * SH * COLUMNS + at % TQ * SW) * PITCH;
    }
#pragma unroll(HELD ? STEPS : 2)
    for (int step = 0; step < STEPS; ++step) {
        const bool odd = CHUNKS % 2 && step == STEPS - 1;  // k ends after the step's first chunk
        const int first = chunk_offset(group, 2 * step), second = odd ? first : chunk_offset(group, 2 * step + 1);
        u32 a[M_TILES][4];
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) {
            load_matrices<false>(a[i], rows[i] + (lane < 16 ? first : second));
            if (odd) a[i][2] = a[i][3] = 0;
            if constexpr (EACH == 1) {
#pragma unroll
                for (int j = 0; j < 4; ++j) a[i][j] = nearest_tf32(a[i][j]);
            }
        }
#pragma unroll
        for (int j = 0; j < TILES_N; ++j) {
            const uint2 b = filters.at(group * STEPS + step, j);
#pragma unroll
            for (int i = 0; i < M_TILES; ++i) multiply(T(), sums[i][group * TILES_N + j], a[i], b.x, b.y);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    conv_grouped(const T* x, const T* w, EpilogueOperands epilogue_operands, ConvSizes sizes) {
    extern __shared__ __align__(16) char memory[];
    using Output = WarpOutput<WARP_GROUPS * TILES_N>;
    u32* weights = reinterpret_cast<u32*>(memory);
    char* patches = memory + WEIGHT_WORDS * 4;
    const int warp = threadIdx.x / 32, warp_g = warp % WARPS_G, first_filter = blockIdx.y * BLOCK_GROUPS * WIDE;
    char* stage = patches + 2 * PATCH + warp * Output::STAGE;

    const Image of{x + blockIdx.y * (BLOCK_GROUPS * DEPTH),
                   sizes.x.h,
                   sizes.x.w,
                   sizes.pads.h,
                   sizes.pads.w,
                   (sizes.y.h + TP - 1) / TP,
                   (sizes.y.w + TQ - 1) / TQ};
    const int tiles = sizes.images * of.tiles_h * of.tiles_w;
    const int warp_filter = first_filter + warp_g * (WARP_GROUPS * WIDE);
    Output output{epilogue_operands, sizes.y.h, sizes.y.w, warp_filter, {}};

    release_successor();
    if constexpr (WEIGHTS_CONSTANT) store_weights(w, first_filter, weights);
    wait_for_predecessor();
    of.begin(patches, blockIdx.x);
    if constexpr (!WEIGHTS_CONSTANT) store_weights(w, first_filter, weights);
    output.load_columns();
    __syncthreads();
    Filters filters;
    filters.load(weights);

    int current = 0;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        wait_for_copies();
        __syncthreads();  // the patch has arrived, and all threads have read the previous one
        if (tile + int(gridDim.x) < tiles) of.begin(patches + (1 - current) * PATCH, tile + gridDim.x);
        const u32 patch = shared_address(patches + current * PATCH) + warp_g * (WARP_GROUPS * TAP_CHUNKS * 16);
        current = 1 - current;
        const int image = tile / (of.tiles_h * of.tiles_w), rest = tile % (of.tiles_h * of.tiles_w);
        const int p = rest / of.tiles_w * TP, q = rest % of.tiles_w * TQ;
#pragma unroll 1
        for (int pixel = warp / WARPS_G * (16 * M_TILES); pixel < TP * TQ; pixel += 16 * M_TILES * WARPS_M) {
            Sums sums[M_TILES] = {};
#pragma unroll
            for (int group = 0; group < WARP_GROUPS; ++group) multiply_group(sums, patch, pixel, group, filters);
#pragma unroll
            for (int i = 0; i < M_TILES; ++i) output.store_pixels(sums[i], stage, image, p, q, pixel + i * 16);
        }
    }
}
