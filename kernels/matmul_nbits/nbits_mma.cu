// Products of few rows of x in fp16 or bf16 with weights of 4 or 8 bits, by mma.sync, from sm_80 on.
//
//   y = x w^T + bias, where nbits.cuh defines w; a gated product has a second weight
//
// The kernel takes as long as reading the weights once, so every warp keeps DEPTH stages of weights in flight from
// memory to shared memory. A stage holds, for all rows of a tile, 128 bytes of k and their scales and zero points. With
// STAGED_X, it also holds the elements of x by which these weights are multiplied.
//   1. The blocks process tiles in turn; within a tile, the WARPS warps of a block process stages of k in turn. A
//      warp's copies go on from tile to tile, and only the warp itself waits for them.
//   2. The weights are mma's left operand: 16 rows of w, and 16 of k, so that tiles of 8 rows of x suffice. Four lanes
//      share 32 elements along k, in an order that only has to be the same in both operands. In the order that is used,
//      the weights that a lane multiplies fill one word, or two words if weights have 8 bits.
//   3. The bits of a weight are inserted into the mantissa of a power of two, and the zero point is subtracted from
//      the result; both steps are exact. The sums of a block of k are multiplied by its scale in fp32.
//   4. The warps' sums of a tile are added up in shared memory, and all threads run the epilogue (epilogue.cuh) by row.
// The rows of a second weight follow those of the first in each stage.
// For one row of x and weights of 4 bits, nbits_one_row.cuh takes the place of steps 2 and 3.
//
// Macros:
//   TILE_M   rows of x: 1, 2, 4 or a multiple of 8    TILE_N   columns of y, a multiple of 16
//   WARPS, DEPTH   as above
//   AHEAD    stages, at most DEPTH, whose weights a warp requests before x; x arrives after them
//   ONE_ROUND  1: a block has one tile, and each of its warps at most DEPTH stages of it
//   STAGED_X   1: a stage has its elements of x, and TILE_M is at most 8; 0: x is read from L1, or is normalized
//   NORM       1: the rows of x are normalized first (norm_of_rows.cuh), and are kept in shared memory
//   MIN_BLOCKS   blocks that should fit on a multiprocessor
//   SHARED_BYTES   the dynamic shared memory of a block
//   WIDTH    elements of an access to y, the residual and the column vectors; divides n and TILE_N
//   and those of nbits.cuh; BLOCK_SIZE is at least 32, and rows of packed zero points are whole bytes
#include "nbits.cuh"
#include "nbits_pairs.cuh"
#include "finish_rows.cuh"
#include "gemm_multiply.cuh"

#define ONE_ROW (TILE_M == 1 && BITS == 4)  // see nbits_one_row.cuh

