// Convolutions of images of few channels by mma.sync from sm_80 on: fp16, bf16, and fp32 rounded to TF32. x is (n,
// CHANNELS, height, width), and y has its channels last.
//
//   y = epilogue(conv(x, w))    dilation 1, one group, one or two spatial axes
//
// The convolution is a matrix product of pixels x (channels, taps) with (channels, taps) x FILTERS. A block computes
// tiles of TP x TQ pixels one after the other, and keeps its weights for all of them:
//   1. The part of x that a tile reads, its patch, is copied to shared memory as it is, while the previous tile is
//      computed. Elements outside x are zero.
//   2. Along k, an mma reads words of 32 bits: two neighbouring columns of x of a 16-bit type, or one column of fp32.
//      The words that a pixel reads from a row of the patch lie one after the other, ROW_WORDS of them, so that a
//      fragment is four loads of words and the patch is never rearranged. Where pixels begin at odd columns (SW is odd,
//      16-bit types), they read a second copy of the patch that is shifted by one column.
//   3. Words can hold columns that belong to no tap. These columns are masked, because an infinity in them would make a
//      sum NaN.
//   4. If the last mma has room after the last tap, the bias can be one more weight, by which a word of value one is
//      multiplied.
//   5. Filters are assigned to the columns of the mma tiles so that the sums of a lane belong to neighbouring filters:
//      a lane applies the epilogue in registers and stores whole vectors.
//   6. If x has 8 bits, the patch arrives as bytes, and threads write the numbers x - x_zero to a second patch, as fp16.
//      The sums are exact, because they are below 2^24. The epilogue multiplies them by x_scale * w_scale[filter].
//
// Macros:
//   CHANNELS, FILTERS   channels of x and of y           KH, KW, SH, SW    filter sizes and strides
//   PAD_W               columns of padding on the left
//   COPY                elements of x that are copied at a time; divides the width of x and TQ * SW
//   TP, TQ              pixels of a tile along height and width; TP * TQ is a multiple of 16 * WARPS_M
//   WARPS_M, WARPS_N    warps along pixels and filters   TILES_N           mma tiles of 8 filters of a warp
//   HELD                1: weights are kept in registers, 0: in shared memory
//   BIAS_IN_PRODUCT     1: the bias is a weight (step 4), and HAS_BIAS is 0; not for fp32, which an mma rounds
//   WIDTH               elements of an access to y: divides FILTERS
//   W_HWIO              1: w is (KH, KW, CHANNELS, FILTERS); 0: (FILTERS, KH, KW, CHANNELS)
//   W_COPY              elements of w that are copied at a time; divides FILTERS if W_HWIO
//   WEIGHTS_CONSTANT    1: no kernel writes w
//   MIN_BLOCKS          blocks that must fit on a multiprocessor: a bound on registers
//   EIGHT_BITS          1: x has 8 bits and w is s8 (step 6); 0: both are of T, as is y
//   with EIGHT_BITS: OPERAND, W_SCALES and X_ZERO as in gemm_hopper_eight_bits.cuh
//   and those of epilogue.cuh
// CHANNELS * height * width and the numbers of elements of an image of y and of pixels of y are less than 2^31.
#include "types.cuh"
#include "epilogue.cuh"
#include "conv_sizes.cuh"
#include "gemm_multiply.cuh"
#include "packed_words.cuh"

constexpr int THREADS = 32 * WARPS_M * WARPS_N, PIXELS = TP * TQ;
#if EIGHT_BITS
using X = OPERAND;
using W = s8;
using M = f16;  // the type of the numbers that are multiplied

// Scales and the zero point, as an argument of the kernel; stem.py writes the fields in this order.
struct Integers {
    const T *x_scale, *w_scale;
    const X* x_zero;
};
#define INTEGER_PARAMETERS , Integers integers
#else
using X = T;
using W = T;
using M = T;
#define INTEGER_PARAMETERS
#endif

constexpr int ITEM = sizeof(M), EACH = 4 / ITEM;  // EACH: elements of a word
constexpr bool SHIFTED = EACH == 2 && SW % 2;     // the patch has a shifted copy

