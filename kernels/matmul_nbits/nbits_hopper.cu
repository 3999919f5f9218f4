// Products of many rows of x in fp16 or bf16 with weights of 4 or 8 bits, by wgmma and TMA on Hopper (sm_90a).
//
//   y^T = w x^T + bias, where nbits.cuh defines w
//
// The weights are wgmma's left operand, which can be in registers: on their way from shared memory they become numbers
// of type T. x is the right operand, in shared memory. A block computes a tile of TILE_N columns of y, in TILE_M rows.
//   1. Two threads of the producer warpgroup each keep a ring of buffers filled by TMA. A buffer of weights has 128
//      bytes of each of the tile's rows of w; a buffer of x has 64 elements along k of each of the tile's rows of x.
//   2. Each consumer multiplies 64 * ATOMS rows of w. While wgmma multiplies the weights of one buffer of x, it converts
//      those of the next one, into other registers. K_GROUPS consumers have the same rows, and take the buffers of
//      weights in turns, because a single one would often wait for its own instructions.
//   3. The consumers write their sums to shared memory. If SPLIT_K blocks, a cluster, divide the tile's k among them,
//      each block then adds up an equal part of the rows. All consumers run the epilogue (epilogue.cuh) by row.
// A weight is rounded to T once it is multiplied by its scale, as nbits_dequantize.cu does.
//
// Macros:
//   TILE_M     rows of x in a tile: a multiple of 8, at most 256
//   CONSUMERS  warpgroups that multiply: 1, and a multiprocessor holds two blocks; or 2
//   ATOMS, K_GROUPS, SPLIT_K    1 or 2, as above
//   W_STAGES, X_STAGES   buffers of both rings
//   WIDTH      elements of an access to y, the residual and the column vectors; divides n and TILE_N
//   and those of nbits.cuh; ZEROS is 0 or 1, BLOCK_SIZE at least 32, and rows of packed zero points are whole bytes
#include "nbits.cuh"
#include "nbits_pairs.cuh"
#include "hopper.cuh"
#include "hopper_ring.cuh"

constexpr int CONSUMER_THREADS = 128 * CONSUMERS;
constexpr int ROW_GROUPS = CONSUMERS / K_GROUPS;                        // consumers with different rows
constexpr int ROWS = 64 * ATOMS * ROW_GROUPS, TILE_N = ROWS / WEIGHTS;  // ROWS: of all weights in a buffer
constexpr int ROW_BYTES = 128;                                          // of a row in a buffer; TMA swizzles them
constexpr int PART_K = 64, STAGE_K = ROW_BYTES * 8 / BITS;  // elements along k in a buffer of x, and in one of weights
constexpr int PARTS = STAGE_K / PART_K, CHUNKS = PART_K * BITS / 128;    // CHUNKS: 16-byte chunks of a row in a part
constexpr int ALL_STAGES = (K + STAGE_K - 1) / STAGE_K;                  // TMA loads zeros after the end of k
constexpr int BLOCKS = BLOCK_SIZE < STAGE_K ? STAGE_K / BLOCK_SIZE : 1;  // blocks of k in a buffer of weights
constexpr int W_BYTES = ROWS * ROW_BYTES, X_BYTES = TILE_M * ROW_BYTES;
constexpr int X_AT = W_STAGES * W_BYTES, BARRIERS_AT = X_AT + X_STAGES * X_BYTES;
constexpr int PITCH = ROWS + 4;  // floats from row to row of sums: a warp stores to different banks
constexpr int SUMS_BYTES = TILE_M * PITCH * 4;
// Registers per thread. Together, the threads have at most the registers with which the block starts: 128 for each
// thread of 256, or 168 of 384.
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : 216;
constexpr int OWN_ROWS = (TILE_M + SPLIT_K - 1) / SPLIT_K;  // rows of a tile whose results a block stores
static_assert(BITS == 4 || BITS == 8);
static_assert(BLOCK_SIZE >= 32 && ZEROS < 2 && !FLOAT8 && (ZEROS == 0 || ZERO_BITS % 8 == 0));
static_assert(K % 8 == 0 && W_ROW_BYTES % 16 == 0, "rows are whole accesses");
static_assert(N % WIDTH == 0 && TILE_N % WIDTH == 0, "vectors end with a tile");
static_assert(K_GROUPS * SUMS_BYTES <= BARRIERS_AT, "the sums take the place of the rings");
static_assert(W_STAGES >= K_GROUPS && X_STAGES >= K_GROUPS * PARTS, "no group waits for another one");
static_assert(CONSUMERS % K_GROUPS == 0);
static_assert(PARTS % 2 == 0, "registers of two parts are used in turn");