constexpr int THREADS = 32 * WARPS;
constexpr int EACH_N = TILE_N / 16;  // mma tiles of one weight
constexpr int MMA_N = EACH_N * WEIGHTS, MMA_M = (TILE_M + 7) / 8;
constexpr int ROWS = 16 * MMA_N;  // rows of weights in a stage
constexpr int STAGE_BYTES = 128, STAGE_K = STAGE_BYTES * 8 / BITS;
constexpr int STAGES = (K + STAGE_K - 1) / STAGE_K;  // stages of a row of w, without the padding after k
constexpr int BLOCKS = BLOCK_SIZE < STAGE_K ? STAGE_K / BLOCK_SIZE : 1;  // blocks of k in a stage; each has a scale
constexpr int SCALE_BYTES = BLOCKS * 2;
constexpr int PACKED_BYTES = BLOCKS * BITS < 8 ? 1 : BLOCKS * BITS / 8;
constexpr int ZERO_BYTES = ZEROS == 0 ? 0 : ZEROS == 1 ? PACKED_BYTES : SCALE_BYTES;
constexpr int SCALES_AT = ROWS * STAGE_BYTES, ZEROS_AT = SCALES_AT + ROWS * SCALE_BYTES;  // offsets in a stage
constexpr int X_AT = (ZEROS_AT + ROWS * ZERO_BYTES + 127) / 128 * 128;
constexpr int X_PITCH = 2 * STAGE_K + (TILE_M == 1 ? 0 : 64);  // bytes per row of x; two rows are in different banks
constexpr int X_PARTS = STAGE_K / 8, X_VECTORS = (TILE_M * X_PARTS + 31) / 32;  // vectors of x per row, and per lane
constexpr int AT_ONCE = STAGED_X && DEPTH * X_VECTORS > 16 ? 16 / X_VECTORS : DEPTH;  // stages of x held in registers
constexpr int SLOT_BYTES = (X_AT + (STAGED_X ? TILE_M * X_PITCH : 0) + 127) / 128 * 128;
constexpr bool X_IN_PAIRS = ONE_ROW && (NORM || ONE_ROUND);  // shared memory has elements in the pairs of `in_pairs`
constexpr int PITCH = ROWS + 4;  // floats from row to row of sums: a warp stores to different banks
constexpr int SUM_ROWS = ONE_ROW ? 1 : 8 * MMA_M;
constexpr int tiles_of(int columns) { return (columns + TILE_N - 1) / TILE_N; }
#if PRODUCTS == 3
constexpr int TILES = tiles_of(GEMM_N) + tiles_of(GEMM_N_2) + tiles_of(GEMM_N_3);
constexpr bool WHOLE_TILES = GEMM_N % TILE_N == 0 && GEMM_N_2 % TILE_N == 0 && GEMM_N_3 % TILE_N == 0;
#elif PRODUCTS == 2
constexpr int TILES = tiles_of(GEMM_N) + tiles_of(GEMM_N_2);
constexpr bool WHOLE_TILES = GEMM_N % TILE_N == 0 && GEMM_N_2 % TILE_N == 0;
#else
constexpr int TILES = tiles_of(GEMM_N);
constexpr bool WHOLE_TILES = GEMM_N % TILE_N == 0;
#endif
static_assert(BITS == 4 || BITS == 8, "see above");
static_assert(BLOCK_SIZE >= 32, "mma adds 16 of k, of four lanes");
static_assert(N % WIDTH == 0 && TILE_N % WIDTH == 0, "vectors end with a tile");
static_assert(K % 8 == 0 && W_ROW_BYTES % 16 == 0, "rows are whole accesses");
static_assert(ZEROS != 1 || ZERO_BITS % 8 == 0, "see above");
static_assert(!STAGED_X && !NORM || TILE_M <= 8, "lanes take the elements of eight rows");
static_assert(!STAGED_X || !NORM, "normalized rows are not in stages");

using Partial = float[WARPS][SUM_ROWS][PITCH];  // each warp's sums of a tile
#if NORM
constexpr int NORM_ROWS = TILE_M, NORM_PITCH = 2 * STAGE_K * STAGES + (TILE_M == 1 ? 0 : 64);  // as of X_PITCH
constexpr int NORM_BYTES = (TILE_M * NORM_PITCH + 127) / 128 * 128;
#include "norm_of_rows.cuh"
#else
#define NORM_PARAMETERS
constexpr int NORM_BYTES = 0;
[[maybe_unused]] constexpr int NORM_PITCH = 0;
#endif
static_assert(WARPS * DEPTH * SLOT_BYTES + 2 * sizeof(Partial) + NORM_BYTES == SHARED_BYTES,
              "the host knows this layout");

// ---- copies to shared memory ---------------------------------------------------------------------------------------

template <int BYTES>
__device__ __forceinline__ void store_shared(unsigned to, unsigned bits) {
    if constexpr (BYTES == 2) asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"((unsigned short)bits) : "memory");
    else asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "r"(bits) : "memory");
}