// A pixel's columns begin LEAD columns before its first tap, so that they begin at the start of a word. The patch
// begins EXTRA columns before the first pixel's columns, so that copies are aligned.
constexpr int LEAD = COPY > 1 && EACH == 2 ? PAD_W % 2 : 0;
constexpr int EXTRA = (COPY - (PAD_W + LEAD) % COPY) % COPY;
constexpr int ROW_WORDS = (LEAD + KW + EACH - 1) / EACH;  // words per pixel in a row of the patch
constexpr int WORDS = CHANNELS * KH * ROW_WORDS, STEPS = (WORDS + 7) / 8;
constexpr int ROWS = (TP - 1) * SH + KH;
constexpr int COLUMNS = (EXTRA + (TQ - 1) * SW + ROW_WORDS * EACH + (SHIFTED ? 2 : 0) + 7) / 8 * 8;

// Returns the pitch, in words, of the patch's rows, where each row has `words` words. The pitch is chosen such that two
// rows that the lanes of one load read are in different banks.
constexpr int pitch_of(int words) {
    while (ROW_WORDS % 4 && (words % 32 < 12 || words % 32 > 20)) words += 4;
    return words;
}
constexpr int PITCH = pitch_of(COLUMNS / EACH);
constexpr int PATCH = CHANNELS * ROWS * PITCH;                             // words per patch
constexpr int PATCH_SPAN = SHIFTED ? (PATCH + 15) / 32 * 32 + 16 : PATCH;  // the shifted copy is in other banks
constexpr int NUMBERS = SHIFTED ? 2 * PATCH_SPAN : PATCH_SPAN;             // words per patch and its shifted copy
constexpr int X_PITCH = EIGHT_BITS ? COLUMNS : PITCH * EACH;               // elements from a row to the next, as copied
// Words of what is copied for a tile, and after both buffers, words of the numbers of the present tile.
constexpr int BUFFER = EIGHT_BITS ? CHANNELS * ROWS * X_PITCH / 4 : NUMBERS, CONVERTED = EIGHT_BITS ? NUMBERS : 0;

constexpr int BLOCK_N = WARPS_N * TILES_N * 8, TAPS = CHANNELS * KH * KW;
constexpr int RAW_WORDS = BLOCK_N * TAPS * int(sizeof(W)) / 4;  // words of the block's weights in the layout of w
constexpr int COPIED_WORDS = 2 * BUFFER + CONVERTED;
constexpr int WEIGHT_WORDS = HELD ? RAW_WORDS : STEPS * BLOCK_N * 8;
constexpr int PATCH_WORDS = HELD || COPIED_WORDS > RAW_WORDS ? COPIED_WORDS : RAW_WORDS;

static_assert(PIXELS % (16 * WARPS_M) == 0 && TQ * SW % COPY == 0 && FILTERS % WIDTH == 0, "see above");
static_assert(!BIAS_IN_PRODUCT || (EACH == 2 && WORDS % 8 && !HAS_BIAS), "there is a word for the bias");
static_assert(!EIGHT_BITS || (TAPS * 255 * 128 < 1 << 24 && (COPY == 1 || COPY % 4 == 0)), "sums are exact");
static_assert(EXTRA % EACH == 0 && PATCH % 4 == 0 && PATCH_SPAN % 4 == 0, "words and copies are aligned");

// ---- global memory -> shared memory ------------------------------------------------------------------------------

// Copies N elements if they exist in x or w; writes zeros otherwise. A single element of 16 bits or 8 bits is copied
// synchronously, through a register; `other` is written if one of 8 bits does not exist.
template <int N, class S>
__device__ __forceinline__ void copy_elements(S* to, const S* from, bool exist, S other = {}) {
    constexpr int BYTES = N * sizeof(S);
    if constexpr (BYTES >= 4) {
        copy_async<BYTES>(shared_address(to), reinterpret_cast<const char*>(from), exist ? BYTES : 0);
    } else if constexpr (BYTES == 2) {
        u32 bits = 0;
        if (exist) bits = load_cached<1>(from).words[0];
        to->bits = bits;
    } else {
        *to = exist ? *from : other;
    }
}