// The mbarriers of the rings: `full` is complete when TMA has filled a buffer, `empty` when all consumers have read it.
template <int FIRST, int STAGES>
struct Barriers {
    u32 shared;
    __device__ __forceinline__ u32 full(int stage) const { return shared + BARRIERS_AT + 8 * (FIRST + stage); }
    __device__ __forceinline__ u32 empty(int stage) const { return full(STAGES + stage); }
};
using OfWeights = Barriers<0, W_STAGES>;
using OfX = Barriers<2 * W_STAGES, X_STAGES>;

// The maps of the weights, in the order of Products.
#if PRODUCTS * (1 + GATED) == 3
#define WEIGHT_MAPS(before) before w, before w_2, before w_3
#elif PRODUCTS * (1 + GATED) == 2
#define WEIGHT_MAPS(before) before w, before w_2
#else
#define WEIGHT_MAPS(before) before w
#endif

// ---- the producers -------------------------------------------------------------------------------------------------

// One thread loads the weights of the stages from `range.x` up to, but without, `range.y`.
__device__ __forceinline__ void load_weights(u32 shared, const TensorMap* (&maps)[PRODUCTS * WEIGHTS], int product,
                                             int first, int2 range) {
    const OfWeights barriers{shared};
    Ring<W_STAGES> ring;
    for (int stage = range.x; stage < range.y; ++stage, ring.next()) {
        hopper::barrier_wait(barriers.empty(ring.at), ring.parity ^ 1);
        hopper::barrier_arrive_expect(barriers.full(ring.at), W_BYTES);
#pragma unroll
        for (int i = 0; i < WEIGHTS; ++i) {
            const TensorMap* map = maps[i];
#pragma unroll
            for (int other = 1; other < PRODUCTS; ++other)  // comparisons, because no index selects a register
                if (product == other) map = maps[other];
            hopper::load(*map, shared + ring.at * W_BYTES + i * TILE_N * ROW_BYTES, barriers.full(ring.at),
                         stage * (ROW_BYTES / 2), first);  // TMA takes the bytes for 16-bit elements
        }
    }
}

// One thread loads the tile's rows of x, from row `row` on, for the same stages.
__device__ __forceinline__ void load_x(u32 shared, const TensorMap& x, int row, int2 range) {
    const OfX barriers{shared};
    Ring<X_STAGES> ring;
    for (int part = range.x * PARTS; part < range.y * PARTS; ++part, ring.next()) {
        hopper::barrier_wait(barriers.empty(ring.at), ring.parity ^ 1);
        hopper::barrier_arrive_expect(barriers.full(ring.at), X_BYTES);
        hopper::load(x, shared + X_AT + ring.at * X_BYTES, barriers.full(ring.at), part * PART_K, row);
    }
}

// ---- from quantized weights to numbers -----------------------------------------------------------------------------

// The scales and zero points of the blocks of a row in a stage. A block after the row's end has those of another block.
struct RowScales {
    static constexpr int EACH = ONE_SCALE ? 1 : power_of_two(BLOCKS, BLOCKS_K);  // scales of an access
    static constexpr int ZERO_BYTES = BLOCKS * BITS < 8 ? 1 : BLOCKS * BITS / 8;
    Pack<T, EACH> scales[ONE_SCALE ? 1 : BLOCKS / EACH];
    u32 zeros;

    __device__ __forceinline__ void load(const Quantized& quantized, int row, int stage) {
        const int block = stage * STAGE_K / BLOCK_SIZE;
#pragma unroll
        for (int i = 0; i < (ONE_SCALE ? 1 : BLOCKS / EACH); ++i) {
            const int at = min(block + i * EACH, BLOCKS_K - EACH);
            scales[i] = load_cached<EACH, WEIGHTS_CONSTANT>(quantized.scale_at((long long)row * BLOCKS_K + at));
        }
        if constexpr (ZEROS == 1) {
            constexpr int ROW = ZERO_BITS / 8;
            const unsigned char* const of_row = static_cast<const unsigned char*>(quantized.zeros) +
                                                (long long)row * ROW;
            const int first = block * BITS / 8;
            if constexpr (ZERO_BYTES == 4 && ROW % 4 == 0) {
                zeros = load_part(reinterpret_cast<const unsigned*>(of_row + first));
            } else {
                zeros = 0;
#pragma unroll
                for (int i = 0; i < ZERO_BYTES; ++i)
                    zeros |= unsigned(load_part(of_row + min(first + i, ROW - 1))) << 8 * i;
            }
            if (BLOCKS * BITS < 8) zeros >>= block * BITS % 8;
        }
    }