template <int BYTES>
__device__ __forceinline__ unsigned load_shared(unsigned from) {
    unsigned bits;
    if constexpr (BYTES == 2) {
        unsigned short half;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(from));
        bits = half;
    } else asm volatile("ld.shared.u8 %0, [%1];" : "=r"(bits) : "r"(from));
    return bits;
}

// The offset of a 16-byte chunk of a row of weights with ONE_ROW: four chunks of two neighbouring rows are in different
// banks.
__device__ __forceinline__ int chunk_offset(int row, int chunk) {
    return row * STAGE_BYTES + (chunk ^ (row << 2 & 4 | row >> 1 & 3)) * 16;
}

// Copies BYTES bytes, from `offset` on, of each of TILE_N rows. The rows have ROW_PITCH bytes and begin with row
// `first`. From row `end` on, row `end` - 1 is copied instead, and bytes after a row's end are zeros. With SWIZZLED,
// the 16-byte chunks of a row are permuted.
template <int BYTES, int ROW_PITCH, bool SWIZZLED>
__device__ __forceinline__ void copy_rows(unsigned to, const void* base, int first, int end, int offset) {
    constexpr int ACCESS = power_of_two(power_of_two(16, BYTES), ROW_PITCH), PARTS = BYTES / ACCESS, STEP = 32 / PARTS;
    const int lane = threadIdx.x % 32, own = lane / PARTS, part = lane % PARTS, byte = offset + part * ACCESS;
    const bool inside = ROW_PITCH % BYTES == 0 || byte < ROW_PITCH;
    const char* const column = static_cast<const char*>(base) + (inside ? byte : 0);
    const char* const from_own = column + (long long)(first + own) * ROW_PITCH;
#pragma unroll
    for (int i = 0; i < (TILE_N + STEP - 1) / STEP; ++i) {
        const int row = own + i * STEP;
        if (TILE_N % STEP && row >= TILE_N) break;
        const char* from = from_own + i * STEP * ROW_PITCH;
        if (!WHOLE_TILES) from = column + (long long)min(first + row, end - 1) * ROW_PITCH;
        unsigned place = to + (SWIZZLED ? swizzled_offset<BYTES>(row, part) : row * BYTES + part * ACCESS);
        if constexpr (SWIZZLED && ONE_ROW) place = to + chunk_offset(row, part);
        if constexpr (ACCESS >= 4) copy_async<ACCESS>(place, from, inside ? ACCESS : 0);
        else {
            unsigned bits = 0;
            if (inside) {
                if constexpr (ACCESS == 2) bits = load_part(reinterpret_cast<const unsigned short*>(from));
                else bits = load_part(reinterpret_cast<const unsigned char*>(from));
            }
            store_shared<ACCESS>(place, bits);
        }
    }
}

// Pairs the elements of x as `numbers` pairs the weights of a word with 4 bits: (0, 4), (1, 5), (2, 6), (3, 7).
__device__ __forceinline__ void in_pairs(const unsigned (&words)[4], unsigned (&to)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = select(words[i / 2], words[i / 2 + 2], i % 2 ? 0x7632 : 0x5410);
}

// Stores a vector of x. With X_IN_PAIRS, both pairs that an mma multiplies become neighbours: 0 and 2, then 1 and 3.
__device__ __forceinline__ void store_x(unsigned to, const unsigned (&words)[4]) {
    if constexpr (X_IN_PAIRS) {
        unsigned pairs[4];
        in_pairs(words, pairs);
        const unsigned stored[4] = {pairs[0], pairs[2], pairs[1], pairs[3]};
        store_chunk(to, stored);
    } else {
        store_chunk(to, words);
    }
}

// One of a lane's vectors of x in a stage; elements after a row's end are zeros.
struct VectorOfX {
    long long from;
    unsigned to;  // offset in a Slot
    bool exists, inside;