struct Tile { int image, p, q; };  // the tile's image, and the row and column of its first pixel

struct Image {
    const X* x;
    int height, width, pad_h, tiles_h, tiles_w;
    X zero;  // the zero point of x

    __device__ __forceinline__ Tile tile(int index) const {
        const u32 row = u32(index) / u32(tiles_w), image = row / u32(tiles_h);
        return {int(image), int(row - image * tiles_h) * TP, int(index - row * tiles_w) * TQ};
    }

    // Starts the copies of a tile's patch. A line is a row of one channel; each thread copies the same columns of every
    // AT_ONCE-th line.
    __device__ __forceinline__ void begin(u32* to, const Tile& tile) const {
        constexpr int COPIES = COLUMNS / COPY, LANES = COPIES < THREADS ? COPIES : THREADS;
        constexpr int LINES = CHANNELS * ROWS, AT_ONCE = THREADS / LANES, TIMES = (LINES + AT_ONCE - 1) / AT_ONCE;
        const int top = tile.p * SH - pad_h, left = tile.q * SW - PAD_W - LEAD - EXTRA;
        const X* from = x + i64(tile.image) * (CHANNELS * height * width);
        if (threadIdx.x >= LANES * AT_ONCE) return;
#pragma unroll
        for (int first = 0; first < COPIES; first += LANES) {
            const int place = first + int(threadIdx.x) % LANES, column = left + place * COPY;
            if (COPIES % LANES && place >= COPIES) continue;
            const bool inside = unsigned(column) < unsigned(width);
#pragma unroll(TIMES <= 8 ? TIMES : 4)
            for (int i = 0; i < TIMES; ++i) {
                const int line = int(threadIdx.x) / LANES + i * AT_ONCE;
                if (i == TIMES - 1 && LINES % AT_ONCE && line >= LINES) continue;
                const int channel = line / ROWS, row = top + line % ROWS;
                const bool exist = inside && unsigned(row) < unsigned(height);
                const int at = exist ? (channel * height + row) * width + column : 0;
                copy_elements<COPY>(reinterpret_cast<X*>(to) + line * X_PITCH + place * COPY, from + at, exist, zero);
            }
        }
    }

#if EIGHT_BITS
    // Writes the numbers x - zero of a patch that was copied `from` x; outside x they are 0. A byte b in the low bits of
    // the fp16 number 1024 makes 1024 + b. If COPY is 1, bytes outside x are the zero point.
    __device__ __forceinline__ void convert(const u32* from, u32* to, const Tile& tile) const {
        constexpr int QUADS = COLUMNS / 4;  // four bytes each
        constexpr u32 SIGN = X(-1) < X(0) ? 0x80808080 : 0;
        const int top = tile.p * SH - pad_h, left = tile.q * SW - PAD_W - LEAD - EXTRA;
        const float origin[2] = {1024.0f + (SIGN ? 128 : 0) + zero, 1024.0f + (SIGN ? 128 : 0) + zero};
        const u32 subtracted = pack<f16>(origin).words[0];
#pragma unroll 4
        for (int i = threadIdx.x; i < CHANNELS * ROWS * QUADS; i += THREADS) {
            const int line = i / QUADS, quad = i % QUADS, row = top + line % ROWS, column = left + 4 * quad;
            const bool exist = COPY == 1 || (unsigned(row) < unsigned(height) && unsigned(column) < unsigned(width));
            const u32 bytes = from[i] ^ SIGN;
            u32 numbers[2] = {__byte_perm(bytes, 0x64646464, 0x4140), __byte_perm(bytes, 0x64646464, 0x4342)};
            for (u32& each : numbers) each = exist ? subtract_words(f16(), each, subtracted) : 0;
            reinterpret_cast<uint2*>(to + line * PITCH)[quad] = make_uint2(numbers[0], numbers[1]);
        }
    }
#endif
};