    // Returns the scale of a block of the stage, twice.
    __device__ __forceinline__ u32 scale(int block) const {
        const u32 word = scales[ONE_SCALE ? 0 : block / EACH].words[ONE_SCALE ? 0 : block % EACH / 2];
        return select(word, word, !ONE_SCALE && block % EACH % 2 ? 0x3232 : 0x1010);
    }
    __device__ __forceinline__ u32 zero(int block) const {
        return ZEROS == 0 ? ZERO : (zeros >> block * BITS & QUANT_MASK) ^ SIGN;
    }
};

// Converts two weights of a row, elements 2 (lane % 4) and the next one of eight along k, to scaled numbers. `low` and
// `high` are the words that hold the eight weights; with 4 bits, both are the same word.
__device__ __forceinline__ u32 numbers(u32 low, u32 high, u32 zero, u32 scale) {
    const u32 lane = threadIdx.x % 4;
    u32 pair;
    if constexpr (BITS == 4 && HALF) {  // `both` is 1024 + q and 1024 + 16 q; the factors are 1 and 1/16
        const u32 both = masked_or(select(low, low, lane | lane << 8), 0x00f0000fu, LEAD);
        pair = fused_words(T(), both, 0x2c003c00u, 0xd400e400u | zero | zero << 20);
    } else if constexpr (BITS == 4) {
        const u32 both = select(low, low >> 4, lane | (4 + lane) << 8);
        pair = subtract_words(T(), masked_or(both, 0x000f000fu, LEAD), LEAD | twice(zero));
    } else {
        const u32 both = select(low, high, 2 * lane | (2 * lane + 1) << 8);
        if constexpr (HALF) {
            pair = subtract_words(T(), masked_or(both, 0x00ff00ffu, LEAD), LEAD | twice(zero));
        } else {  // bf16 has too few bits for 128 + q: the bits 0x4b000000 | q are the float 2^23 + q
            const float lead = 8388608.0f + float(zero);
            const float values[2] = {__uint_as_float(0x4b000000u | (both & 255)) - lead,
                                     __uint_as_float(0x4b000000u | (both >> 16 & 255)) - lead};
            pair = narrow(T(), values);
        }
    }
    return multiply_words(T(), pair, scale);
}

// wgmma's left operand: 64 elements along k of 64 * ATOMS rows of w. A thread holds two of every 64 rows.
using Operand = u32[ATOMS][PART_K / 16][4];

// The first row of the two that a thread holds in the first atom of its consumer; the second one is 8 rows after it.
__device__ __forceinline__ int own_row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

// The words of a part of a stage, of the two rows that a thread holds in each atom.
struct Words {
    u32 of[ATOMS][2][CHUNKS][4];

    // The consumer's rows of the stage begin at `rows`, a multiple of 1024.
    __device__ __forceinline__ void load(u32 rows, int part) {
        const int row = own_row();
#pragma unroll
        for (int atom = 0; atom < ATOMS; ++atom)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int i = 0; i < CHUNKS; ++i) {
                    const u32 from = rows + (atom * 64 + half * 8 + row) * ROW_BYTES;
                    hopper::load_vector(from + ((part * CHUNKS + i) ^ row % 8) * 16, of[atom][half][i]);
                }
    }

    __device__ __forceinline__ void convert(Operand& to, int part, const RowScales (&scales)[ATOMS][2]) const {
#pragma unroll
        for (int atom = 0; atom < ATOMS; ++atom)
#pragma unroll
            for (int step = 0; step < PART_K / 16; ++step)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int block = (part * PART_K + step * 16) / BLOCK_SIZE % BLOCKS;
                    const u32 zero = scales[atom][half].zero(block), scale = scales[atom][half].scale(block);
                    const auto& words = of[atom][half];
#pragma unroll
                    for (int eight = 0; eight < 2; ++eight) {
                        const int first = (step * 2 + eight) * (BITS / 4), second = first + BITS / 4 - 1;
                        const u32 low = words[first / 4][first % 4] ^ SIGNS,
                                  high = words[second / 4][second % 4] ^ SIGNS;
                        to[atom][step][eight * 2 + half] = numbers(low, high, zero, scale);
                    }
                }
    }
};