    __device__ __forceinline__ VectorOfX(int i, int rows, int stage) {
        const int at = i * 32 + threadIdx.x % 32, row = at / X_PARTS, part = at % X_PARTS;
        const int k = stage * STAGE_K + part * 8;
        from = (long long)row * K + k, to = X_AT + row * X_PITCH + part * 16;
        exists = TILE_M * X_PARTS % 32 == 0 || row < TILE_M, inside = row < rows && (K % STAGE_K == 0 || k < K);
    }
};

// A buffer in shared memory for one of a warp's stages: rows of weights, then rows of scales, of zero points and of x.
// Its address `base` is a multiple of 128.
struct Slot {
    unsigned base;

    // Copies a stage of TILE_N rows, from row `first` on, of weight number `weight`; this weight has `end` rows.
    __device__ __forceinline__ void fill(const Quantized& quantized, int weight, int first, int end, int stage) const {
        const int block = stage * STAGE_K / BLOCK_SIZE, row = weight * TILE_N;
        copy_rows<STAGE_BYTES, W_ROW_BYTES, true>(base + row * STAGE_BYTES, quantized.w, first, end,
                                                  stage * STAGE_BYTES);
        copy_rows<SCALE_BYTES, BLOCKS_K * 2, false>(base + SCALES_AT + row * SCALE_BYTES, quantized.scales, first, end,
                                                    block * 2);
        const unsigned zeros = base + ZEROS_AT + row * ZERO_BYTES;
        if constexpr (ZEROS == 1)
            copy_rows<PACKED_BYTES, ZERO_BITS / 8, false>(zeros, quantized.zeros, first, end, block * BITS / 8);
        if constexpr (ZEROS == 2)
            copy_rows<SCALE_BYTES, BLOCKS_K * 2, false>(zeros, quantized.zeros, first, end, block * 2);
    }

    // Copies the stage's part of `rows` rows of x.
    __device__ __forceinline__ void fill_x(const T* x, int rows, int stage) const {
#pragma unroll
        for (int i = 0; i < X_VECTORS; ++i) {
            const VectorOfX vector(i, rows, stage);
            const char* from = reinterpret_cast<const char*>(vector.inside ? x + vector.from : x);
            if (vector.exists) copy_async<16>(base + vector.to, from, vector.inside ? 16 : 0);
        }
    }

    // Returns this lane's word of a 16-byte chunk. The lane's row is one of the eight rows that begin at 8 * `eight`.
    __device__ __forceinline__ unsigned word(int eight, int chunk) const {
        const unsigned group = threadIdx.x % 32 / 4, first = base + group * (STAGE_BYTES + 16) + threadIdx.x % 4 * 4;
        return load_word((first ^ chunk * 16) + eight * 8 * STAGE_BYTES);  // swizzled as by swizzled_offset
    }

    // Loads a chunk of this lane's row, with ONE_ROW.
    __device__ __forceinline__ void load_chunk(int eight, int chunk, unsigned (&to)[4]) const {
        const unsigned first = base + chunk_offset(threadIdx.x % 32 / 4, 0);
        load_words((first ^ chunk * 16) + eight * 8 * STAGE_BYTES, to);
    }

    __device__ __forceinline__ static int row_of_lane(int eight) { return eight * 8 + threadIdx.x % 32 / 4; }

    // Returns the address of a scale, or of a zero point of type T.
    __device__ __forceinline__ unsigned scale_at(int eight, int block, int from = SCALES_AT) const {
        return base + from + row_of_lane(eight) * SCALE_BYTES + block * 2;
    }

    __device__ __forceinline__ float scale(int eight, int block) const {
        return first_of(load_shared<2>(scale_at(eight, block)));
    }

    // Returns the zero point: an integer or, with ZEROS 2, the bits of a T.
    __device__ __forceinline__ unsigned zero(int eight, int block, int stage) const {
        if constexpr (ZEROS == 0) return ZERO;
        if constexpr (ZEROS == 2) return load_shared<2>(scale_at(eight, block, ZEROS_AT));
        const unsigned from = base + ZEROS_AT + row_of_lane(eight) * ZERO_BYTES;
        const int bit = (BLOCKS * BITS < 8 ? stage * STAGE_K / BLOCK_SIZE * BITS % 8 : 0) + block * BITS;
        return (load_shared<1>(from + bit / 8) >> bit % 8 & QUANT_MASK) ^ SIGN;
    }