// Writes the copy of a patch that is shifted by one column.
__device__ __forceinline__ void shift(const u32* from, u32* to) {
    for (int i = threadIdx.x; i < PATCH - 1; i += THREADS) to[i] = from[i] >> 16 | from[i + 1] << 16;
}

// Starts the copies of the block's weights: (BLOCK_N, KH, KW, CHANNELS), or (KH, KW, CHANNELS, BLOCK_N) if W_HWIO.
__device__ __forceinline__ void begin_weights(const W* w, int first_filter, W* to) {
    const int filters = FILTERS - first_filter < BLOCK_N ? FILTERS - first_filter : BLOCK_N;
    if constexpr (W_HWIO) {
#pragma unroll 4
        for (int i = threadIdx.x * W_COPY; i < TAPS * BLOCK_N; i += THREADS * W_COPY) {
            const int filter = i % BLOCK_N;
            const W* from = w + i / BLOCK_N * FILTERS + first_filter + filter;
            if (filter < filters) copy_elements<W_COPY>(to + i, from, true);
        }
    } else {
        const int count = filters * TAPS;
        w += first_filter * TAPS;
#pragma unroll 4
        for (int i = threadIdx.x * W_COPY; i <= count - W_COPY; i += THREADS * W_COPY)
            copy_elements<W_COPY>(to + i, w + i, true);
#pragma unroll 1
        for (int i = count / W_COPY * W_COPY + threadIdx.x; i < count; i += THREADS)
            copy_elements<1>(to + i, w + i, true);
    }
}

// ---- which filter is which column of an mma ----------------------------------------------------------------------

// A lane has two neighbouring columns of the sums of an mma tile. Several mma tiles form a group, in which filters are
// assigned to columns such that the sums of a lane for a pixel belong to neighbouring filters. In a group of the
// largest size, these sums are 16 bytes of y.
constexpr int LARGEST_GROUP = 8 / ITEM, IN_LARGEST = TILES_N / LARGEST_GROUP * LARGEST_GROUP;

constexpr int group_size(int tile) {
    if (tile < IN_LARGEST) return LARGEST_GROUP;
    return (TILES_N - IN_LARGEST) / 2 * 2 > tile - IN_LARGEST ? 2 : 1;
}

constexpr int group_first(int tile) {
    if (tile < IN_LARGEST) return tile / LARGEST_GROUP * LARGEST_GROUP;
    return group_size(tile) == 2 ? IN_LARGEST : TILES_N - 1;
}

// Returns the filter of a column of one of the warp's mma tiles, counted from the warp's first filter.
__device__ __forceinline__ int filter_of(int tile, int column) {
    const int first = group_first(tile);
    return first * 8 + column / 2 * (2 * group_size(tile)) + (tile - first) * 2 + column % 2;
}

// ---- words along k -----------------------------------------------------------------------------------------------

// A word along k. `line` is the index of a row of the filter, counted over all channels, and `word` is the index of the
// word in this row. Four lanes read adjacent words; `word_of(k, lane)` returns word number k + lane along k.
struct Word {
    int line, word;

    __device__ __forceinline__ bool exists() const { return line < CHANNELS * KH; }
    __device__ __forceinline__ bool is_bias() const { return BIAS_IN_PRODUCT && line == CHANNELS * KH && word == 0; }
};

__device__ __forceinline__ Word word_of(int k, int lane) {
    if constexpr (ROW_WORDS % 4 == 0) return {k / ROW_WORDS, k % ROW_WORDS + lane};
    else return {(k + lane) / ROW_WORDS, (k + lane) % ROW_WORDS};
}

// The block's weights in shared memory, and the bias.
struct Weights {
    const W* raw;
    const T* bias;
    int first_filter;  // the block's first filter

