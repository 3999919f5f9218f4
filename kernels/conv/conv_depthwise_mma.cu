// Depthwise convolutions of channels-last fp16 and bf16 tensors by mma.sync, from sm_80 on; one or two spatial axes.
//
//   y = epilogue(conv(x, w))    each channel of y reads the same channel of x; sums are in fp32
//
// An mma adds the products of two taps, for 16 positions of y and 8 channels. Each row of its operand A belongs to one
// position: it holds the 8 channels of x at the first tap, and then those at the second tap. B is two diagonal
// matrices, one for each tap: the weights of the 8 channels. So every product is exact, as in fp32, and no element is
// converted.
//
// Taps are paired along a row of the filter. If the number of columns is odd, the taps of the last column are paired
// along that column; if its last tap has no partner, it is paired with a weight of 0.
//
// A block has BLOCK_GROUPS x 8 channels and computes tiles of TP x TQ positions of y one after the other:
//   1. cp.async copies the part of x that a tile reads, its patch, to shared memory. With BUFFERS 2, the previous tile
//      is computed meanwhile; with BUFFERS 1, only other blocks compute meanwhile. Elements outside x are zero. A plane
//      of the patch holds chunks of 16 bytes: 8 channels of every pixel. In a row of a plane, the columns that are
//      multiples of SW come first, then those of remainder 1, and so on. So neighbouring positions of y read
//      neighbouring chunks at every tap, without bank conflicts.
//   2. A warp has 8 channels and keeps their weights in registers: lane i has the weights of channel i / 4 if its
//      elements of B are on the diagonals, else zeros. The warp computes two strips of TH x 8 positions at a time. A
//      fragment of a row of x serves every row of the strip that reads it.
//   3. The epilogue runs in registers. The results are stored through shared memory, so that all channels of the block
//      are written together.
//
// A zero of B times an infinity or NaN of a neighbouring channel is NaN. So a strip that has a NaN is computed again,
// one channel at a time.
//
// Macros:
//   CHANNELS             channels of x and y, a multiple of 8
//   KH, KW, SH, SW, DH, DW    filter sizes, strides, dilations
//   BLOCK_GROUPS, WARPS_M      groups of 8 channels of a block, and warps that share the strips of a group
//   TP, TQ, TH           rows and columns of y of a tile, and rows of a strip; TH divides TP
//   BUFFERS              patches in shared memory: 2 or 1
//   W_HWIO               1: w is (KH, KW, CHANNELS); 0: (CHANNELS, KH, KW)
//   WEIGHTS_CONSTANT     1: no kernel writes w
//   MIN_BLOCKS           blocks that must fit on a multiprocessor: a bound on registers
//   and those of epilogue.cuh
#include "types.cuh"
#include "epilogue.cuh"
#include "conv_sizes.cuh"
#include "gemm_multiply.cuh"

constexpr int THREADS = 32 * BLOCK_GROUPS * WARPS_M, ALL_GROUPS = CHANNELS / 8;
constexpr int ROWS = (TP - 1) * SH + (KH - 1) * DH + 1, COLUMNS = (TQ - 1) * SW + (KW - 1) * DW + 1;
// A row of a plane has PITCH chunks: SPAN chunks for the columns with remainder 0 modulo SW, then SPAN chunks for those
// with remainder 1, and so on.
constexpr int SPAN = (COLUMNS + SW - 1) / SW, PITCH = SPAN * SW;

// Returns the number of chunks from one plane to the next. Lanes read or write all groups of a pixel before the next
// pixel. The number is chosen to give eight neighbouring lanes as few bank conflicts as possible.
constexpr int plane_chunks(int pixels) {
    constexpr int STEP = BLOCK_GROUPS < 8 ? (8 + BLOCK_GROUPS - 1) / BLOCK_GROUPS : 1;
    return pixels + (STEP - pixels % 8 + 8) % 8;
}

constexpr int PLANE = plane_chunks(ROWS * PITCH), PATCH = BLOCK_GROUPS * PLANE * 16;
constexpr int STAGE_PLANE = plane_chunks(TP * TQ);
constexpr int STRIPS_W = (TQ + 7) / 8, STRIPS = TP / TH * STRIPS_W, JOBS = (STRIPS + 1) / 2;
constexpr int STRIP_ROWS = (TH - 1) * SH + (KH - 1) * DH + 1;  // rows of x that a strip spans
constexpr int PAIRS_W = KW / 2, PAIRS_H = KW % 2 ? (KH + 1) / 2 : 0, PAIRS = KH * PAIRS_W + PAIRS_H;

static_assert(CHANNELS % 8 == 0 && TP % TH == 0 && sizeof(T) == 2, "see above");