    __device__ __forceinline__ float zero_value(int eight, int block, int stage) const {
        const unsigned found = zero(eight, block, stage);
        return ZEROS == 2 ? first_of(found) : static_cast<float>(found);
    }

private:
    __device__ __forceinline__ static float first_of(unsigned word) {
        float both[2];
        widen(T(), word, both);
        return both[0];
    }
};

// ---- pairs of numbers ----------------------------------------------------------------------------------------------

// In NEAR, a pair of 64 in fp16, the last bit of the mantissa has the value 1 / 16, so NEAR | 16 q is NEAR + q.
constexpr unsigned NEAR = 0x54005400u;

// The numbers that are subtracted from pairs of a block's weights: LEAD or NEAR plus the zero point, or, if that sum is
// not exact, first LEAD or NEAR and then `zero`.
struct Offsets {
    unsigned lead, near, zero;

    __device__ __forceinline__ explicit Offsets(unsigned given) {
        if constexpr (ZEROS == 2) {
            lead = LEAD, near = NEAR, zero = twice(given);
        } else if constexpr (BITS == 8 && !HALF) {  // bf16 has too few bits for 128 + the zero point
            const float both[2] = {static_cast<float>(given), static_cast<float>(given)};
            lead = LEAD, near = 0, zero = narrow(T(), both);
        } else {
            lead = LEAD | twice(given), near = NEAR | twice(given << 4), zero = 0;
        }
    }
};

// Masks that select a weight in each half of a word. They must stay in registers, because an instruction has room for
// one constant only. The argument m is not negative, so m >> 31 is 0 and does not change the masks; but the compiler
// does not know this, and therefore does not load them as constants again for each instruction.
struct Masks {
    unsigned low, high;

    __device__ __forceinline__ explicit Masks(int m) : low(0x000f000fu | m >> 31), high(0x00f000f0u | m >> 31) {}
};

// Converts a lane's eight weights, its share of 32 weights along k, to pairs of numbers. With 4 bits, one word has all
// eight weights, and the pairs are (0, 4), (1, 5), (2, 6), (3, 7). With 8 bits, each of two words has four weights, in
// the pairs (0, 1) and (2, 3).
__device__ __forceinline__ void numbers(const unsigned (&words)[BITS / 4], const Masks& masks, const Offsets& offsets,
                                        unsigned (&to)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (BITS == 4 && HALF) {
            const unsigned word = i < 2 ? words[0] : words[0] >> 8;
            to[i] = i % 2 ? subtract_words(T(), masked_or(word, masks.high, NEAR), offsets.near)
                          : subtract_words(T(), masked_or(word, masks.low, LEAD), offsets.lead);
        } else if constexpr (BITS == 4) {
            to[i] = subtract_words(T(), masked_or(words[0] >> 4 * i, masks.low, LEAD), offsets.lead);
        } else if constexpr (HALF) {
            to[i] = subtract_words(T(), select(words[i / 2], LEAD, i % 2 ? 0x5352 : 0x5150), offsets.lead);
        } else {  // 16 * high + (low - zero), for the halves of a byte: exact in bf16's 8 bits of mantissa
            const unsigned bytes = select(words[i / 2], 0u, i % 2 ? 0x4342 : 0x4140);
            const unsigned high = subtract_words(T(), masked_or(bytes >> 4, masks.low, LEAD), LEAD);
            unsigned low = subtract_words(T(), masked_or(bytes, masks.low, LEAD), LEAD);
            if constexpr (ZEROS != 2) low = subtract_words(T(), low, offsets.zero);
            to[i] = fused_words(bf16(), high, 0x41804180u, low);
        }
        if constexpr (ZEROS == 2) to[i] = subtract_words(T(), to[i], offsets.zero);
    }
}