    // Returns two weights of 8 or 16 bits, or one of fp32; zeros where there is no tap. `filter` counts from the first
    // filter of the block.
    __device__ __forceinline__ u32 word(Word at, int filter) const {
        if (at.is_bias()) {
            const int each = first_filter + filter;
            return each < FILTERS ? load_cached<1>(bias + each).words[0] : 0;
        }
        const int channel = at.line / KH, r = at.line % KH;
        const auto bits = [&](int s) -> u32 {
            if (!at.exists() || s < 0 || s >= KW) return 0;
            const int tap = (r * KW + s) * CHANNELS + channel;
            const W weight = raw[W_HWIO ? tap * BLOCK_N + filter : filter * TAPS + tap];
#if EIGHT_BITS
            const float number[1] = {float(weight)};
            return pack<M>(number).words[0];
#else
            return weight.bits;
#endif
        };
        const int s = at.word * EACH - LEAD;
        if constexpr (EACH == 2) return bits(s) | bits(s + 1) << 16;
        else return nearest_tf32(bits(s));
    }

    // Returns the weights that an mma takes from this lane: the words at k and at k + 4.
    __device__ __forceinline__ uint2 words(int k, int lane, int warp_n, int tile) const {
        const int filter = warp_n * (TILES_N * 8) + filter_of(tile, lane / 4);
        return make_uint2(word(word_of(k, lane % 4), filter), word(word_of(k + 4, lane % 4), filter));
    }
};

struct Filters {
    uint2 held[HELD ? STEPS : 1][TILES_N];
    const uint2* from;  // with HELD 0: the lane's weights, in shared memory

    // Loads the weights into registers if HELD, else to `memory` in the order in which the mma reads them.
    __device__ __forceinline__ void load(const Weights& weights, u32* memory) {
        const int lane = threadIdx.x % 32, warp_n = threadIdx.x / 32 % WARPS_N;
        if constexpr (HELD) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
#pragma unroll
                for (int j = 0; j < TILES_N; ++j) held[step][j] = weights.words(step * 8, lane, warp_n, j);
        } else {
            uint2* to = reinterpret_cast<uint2*>(memory);
            from = to + warp_n * TILES_N * 32 + lane;
#pragma unroll 2
            for (int i = threadIdx.x / 32; i < STEPS * WARPS_N * TILES_N; i += THREADS / 32) {
                const int tile = i % (WARPS_N * TILES_N), step = i / (WARPS_N * TILES_N);
                to[i * 32 + lane] = weights.words(step * 8, lane, tile / TILES_N, tile % TILES_N);
            }
        }
    }

    __device__ __forceinline__ uint2 at(int step, int j) const {
        if constexpr (HELD) return held[step][j];
        else return from[(step * (BLOCK_N / 8) + j) * 32];
    }
};

// Returns a mask of the bits of word `word` that belong to taps. A row of the filter has ROW_WORDS words; the first and
// the last word can also hold an element next to the taps.
__device__ __forceinline__ u32 mask_of(int word) {
    if constexpr (EACH == 1) return 0xffffffffu;
    u32 mask = 0xffffffffu;
    if (LEAD && word == 0) mask &= 0xffff0000u;
    if ((LEAD + KW) % 2 && word == ROW_WORDS - 1) mask &= 0x0000ffffu;
    return mask;
}

// How to read a word along k from the patch: its offset from a pixel's first word, a mask of its bits that belong to
// taps, and the bits to set in it. These are the value one in the word that is multiplied by the bias, else zeros.
struct WordOfPatch {
    int offset;
    u32 mask, constant;
};

__device__ __forceinline__ WordOfPatch word_of_patch(Word at) {
    const float one[1] = {1.0f};
    if (!at.exists()) return {0, 0, at.is_bias() ? pack<T>(one).words[0] : 0};
    return {(at.line / KH * ROWS + at.line % KH) * PITCH + at.word, mask_of(at.word), 0};
}

__device__ __forceinline__ u32 load_word(const u32* from, const WordOfPatch& at) {
    const u32 word = from[at.offset] & at.mask | at.constant;
    return EACH == 1 ? nearest_tf32(word) : word;
}

// ---- pixels ------------------------------------------------------------------------------------------------------

struct Place { int row, column; };  // position in a tile

// Returns the position of pixel i of the 16 pixels from `first` on, where `first` is a multiple of 16.
__device__ __forceinline__ Place place_of(int first, int i) {
    if constexpr (TQ % 16 == 0) return {first / TQ, first % TQ + i};
    else return {(first + i) / TQ, (first + i) % TQ};
}