// ---- the consumers -------------------------------------------------------------------------------------------------

using Sums = float[ATOMS][TILE_M / 2];

// Multiplies the consumer's rows of w by the tile's rows of x, for the stages from `range.x` up to, but without,
// `range.y`.
__device__ __forceinline__ void multiply(Sums& d, u32 shared, const Products& products, const Tile<TILE_N>& tile,
                                         int consumer, int2 range) {
    const OfWeights of_weights{shared};
    const OfX of_x{shared};
    const int group = consumer / ROW_GROUPS, first = range.x + group;
    const int thread = threadIdx.x % 128, own = consumer % ROW_GROUPS * ATOMS * 64 + own_row();
    RowScales scales[ATOMS][2], ahead[ATOMS][2];
    const auto load = [&](int stage) {
#pragma unroll
        for (int atom = 0; atom < ATOMS; ++atom)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = own + atom * 64 + half * 8;
                const bool is_up = GATED && row >= TILE_N;  // a row of the second weight
                ahead[atom][half].load(is_up ? products.of[WEIGHTS - 1].quantized : tile.own.quantized,
                                       min(tile.first + row - (is_up ? TILE_N : 0), tile.columns - 1), stage);
            }
    };
    if (first < range.y) load(first);
    const u64 x = hopper::matrix_descriptor<ROW_BYTES>(shared + X_AT, 16, 8 * ROW_BYTES);
    Operand operands[2];
    Ring<W_STAGES> of_stages;
    Ring<X_STAGES> of_parts;
    of_stages.skip(group), of_parts.skip(group * PARTS);
    u32 before = 0;
#pragma unroll 1
    for (int stage = first; stage < range.y; stage += K_GROUPS, of_stages.skip(K_GROUPS)) {
#pragma unroll
        for (int atom = 0; atom < ATOMS; ++atom)
#pragma unroll
            for (int half = 0; half < 2; ++half) scales[atom][half] = ahead[atom][half];
        if (stage + K_GROUPS < range.y) load(stage + K_GROUPS);
        const u32 rows = shared + of_stages.at * W_BYTES + consumer % ROW_GROUPS * ATOMS * 64 * ROW_BYTES;
        hopper::barrier_wait(of_weights.full(of_stages.at), of_stages.parity);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            Operand& numbers = operands[part % 2];
            Words words;
            words.load(rows, part);
            words.convert(numbers, part, scales);
            hopper::barrier_wait(of_x.full(of_parts.at), of_parts.parity);
            const u64 stage_of_x = hopper::moved(x, of_parts.at * X_BYTES);
            hopper::wgmma_fence();
#pragma unroll
            for (int step = 0; step < PART_K / 16; ++step)
#pragma unroll
                for (int atom = 0; atom < ATOMS; ++atom)
                    hopper::wgmma<false>(T(), d[atom], numbers[atom][step], hopper::moved(stage_of_x, step * 32),
                                         stage > first || part > 0 || step > 0);
            hopper::wgmma_commit();
            hopper::wgmma_wait<1>();
            if (before && thread == 0) hopper::barrier_arrive(before);
            before = of_x.empty(of_parts.at);
            of_parts.next();
        }
        __syncwarp();  // all lanes have read the weights
        if (threadIdx.x % 32 == 0) hopper::barrier_arrive(of_weights.empty(of_stages.at));
        of_parts.skip((K_GROUPS - 1) * PARTS);
    }
    hopper::wgmma_wait<0>();
#pragma unroll
    for (int atom = 0; atom < ATOMS; ++atom) hopper::settle(d[atom]);
}

// Returns the sums of W columns of a row. All blocks of the cluster have parts of them in their shared memory, a part
// of each group of consumers: the first one's at `address`.
template <int W>
__device__ __forceinline__ void add_up(u32 address, float (&sums)[W]) {
    constexpr int EACH = W % 4 ? 1 : 4;
#pragma unroll
    for (int i = 0; i < W; i += EACH) {
        float total[EACH] = {};
#pragma unroll
        for (int part = 0; part < SPLIT_K * K_GROUPS; ++part) {
            float more[EACH];
            hopper::load_at(address + part % K_GROUPS * SUMS_BYTES + i * 4, part / K_GROUPS, more);
#pragma unroll
            for (int j = 0; j < EACH; ++j) total[j] += more[j];
        }
#pragma unroll
        for (int j = 0; j < EACH; ++j) sums[i + j] = total[j];
    }
}