// ---- products ------------------------------------------------------------------------------------------------------

// Eight elements of a row of x: a lane's share of 32 along k, in the same pairs in which `numbers` returns weights.
struct Elements {
    unsigned pairs[4];

    // Loads eight neighbouring elements from shared memory, for ONE_ROW.
    __device__ __forceinline__ void load_eight(unsigned from) {
        unsigned words[4];
        load_words(from, words);
        if constexpr (X_IN_PAIRS)
#pragma unroll
            for (int i = 0; i < 4; ++i) pairs[i] = words[i % 2 * 2 + i / 2];
        else take(words);
    }

    // Loads the elements from shared memory, where a stage of the row begins at `row`.
    __device__ __forceinline__ void load(unsigned row, int chunk) {
        const unsigned from = row + threadIdx.x % 4 * (BITS == 4 ? 16 : 8);
        unsigned words[4];
        if constexpr (BITS == 4) {
            load_words(from + chunk * 64, words);
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                unsigned half[2];
                load_words(from + chunk * 64 + i * 32, half);
                words[2 * i] = half[0], words[2 * i + 1] = half[1];
            }
        }
        take(words);
    }

    // Loads the elements from memory. `x` points to the first of the 32 elements; the row ends `count` elements later.
    __device__ __forceinline__ void load(const T* x, int count) {
        const int part = threadIdx.x % 4;
        if constexpr (BITS == 4) {
            Pack<T, 8> read = {};
            if (K % STAGE_K == 0 || part * 8 < count) read = load_cached<8>(x + part * 8);
            take(read.words);
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                Pack<T, 4> half = {};
                if (K % STAGE_K == 0 || i * 16 + part * 4 < count) half = load_cached<4>(x + i * 16 + part * 4);
                pairs[2 * i] = half.words[0], pairs[2 * i + 1] = half.words[1];
            }
        }
    }

    __device__ __forceinline__ void take(const unsigned (&words)[4]) {
        if constexpr (BITS == 4) in_pairs(words, pairs);
        else
#pragma unroll
            for (int i = 0; i < 4; ++i) pairs[i] = words[i];
    }
};

#if ONE_ROW
#include "nbits_one_row.cuh"
#else
struct TileSums {
    static constexpr int CHUNKS = STAGE_K / 32, CHUNKS_OF_BLOCK = BLOCK_SIZE / 32;
    float of[MMA_N][MMA_M][4] = {};

    // Adds the products of a stage with a tile's `rows` rows of x. With STAGED_X or NORM, the stage's elements of the
    // rows begin at address `shared`. A lane whose row does not exist reads an existing one, and its sums are not used.
    __device__ __forceinline__ void add_stage(const Slot& slot, unsigned shared, int stage, const Masks& masks,
                                              const T* x, int rows) {
        const T* row_of[MMA_M];
        const int group = threadIdx.x % 32 / 4;
#pragma unroll
        for (int m = 0; m < MMA_M; ++m) {
            row_of[m] = x + (min(m * 8 + group, rows - 1) * K + stage * STAGE_K);
            asm volatile("" : "+l"(row_of[m]));  // makes offsets of chunks constants in load instructions
        }
        const unsigned own_row = shared + group % TILE_M * (NORM ? NORM_PITCH : X_PITCH);
        float block_sums[MMA_N][MMA_M][4] = {};
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const int block = chunk * 32 / BLOCK_SIZE % BLOCKS, left = K - stage * STAGE_K - chunk * 32;
            Elements elements[MMA_M];
#pragma unroll
            for (int m = 0; m < MMA_M; ++m)
                if constexpr (STAGED_X || NORM) elements[m].load(own_row, chunk);
                else elements[m].load(row_of[m] + chunk * 32, left);
#pragma unroll
            for (int n = 0; n < MMA_N; ++n) {
                unsigned pairs[2][4];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    unsigned words[BITS / 4];
#pragma unroll
                    for (int i = 0; i < BITS / 4; ++i)
                        words[i] = slot.word(2 * n + half, chunk * (BITS / 4) + i) ^ SIGNS;
                    numbers(words, masks, Offsets(slot.zero(2 * n + half, block, stage)), pairs[half]);
                }
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    const unsigned a[4] = {pairs[0][i], pairs[1][i], pairs[0][i + 1], pairs[1][i + 1]};
#pragma unroll
                    for (int m = 0; m < MMA_M; ++m)
                        multiply(T(), block_sums[n][m], a, elements[m].pairs[i], elements[m].pairs[i + 1]);
                }
            }
            if ((chunk + 1) % CHUNKS_OF_BLOCK && chunk + 1 < CHUNKS) continue;