// Returns the number of chunks from the chunk that a position reads at tap 0 of a filter row to the one at tap `s`.
__device__ constexpr int tap_chunk(int s) { return s * DW % SW * SPAN + s * DW / SW; }

// Returns the row of the filter by which row `row` of x is multiplied for row `t` of a strip; -1 if there is none.
__device__ constexpr int filter_row(int row, int t) {
    const int from = row - t * SH;
    return from >= 0 && from % DH == 0 && from / DH < KH ? from / DH : -1;
}

// Returns whether some row of a strip reads row `row` of x with a filter row whose index is a multiple of `multiple`.
__device__ constexpr bool is_read(int row, int multiple) {
    for (int t = 0; t < TH; ++t)
        if (filter_row(row, t) >= 0 && filter_row(row, t) % multiple == 0) return true;
    return false;
}

// ---- x -> shared memory ------------------------------------------------------------------------------------------

struct Place {
    int image, row, column;  // a tile's first position in y
};

struct Tiles {
    int images, high, wide;

    __device__ __forceinline__ int count() const { return images * high * wide; }

    __device__ __forceinline__ Place place(int tile) const {
        const int image = tile / (high * wide), rest = tile % (high * wide);
        return {image, rest / wide * TP, rest % wide * TQ};
    }
};

struct Image {
    const T* x;
    int height, width, pad_h, pad_w, first_group;

    // Starts the copies of a tile's patch.
    __device__ __forceinline__ void begin(u32 to, Place place) const {
        const int top = place.row * SH - pad_h, left = place.column * SW - pad_w;
        const T* from = x + i64(place.image) * height * width * CHANNELS + first_group * 8;
        // If this loop were unrolled, the offsets of all copies would stay in registers from one tile to the next, and
        // would take too many of them.
#pragma unroll 1
        for (int i = threadIdx.x; i < ROWS * COLUMNS * BLOCK_GROUPS; i += THREADS) {
            const int pixel = i / BLOCK_GROUPS, group = i % BLOCK_GROUPS;
            const int row = pixel / COLUMNS, column = pixel % COLUMNS;
            const int x_row = top + row, x_column = left + column;
            const bool inside = unsigned(x_row) < unsigned(height) && unsigned(x_column) < unsigned(width) &&
                                (ALL_GROUPS % BLOCK_GROUPS == 0 || first_group + group < ALL_GROUPS);
            const T* source = inside ? from + i64(x_row * width + x_column) * CHANNELS + group * 8 : x;
            const int chunk = group * PLANE + row * PITCH + column % SW * SPAN + column / SW;
            copy_async<16>(to + chunk * 16, reinterpret_cast<const char*>(source), inside ? 16 : 0);
        }
    }
};

// ---- weights -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 load_weight(const T* w, int tap, int channel) {
    return load_cached<1, WEIGHTS_CONSTANT>(w + (W_HWIO ? tap * CHANNELS + channel : channel * (KH * KW) + tap))
        .words[0];
}

// The operand B for each pair of taps: a lane has two registers, one for each tap of the pair.
struct Weights {
    u32 pairs[PAIRS][2];

    __device__ __forceinline__ void load(const T* w, int group) {
        // The lower half of a lane's word is row k = lane % 4 * 2 of its tap's matrix, and the upper half is row k + 1.
        const int lane = threadIdx.x % 32, channel = lane / 4;
        const bool diagonal = lane % 4 == channel / 2 && group < ALL_GROUPS;
#pragma unroll
        for (int i = 0; i < PAIRS * 2; ++i) pairs[i / 2][i % 2] = 0;
        if (diagonal) {
#pragma unroll
            for (int r = 0; r < KH; ++r)
#pragma unroll
                for (int s = 0; s < KW; ++s) {
                    const bool last = KW % 2 && s == KW - 1;
                    pairs[last ? KH * PAIRS_W + r / 2 : r * PAIRS_W + s / 2][last ? r % 2 : s % 2] =
                        load_weight(w, r * KW + s, group * 8 + channel);
                }
#pragma unroll
            for (int i = 0; i < PAIRS * 2; ++i) pairs[i / 2][i % 2] <<= channel % 2 * 16;
        }
    }
};

// ---- shared memory -> sums ---------------------------------------------------------------------------------------

// A strip of a tile: TH x 8 positions, from `row` and `column` of the tile on.
struct Strip {
    int row, column;

    __device__ __forceinline__ explicit Strip(int strip) : row(strip / STRIPS_W * TH), column(strip % STRIPS_W * 8) {}

    // Returns the chunk of a plane that column `at` of the strip reads at the first tap of its first row. Columns
    // beyond the tile read the same chunk as its last column.
    __device__ __forceinline__ int chunk(int at) const { return row * SH * PITCH + min(column + at, TQ - 1); }
};