__device__ __forceinline__ void store_sums(const Sums& d, u32 shared, int consumer) {
    const int row = consumer % ROW_GROUPS * ATOMS * 64 + own_row();
    const u32 to = shared + consumer / ROW_GROUPS * SUMS_BYTES;
#pragma unroll
    for (int atom = 0; atom < ATOMS; ++atom)
#pragma unroll
        for (int i = 0; i < TILE_M / 2; ++i) {
            const int of_x = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2, of_w = row + atom * 64 + i % 4 / 2 * 8;
            hopper::store_word(to + (of_x * PITCH + of_w) * 4, __float_as_uint(d[atom][i]));
        }
}

// ---- the kernel ----------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(128 + CONSUMER_THREADS, CONSUMERS == 1 ? 2 : 1)
    nbits_hopper(const __grid_constant__ TensorMap x, WEIGHT_MAPS(const __grid_constant__ TensorMap),
                 const __grid_constant__ Products products, const T* residual, int m PROGRAM_PARAMETERS) {
    extern __shared__ __align__(1024) char memory[];
    const u32 shared = hopper::shared_address(memory);
    const int split = blockIdx.x % SPLIT_K, row = blockIdx.z * TILE_M, group = warpgroup();
    const Tile<TILE_N> tile(products, blockIdx.x / SPLIT_K);
    const int2 range{ALL_STAGES * split / SPLIT_K, ALL_STAGES * (split + 1) / SPLIT_K};
    if (threadIdx.x < 2 * (W_STAGES + X_STAGES)) {  // before each ring's `empty` ones, its `full` ones
        const int i = threadIdx.x, of_x = i - 2 * W_STAGES;
        const int arrivals = of_x >= X_STAGES ? ROW_GROUPS : of_x < 0 && i >= W_STAGES ? ROW_GROUPS * 4 : 1;
        hopper::barrier_init(OfWeights{shared}.full(i), arrivals);
        hopper::barrier_init_fence();
    }
    if constexpr (SPLIT_K > 1) hopper::cluster_barrier_relaxed();
    else __syncthreads();
    release_successor();
    if (group == 0) {
        hopper::give_registers<PRODUCER_REGISTERS>();
        const TensorMap* maps[PRODUCTS * WEIGHTS] = {WEIGHT_MAPS(&)};
        if (threadIdx.x == 0) {
            if constexpr (!WEIGHTS_CONSTANT) wait_for_predecessor();
            load_weights(shared, maps, tile.product, tile.first, range);
        } else if (threadIdx.x == 32) {
            wait_for_predecessor();
            load_x(shared, x, row, range);
        }
        __syncwarp();
        if constexpr (SPLIT_K > 1) {
            hopper::cluster_barrier();  // the consumers arrive at the same barriers
            hopper::cluster_barrier_relaxed();
        }
        return;
    }
    hopper::take_registers<CONSUMER_REGISTERS>();
    const int consumer = group - 1;
    if constexpr (!WEIGHTS_CONSTANT) wait_for_predecessor();
    Sums d;  // each consumer has a stage, whose first wgmma writes it
    multiply(d, shared, products, tile, consumer, range);
    if constexpr (WEIGHTS_CONSTANT) wait_for_predecessor();
    hopper::named_barrier(1, CONSUMER_THREADS);  // no consumer reads the rings any more
    store_sums(d, shared, consumer);
    if constexpr (SPLIT_K > 1) hopper::cluster_barrier();
    else hopper::named_barrier(1, CONSUMER_THREADS);

    const Epilogue epilogue{
        tile.own.bias, products.of[WEIGHTS - 1].bias, nullptr, residual, tile.own.y, 0.0f, 0.0f, {PROGRAM_ARGUMENTS}};
    constexpr int VECTORS = TILE_N / WIDTH;
    for (int i = threadIdx.x - 128; i < OWN_ROWS * VECTORS; i += CONSUMER_THREADS) {
        const int own = split * OWN_ROWS + i / VECTORS, column = i % VECTORS * WIDTH;
        if (own >= TILE_M || row + own >= m || tile.first + column >= tile.columns) continue;
        const u32 from = shared + (own * PITCH + column) * 4;
        float values[WIDTH], ups[WIDTH] = {};
        add_up(from, values);
        if constexpr (GATED) add_up(from + TILE_N * 4, ups);
        epilogue.finish(values, ups, (long long)(row + own), tile.first + column, tile.columns);
    }
    if constexpr (SPLIT_K > 1) hopper::cluster_barrier_relaxed();  // no block ends while others read its sums
}