#pragma unroll
            for (int n = 0; n < MMA_N; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float scale = slot.scale(2 * n + half, block);
#pragma unroll
                    for (int m = 0; m < MMA_M; ++m)
#pragma unroll
                        for (int i = 2 * half; i < 2 * half + 2; ++i) {
                            of[n][m][i] += scale * block_sums[n][m][i];
                            block_sums[n][m][i] = 0.0f;
                        }
                }
        }
    }

    // Writes a warp's sums to shared memory. With TILE_M 1, odd rows are not stored, so that the compiler leaves out
    // their sums.
    __device__ __forceinline__ void store(float (&to)[SUM_ROWS][PITCH]) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < MMA_N; ++n)
#pragma unroll
            for (int i = 0; i < MMA_M * 4; i += TILE_M == 1 ? 2 : 1)
                to[i / 4 * 8 + lane % 4 * 2 + i % 2][n * 16 + lane / 4 + i % 4 / 2 * 8] = of[n][i / 4][i % 4];
    }
};
#endif

// ---- the first stages ----------------------------------------------------------------------------------------------

// The position of a stage: its tile, and its number in the tile. A warp goes on from a tile's last stage to the next
// tile.
struct Place {
    int tile, stage;

    __device__ __forceinline__ void step() {
        stage += WARPS;
        if (stage >= STAGES) tile += gridDim.x, stage = threadIdx.x / 32;
    }
};

// Writes the x of a warp's first DEPTH stages, from `place` on, to shared memory through registers. Asynchronous copies
// arrive in the order in which they start. So a copy of x would arrive only after the weights of all these stages,
// whose copies start before the previous kernel ends.
__device__ __forceinline__ void store_first_x(unsigned slots, const T* x, int rows, Place place) {
#pragma unroll
    for (int i = 0; i < DEPTH; i += AT_ONCE) {
        Pack<T, 8> read[AT_ONCE][X_VECTORS] = {};
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j, place.step())
#pragma unroll
            for (int v = 0; v < X_VECTORS; ++v) {
                const VectorOfX vector(v, rows, place.stage);
                if (place.tile < TILES && vector.inside) read[j][v] = load_cached<8>(x + vector.from);
            }
#pragma unroll
        for (int j = 0; j < AT_ONCE && i + j < DEPTH; ++j)
#pragma unroll
            for (int v = 0; v < X_VECTORS; ++v) {
                const VectorOfX vector(v, rows, 0);
                if (vector.exists) store_x(slots + (i + j) * SLOT_BYTES + vector.to, read[j][v].words);
            }
    }
}