// Adds the products of two strips. The strips' positions are the rows of A: rows 0 to 7 are the columns of the first
// strip, and rows 8 to 15 those of the second. `plane` is the address of the plane of the warp's channels.
__device__ __forceinline__ void multiply_strips(float (&sums)[TH][4], u32 plane, int job, const Weights& weights) {
    const int lane = threadIdx.x % 32;
    const bool second_tap = lane >= 16;  // lane i passes to ldmatrix the address of row i % 16 at tap i / 16 of a pair
    const u32 from = plane + Strip(min(job * 2 + lane / 8 % 2, STRIPS - 1)).chunk(lane % 8) * 16;
    const u32 along_column = from + (second_tap ? DH * PITCH * 16 : 0);
#pragma unroll
    for (int row = 0; row < STRIP_ROWS; ++row) {
        if (!is_read(row, 1)) continue;
#pragma unroll
        for (int s = 0; s < PAIRS_W; ++s) {
            const u32 along_row = from + (second_tap ? (tap_chunk(2 * s + 1) - tap_chunk(2 * s)) * 16 : 0);
            u32 a[4];
            load_matrices<false>(a, along_row + (row * PITCH + tap_chunk(2 * s)) * 16);
#pragma unroll
            for (int t = 0; t < TH; ++t) {
                const int r = filter_row(row, t);
                if (r < 0) continue;
                const u32(&b)[2] = weights.pairs[r * PAIRS_W + s];
                multiply(T(), sums[t], a, b[0], b[1]);
            }
        }
        if (KW % 2 == 0 || !is_read(row, 2)) continue;
        u32 a[4];  // if no row follows for the second tap, its weight is 0, and it reads this row again
        load_matrices<false>(a, (row + DH < STRIP_ROWS ? along_column : from) + (row * PITCH + tap_chunk(KW - 1)) * 16);
#pragma unroll
        for (int t = 0; t < TH; ++t) {
            const int r = filter_row(row, t);
            if (r < 0 || r % 2) continue;
            const u32(&b)[2] = weights.pairs[KH * PAIRS_W + r / 2];
            multiply(T(), sums[t], a, b[0], b[1]);
        }
    }
}

__device__ __forceinline__ bool has_nan(const float (&sums)[TH][4]) {
    bool found = false;
#pragma unroll
    for (int t = 0; t < TH; ++t)
#pragma unroll
        for (int i = 0; i < 4; i += 2) found |= (sums[t][i] != sums[t][i]) | (sums[t][i + 1] != sums[t][i + 1]);
    return found;
}

// Computes the sums of one position for two neighbouring channels, each only from elements of its own channel. `from`
// points to x at the position's first tap.
__device__ __forceinline__ void sum_apart(float (&sums)[2], const char* from, const T* w, int channel) {
    sums[0] = sums[1] = 0.0f;
#pragma unroll 1
    for (int tap = 0; tap < KH * KW; ++tap) {
        const int chunk = tap / KW * DH * PITCH + tap_chunk(tap % KW);
        float values[2], factors[2];
        widen(T(), *reinterpret_cast<const u32*>(from + chunk * 16), values);
        widen(T(), load_weight(w, tap, channel) | load_weight(w, tap, channel + 1) << 16, factors);
#pragma unroll
        for (int i = 0; i < 2; ++i) sums[i] = fmaf(values[i], factors[i], sums[i]);
    }
}

// ---- sums -> y ---------------------------------------------------------------------------------------------------

// Applies the epilogue and stores y. A lane has one column of each of two strips at a time, for two neighbouring
// channels.
struct Output : EpilogueOperands {
    int height, width, first_group;  // sizes of the image, and the block's first group
    ColumnValues<2> values;