// Returns the index of a pixel's first word in the patch.
__device__ __forceinline__ int first_word(Place pixel) {
    const int column = EXTRA + pixel.column * SW, row = pixel.row * (SH * PITCH);
    if constexpr (SHIFTED) return row + column / 2 + (column % 2 ? PATCH_SPAN : 0);
    else return row + column / EACH;
}

// Computes the sums of 16 pixels of the tile for the warp's filters. Each lane has the sums of two pixels.
__device__ __forceinline__ void multiply_pixels(float (&sums)[TILES_N][4], const u32* patch, const Place (&pixels)[2],
                                                const Filters& filters) {
    const int lane = threadIdx.x % 32;
    const u32* first = patch + first_word(pixels[0]);
    const u32* second = TQ % 16 == 0 ? first + 8 * SW / EACH : patch + first_word(pixels[1]);
#pragma unroll(HELD ? STEPS : 2)
    for (int step = 0; step < STEPS; ++step) {
        u32 a[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const WordOfPatch at = word_of_patch(word_of(step * 8 + half * 4, lane % 4));
            a[2 * half] = load_word(first, at);
            a[2 * half + 1] = load_word(second, at);
        }
#pragma unroll
        for (int j = 0; j < TILES_N; ++j) {
            const uint2 b = filters.at(step, j);
            multiply(M(), sums[j], a, b.x, b.y);
        }
    }
}

struct Output : EpilogueOperands {
    int height, width, first_filter;  // sizes of y, and the warp's first filter
    ColumnValues<2> values[TILES_N];
    float x_scale;     // with EIGHT_BITS
    const T* w_scale;  // with EIGHT_BITS; read for each pixel, because registers are few
    Program program;

    __device__ __forceinline__ void load_columns() {
#pragma unroll
        for (int j = 0; j < TILES_N; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int filter = first_filter + filter_of(j, threadIdx.x % 4 * 2 + i);
                if (filter < FILTERS) vectors().load(values[j], i, filter);
            }
    }