// ---- the kernel ----------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    nbits_mma(const T* x, const __grid_constant__ Products products, const T* residual,
              int m NORM_PARAMETERS PROGRAM_PARAMETERS) {
    extern __shared__ __align__(128) char memory[];
    Partial* const partial = reinterpret_cast<Partial*>(memory + WARPS * DEPTH * SLOT_BYTES);
    const int warp = threadIdx.x / 32, row = blockIdx.y * TILE_M, rows = min(m - row, TILE_M);
    const unsigned slots = shared_address(memory) + warp * DEPTH * SLOT_BYTES;
    const unsigned normalized = shared_address(memory) + WARPS * DEPTH * SLOT_BYTES + 2 * sizeof(Partial);
    if constexpr (!NORM) x += (long long)row * K;
    release_successor();

    const auto fill = [&](unsigned slot, Place place) {
        if (place.tile >= TILES) return;
        const Tile<TILE_N> tile(products, place.tile);
        Slot{slot}.fill(tile.own.quantized, 0, tile.first, tile.columns, place.stage);
        if constexpr (GATED)
            Slot{slot}.fill(products.of[WEIGHTS - 1].quantized, 1, tile.first, tile.columns, place.stage);
    };
    const Place first{warp < STAGES ? int(blockIdx.x) : TILES, warp};
    Place ahead = first;
    if constexpr (!WEIGHTS_CONSTANT) wait_for_predecessor();
    const auto fill_first = [&](int begin, int end) {
#pragma unroll
        for (int i = begin; i < end; ++i, ahead.step()) fill(slots + i * SLOT_BYTES, ahead), commit_copies();
    };
    fill_first(0, AHEAD);
#if NORM
    NormalizedRows of_norm;
    of_norm.load_scales(norm);
#endif
    if constexpr (WEIGHTS_CONSTANT) wait_for_predecessor();
    if constexpr (STAGED_X) store_first_x(slots, x, rows, first);
#if NORM
    of_norm.normalize(partial[0][0][0], x, norm, row, rows,
                      [&](int at, const unsigned (&words)[4]) { store_x(normalized + at, words); });
#endif
    fill_first(AHEAD, DEPTH);

    const Masks masks(m);
    int slot = 0, buffer = 0;
#pragma unroll 1
    for (int at = blockIdx.x; at < TILES; at += gridDim.x, buffer ^= 1) {
        TileSums sums;
#pragma unroll 1
        for (int stage = warp; stage < STAGES; stage += WARPS, ahead.step()) {
            const unsigned read = slots + slot * SLOT_BYTES;
            wait_for_groups<DEPTH - 1>();
            __syncwarp();
            const unsigned shared = NORM ? normalized + stage * 2 * STAGE_K : read + X_AT;
#if ONE_ROW
            sums.add_stage(Slot{read}, shared, stage, masks);
#else
            sums.add_stage(Slot{read}, shared, stage, masks, x, rows);
#endif
            __syncwarp();
            if constexpr (!ONE_ROUND) {
                fill(read, ahead);
                if (STAGED_X && ahead.tile < TILES) Slot{read}.fill_x(x, rows, ahead.stage);
            }
            commit_copies();
            slot = slot + 1 == DEPTH ? 0 : slot + 1;
        }
        sums.store(partial[buffer][warp]);
        __syncthreads();
        const Tile<TILE_N> tile(products, at);
        const Epilogue epilogue{
            tile.own.bias,      products.of[WEIGHTS - 1].bias, nullptr, residual, tile.own.y, 0.0f, 0.0f,
            {PROGRAM_ARGUMENTS}};
        const auto sums_of = [&](int i, int j, float (&values)[WIDTH], float (&ups)[WIDTH]) {
#pragma unroll
            for (int v = 0; v < WIDTH; ++v) {
                values[v] = ups[v] = 0.0f;
#pragma unroll
                for (int other = 0; other < WARPS; ++other) {
                    values[v] += partial[buffer][other][i][j + v];
                    if constexpr (GATED) ups[v] += partial[buffer][other][i][TILE_N + j + v];
                }
            }
        };
        finish_rows<TILE_N, THREADS, TILE_M, WHOLE_TILES>(epilogue, row, rows, tile.first, tile.columns, sums_of);
        if constexpr (ONE_ROUND) break;
    }
}