    // `channel` is the first of the lane's two channels.
    __device__ __forceinline__ void load_columns(int channel) {
        if (channel >= CHANNELS) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) vectors().load(values, i, channel + i);
    }

    // Applies the epilogue to the sums of position (row, column) of the tile, and stores the results at `to`.
    __device__ __forceinline__ void finish(char* to, const float (&sums)[2], Place place, int row, int column,
                                           int channel) const {
        float added[2] = {}, results[2];
        const int y_row = place.row + row, y_column = place.column + column;
        if constexpr (HAS_RESIDUAL) {
            const i64 at = (i64(place.image) * height + y_row) * width + y_column;
            if (y_row < height && y_column < width) unpack(load_once<2>(residual + at * CHANNELS + channel), added);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) results[i] = epilogue_columns(sums[i], 0.0f, values, i, added[i], alpha, beta);
        *reinterpret_cast<u32*>(to + (row * TQ + column) * 16) = pack<T>(results).words[0];
    }

    // Copies a tile's results from shared memory to y.
    __device__ __forceinline__ void store(const char* stage, Place place) const {
        T* to = y + i64(place.image) * height * width * CHANNELS + first_group * 8;
#pragma unroll 1
        for (int i = threadIdx.x; i < TP * TQ * BLOCK_GROUPS; i += THREADS) {
            const int pixel = i / BLOCK_GROUPS, group = i % BLOCK_GROUPS;
            const int row = place.row + pixel / TQ, column = place.column + pixel % TQ;
            if (row >= height || column >= width) continue;
            if (ALL_GROUPS % BLOCK_GROUPS != 0 && first_group + group >= ALL_GROUPS) continue;
            const uint4 four = *reinterpret_cast<const uint4*>(stage + (group * STAGE_PLANE + pixel) * 16);
            const u32 words[4] = {four.x, four.y, four.z, four.w};
            T* at = to + i64(row * width + column) * CHANNELS + group * 8;
            store_bytes<false, 16>(reinterpret_cast<char*>(at), words);
        }
    }
};

// Computes two strips of a tile and stores the results in shared memory. `patch` and `stage` are the planes of the
// warp's channels, for x and for the results.
__device__ __forceinline__ void compute_strips(const char* patch, char* stage, Place place, int job, int group,
                                               const T* w, const Weights& weights, const Output& output) {
    float sums[TH][4] = {};
    multiply_strips(sums, shared_address(patch), job, weights);
    const bool apart = __any_sync(0xffffffffu, has_nan(sums));
    const int lane = threadIdx.x % 32, first = lane % 4 * 2, channel = group * 8 + first;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int index = job * 2 + half;
        const Strip strip(index);
        const int column = strip.column + lane / 4;
        if (index >= STRIPS || column >= TQ) continue;
        char* to = stage + first * 2;
        if (!apart) {
#pragma unroll
            for (int t = 0; t < TH; ++t) {
                const float both[2] = {sums[t][2 * half], sums[t][2 * half + 1]};
                output.finish(to, both, place, strip.row + t, column, channel);
            }
        } else {
            const char* from = patch + strip.chunk(lane / 4) * 16 + first * 2;
#pragma unroll 1
            for (int t = 0; t < TH; ++t) {
                float both[2];
                sum_apart(both, from + t * SH * PITCH * 16, w, channel);
                output.finish(to, both, place, strip.row + t, column, channel);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    conv_depthwise_mma(const T* x, const T* w, EpilogueOperands epilogue_operands, ConvSizes sizes) {
    extern __shared__ __align__(16) char memory[];
    char* stage = memory + BUFFERS * PATCH;
    const int warp = threadIdx.x / 32, warp_group = warp % BLOCK_GROUPS, first_group = blockIdx.x * BLOCK_GROUPS;
    const int group = first_group + warp_group;
    const Tiles tiles{sizes.images, (sizes.y.h + TP - 1) / TP, (sizes.y.w + TQ - 1) / TQ};
    const Image of{x, sizes.x.h, sizes.x.w, sizes.pads.h, sizes.pads.w, first_group};
    Output output{epilogue_operands, sizes.y.h, sizes.y.w, first_group, {}};

    Weights weights;
    release_successor();
    if constexpr (WEIGHTS_CONSTANT) weights.load(w, group);
    wait_for_predecessor();
    Place place = tiles.place(blockIdx.y);
    of.begin(shared_address(memory), place);
    if constexpr (!WEIGHTS_CONSTANT) weights.load(w, group);
    output.load_columns(group * 8 + threadIdx.x % 4 * 2);

    int current = 0;
#pragma unroll 1
    for (int tile = blockIdx.y; tile < tiles.count(); tile += gridDim.y) {
        const char* patch = memory + current * PATCH;
        const bool more = tile + int(gridDim.y) < tiles.count();
        const Place next = tiles.place(tile + gridDim.y);
        wait_for_copies();
        __syncthreads();  // the patch has arrived, and all threads have read the previous patch and results
        if (BUFFERS == 2 && more) {
            current = 1 - current;
            of.begin(shared_address(memory + current * PATCH), next);
        }
        if (group < ALL_GROUPS) {
#pragma unroll 1
            for (int job = warp / BLOCK_GROUPS; job < JOBS; job += WARPS_M)
                compute_strips(patch + warp_group * PLANE * 16, stage + warp_group * STAGE_PLANE * 16, place, job,
                               group, w, weights, output);
        }
        __syncthreads();
        if (BUFFERS == 1 && more) of.begin(shared_address(memory), next);
        output.store(stage, place);
        place = next;
    }
}