    // Loads what the sums of VECTOR filters from `filter` on are multiplied by.
    template <int VECTOR>
    __device__ __forceinline__ void load_factors(float (&factors)[VECTOR], int filter) const {
        constexpr int SCALES = EIGHT_BITS && W_SCALES ? VECTOR : 1;
        float scales[SCALES] = {1.0f};
        if constexpr (EIGHT_BITS) unpack(load_cached<SCALES>(w_scale + W_SCALES * filter), scales);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) factors[i] = EIGHT_BITS ? x_scale * scales[W_SCALES ? i : 0] : 1.0f;
    }

    // Applies the epilogue to the lane's sums of one pixel and stores the results: first for the group of mma tiles
    // that begins with tile FIRST, then for all later groups. A lane has two pixels; `half` is the number of this one.
    // `pixel` is the index of the pixel in y.
    template <int FIRST = 0>
    __device__ __forceinline__ void store_pixel(const float (&sums)[TILES_N][4], int pixel, int half) const {
        constexpr int SIZE = group_size(FIRST), VECTOR = 2 * SIZE < WIDTH ? 2 * SIZE : WIDTH;
        const int filter = first_filter + filter_of(FIRST, threadIdx.x % 4 * 2);
        const i64 at = i64(pixel) * FILTERS;
#pragma unroll
        for (int i = 0; i < 2 * SIZE; i += VECTOR) {
            if (FILTERS % BLOCK_N && filter + i >= FILTERS) continue;
            float added[VECTOR] = {}, results[VECTOR], factors[VECTOR];
            load_factors(factors, filter + i);
            if constexpr (HAS_RESIDUAL) unpack(load_once<VECTOR>(residual + at + filter + i), added);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                const int j = FIRST + (i + e) / 2, column = (i + e) % 2;
                const float sum = sums[j][2 * half + column] * factors[e];
                results[e] = epilogue_columns(sum, 0.0f, values[j], column, added[e], alpha, beta);
            }
            apply_program(program, {pixel, 0, at}, filter + i, results, added);
            if constexpr (STORES_Y) store<false>(y + at + filter + i, results);
        }
        if constexpr (FIRST + SIZE < TILES_N) store_pixel<FIRST + SIZE>(sums, pixel, half);
    }

    // Applies the epilogue to the lane's two pixels and stores the results, except those of a pixel outside y.
    __device__ __forceinline__ void store_pixels(const float (&sums)[TILES_N][4], const Tile& tile,
                                                 const Place (&pixels)[2]) const {
        const int origin = (tile.image * height + tile.p) * width + tile.q;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Place pixel = pixels[half];
            if (tile.p + pixel.row < height && tile.q + pixel.column < width)
                store_pixel(sums, origin + pixel.row * width + pixel.column, half);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    conv_stem(const X* x, const W* w, EpilogueOperands epilogue_operands,
              ConvSizes sizes INTEGER_PARAMETERS PROGRAM_PARAMETERS) {
    extern __shared__ __align__(16) char memory[];
    u32* weights = reinterpret_cast<u32*>(memory);
    u32* patches = weights + WEIGHT_WORDS;
    Tile* ahead = reinterpret_cast<Tile*>(patches + PATCH_WORDS);  // each patch's tile; shared memory saves registers
    // The weights in the layout of w. With HELD 0, patches overwrite them later.
    W* raw = reinterpret_cast<W*>(HELD ? weights : patches);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_filter = blockIdx.y * BLOCK_N;

    Image of{x, sizes.x.h, sizes.x.w, sizes.pads.h, (sizes.y.h + TP - 1) / TP, (sizes.y.w + TQ - 1) / TQ, {}};
    const int tiles = sizes.images * of.tiles_h * of.tiles_w;
    Output output{epilogue_operands,  sizes.y.h, sizes.y.w, first_filter + warp % WARPS_N * (TILES_N * 8), {}, {}, {},
                  {PROGRAM_ARGUMENTS}};
    Filters filters;
    const auto begin_patch = [&](int which, int index) {
        const Tile tile = of.tile(index);
        of.begin(patches + which * BUFFER, tile);
        if (threadIdx.x == 0) ahead[which] = tile;
    };

    release_successor();
    if constexpr (!WEIGHTS_CONSTANT) wait_for_predecessor();
    begin_weights(w, first_filter, raw);
    commit_copies();
    if constexpr (WEIGHTS_CONSTANT) wait_for_predecessor();
#if EIGHT_BITS
    if (X_ZERO) of.zero = *integers.x_zero;
    output.x_scale = ColumnVectors::value(integers.x_scale), output.w_scale = integers.w_scale;
#endif
    if constexpr (HELD) begin_patch(0, blockIdx.x);
    commit_copies();
    output.load_columns();
    wait_for_groups<1>();
    __syncthreads();
    filters.load({raw, epilogue_operands.bias, first_filter}, weights);
    if constexpr (!HELD) {
        __syncthreads();
        begin_patch(0, blockIdx.x);
    }

    int current = 0;
#pragma unroll 1
    for (int index = blockIdx.x; index < tiles;) {
        wait_for_copies();
        __syncthreads();  // the patch has arrived, and all threads have read the previous one
        index += gridDim.x;
        if (index < tiles) begin_patch(1 - current, index);
        const Tile tile = ahead[current];
        u32* patch = patches + current * BUFFER;
        current = 1 - current;
#if EIGHT_BITS
        of.convert(patch, patches + 2 * BUFFER, tile);
        patch = patches + 2 * BUFFER;
        __syncthreads();
#endif
        if constexpr (SHIFTED) {
            shift(patch, patch + PATCH_SPAN);
            __syncthreads();
        }
#pragma unroll 1
        for (int first = warp / WARPS_N * 16; first < PIXELS; first += 16 * WARPS_M) {
            const Place pixels[2] = {place_of(first, lane / 4), place_of(first, lane / 4 + 8)};
            float sums[TILES_N][4] = {};
            multiply_pixels(sums, patch, pixels, filters);
            output.store_pixels(sums, tile, pixels);
        }
    }
}
