// The main loop of the Hopper GEMMs and convolutions (sm_90a): a producer keeps a ring of operand tiles filled by TMA,
// and consumers multiply the tiles by wgmma. gemm_hopper_tiles.cuh, gemm_hopper_threads.cuh and gemm_hopper_split.cuh
// add the epilogues. gemm_operands.cuh, conv_operands.cuh and conv_transpose_operands.cuh load x and w.
//
// x is m x k, y and residual are m x n, all row-major; w and up are k x n, or n x k if TRANSPOSED. Products are summed
// in fp32, and epilogue.cuh computes the epilogue. If T is fp32, TMA rounds x and w to TF32 on their way to shared
// memory. wgmma reads TF32 operands in shared memory only along k, so weights that are k x n come through registers
// (gemm_hopper_along_n.cuh). x and w can also have 8 bits (gemm_hopper_eight_bits.cuh); TRANSPOSED is 1 for them.
//
// A stage of the ring holds 128 bytes of k (64 elements, 32 in fp32, or 128 of 8 bits) for TILE_M rows of x and TILE_N
// columns of w (and of up). It consists of blocks of K_BLOCK elements of k. TMA swizzles a block's rows for wgmma.
// Each stage has two mbarriers: the producer waits for `empty`; consumers wait for `full`, which completes when all
// bytes have arrived. Warpgroup 0 is the producer, and one of its threads issues all loads; warpgroups 1 to CONSUMERS
// multiply.
// The producer gives registers to the consumers (setmaxnreg).
//
// Macros:
//   TILE_M, TILE_N   rows and columns of y in a tile. GATED: a tile has two products of that size, side by side
//   PINGPONG    1: each consumer has its own tiles; one runs its epilogue while the other multiplies
//               0: the consumers share a tile; each computes an equal part of its rows (CUTLASS: cooperative), or of its
//               columns if W_IN_REGISTERS
//   CONSUMERS   warpgroups that multiply: 2; or 3, which share a tile; or 1, if a multiprocessor has two blocks
//   STAGES      number of stages of the ring
//   K_BLOCK     elements of k per block of a stage: 128 bytes; or 64 or 32 bytes, if TRANSPOSED and not GATED
//   SPLIT_K     blocks per cluster, which share a tile; each has a slice of k. 1 except in gemm_hopper_split.cu
//   PRODUCTS    number of products of x, each with its own weight, n, y and bias: 1 to 3. If above 1, GATED is 0,
//               and the epilogue has at most a bias
//   STORE_BY_THREADS   0: n is a multiple of 8, and TMA stores y. 1: rows of y and the column vectors can begin at any
//               element, and threads store y. For both, operands that TMA reads have rows of multiples of 16 bytes
//   WEIGHTS_CONSTANT   1: no kernel writes the weights, so the first stages are read before the previous kernel ends
//   OPERAND     s8 or u8: the type of x; w is s8, and sums are int32. e4m3: the type of x and w; sums are fp32. If not
//               defined, x and w have type T
//   X_GATE      1: x is multiplied by a gate first (gemm_hopper_gate.cuh). 0, or not defined: no gate
//   and the macros of epilogue.cuh
#pragma once
#include "types.cuh"
#include "epilogue.cuh"
#include "hopper.cuh"
#include "hopper_ring.cuh"

#ifndef X_GATE
#define X_GATE 0
#endif
#ifdef OPERAND
#define EIGHT_BITS 1
#else
#define EIGHT_BITS 0
#define OPERAND T
#endif

namespace {

template <class Element> struct SumOf { using Type = float; };
template <> struct SumOf<s8> { using Type = int; };
template <> struct SumOf<u8> { using Type = int; };
// Whether products are summed by multiply_in_stages.
template <class Element> constexpr bool IN_STAGES = false;
template <> constexpr bool IN_STAGES<e4m3> = true;

using X = OPERAND;           // type of the elements of x in shared memory
using Sum = SumOf<X>::Type;  // type of the accumulators

constexpr int ROW_BYTES = 128;  // bytes per row of a box that TMA swizzles
constexpr int TILE_K = ROW_BYTES / sizeof(X);
constexpr int K_BYTES = 32;                                     // bytes of k per wgmma
constexpr int BLOCKS = TILE_K / K_BLOCK;                        // blocks of k per stage
constexpr int BLOCK_ROW_BYTES = sizeof(X) * K_BLOCK;            // bytes of a block's row; TMA swizzles within rows
constexpr int COLUMNS = TILE_N * (1 + GATED);                   // columns of accumulators: first for w, then for up
constexpr bool W_IN_REGISTERS = sizeof(X) == 4 && !TRANSPOSED;  // wgmma's rows are then columns of w, see above
// The rows of a tile that a consumer computes. With W_IN_REGISTERS: its columns.
constexpr int CONSUMER_ROWS = (W_IN_REGISTERS ? TILE_N : TILE_M) / (PINGPONG ? 1 : CONSUMERS);
constexpr int ATOMS = CONSUMER_ROWS / 64;  // atoms of a consumer: the 64 rows of one wgmma are an atom
constexpr int SUMS = (W_IN_REGISTERS ? TILE_M : COLUMNS) / 2;  // accumulators of a thread per atom
// Registers per thread. A block uses at most the 65536 registers of a multiprocessor, 128 * (40 + 2 * 232) or
// 128 * (32 + 3 * 160), or at most half of them if two blocks share it: 128 * (40 + 216).
constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 40;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : CONSUMERS == 2 ? 232 : 216;
constexpr int BLOCKS_PER_SM = CONSUMERS == 1 ? 2 : 1;
constexpr bool RESULTS_IN_RING = CONSUMERS == 1;  // the stage after a tile's last one holds the tile's residual and y

constexpr int X_BYTES = TILE_M * ROW_BYTES;
constexpr int FACTORS_AT = X_BYTES + COLUMNS * ROW_BYTES;  // offset of gate factors in a stage
constexpr int GATE_IMAGES = 8;                             // maximum images per tile, with X_GATE
constexpr int STAGE_BYTES = FACTORS_AT + X_GATE * GATE_IMAGES * ROW_BYTES;
static_assert((K_BLOCK == TILE_K && sizeof(X) == 2) ||
              ((TRANSPOSED || (W_IN_REGISTERS && K_BLOCK == TILE_K)) && !GATED));
static_assert(TILE_M % 64 == 0 && TILE_N % (TRANSPOSED && !GATED ? 32 : 64) == 0 && COLUMNS <= 256);
static_assert(PINGPONG ? CONSUMERS == 2 : CONSUMER_ROWS % 64 == 0);
static_assert(PRODUCTS == 1 || !(GATED || HAS_EXTRA || HAS_COLUMN_SCALE || HAS_RESIDUAL || SPLIT_K > 1));

// The mbarriers: `full` of a stage is complete when TMA has filled it, `empty` when the consumers have read it.
struct Barriers {
    u32 first;
    __device__ __forceinline__ u32 full(int stage) const { return first + 8 * stage; }
    __device__ __forceinline__ u32 empty(int stage) const { return first + 8 * (STAGES + stage); }
};

// The arrivals by which a consumer releases a stage. Registers are loaded by each warp at its own pace.
constexpr int RELEASES = W_IN_REGISTERS ? 4 : 1;

// Called by all threads: initialises the stages' mbarriers, and after them `more` mbarriers that one arrival completes.
// The threads of the block must synchronise afterwards.
__device__ __forceinline__ void init_barriers(const Barriers& barriers, int more) {
    const int i = int(threadIdx.x) - 128;  // one thread per mbarrier, outside the producer warpgroup
    if (i < 0 || i >= 2 * STAGES + more) return;
    const bool empty = i >= STAGES && i < 2 * STAGES;
    hopper::barrier_init(barriers.first + 8 * i, empty ? RELEASES * (PINGPONG ? 1 : CONSUMERS) : 1);
    hopper::barrier_init_fence();
}

// Called by all threads after init_barriers. Afterwards all threads see the mbarriers, and all blocks that share the
// tile have started.
__device__ __forceinline__ void sync_blocks() {
    if constexpr (SPLIT_K > 1) hopper::cluster_barrier_relaxed();
    else __syncthreads();
}

// Selects the value of one product; a run-time index would move the array to local memory.
template <class Value>
__device__ __forceinline__ Value pick(const Value (&of)[PRODUCTS], int product) {
    Value found = of[0];
#pragma unroll
    for (int i = 1; i < PRODUCTS; ++i)
        if (product == i) found = of[i];
    return found;
}

// The weights of all products. The tiles of the products lie side by side, so the columns of a product are numbered
// after the columns of the products before it.
struct Weights {
    const TensorMap* maps[PRODUCTS];
    int n[PRODUCTS];

    static __device__ __forceinline__ int columns_of(int n) { return (n + TILE_N - 1) / TILE_N; }
    __device__ __forceinline__ int columns() const {
        int sum = 0;
#pragma unroll
        for (int i = 0; i < PRODUCTS; ++i) sum += columns_of(n[i]);
        return sum;
    }
    // Returns the index of the product that contains `column`, and converts `column` to a column of this product.
    __device__ __forceinline__ int find(int& column) const {
        int product = 0;
#pragma unroll
        for (int i = 0; i < PRODUCTS - 1; ++i) {
            const int width = columns_of(n[i]) * TILE_N;
            if (column < width) break;
            column -= width;
            ++product;
        }
        return product;
    }
};

// The order of tiles: down `group_m` rows of tiles, then right, so that concurrent tiles share operands in L2.
struct Tiles {
    int rows, columns, group_m;

    __device__ __forceinline__ Tiles(int m, int columns, int group_m)
        : rows((m + TILE_M - 1) / TILE_M), columns(columns), group_m(group_m) {}

    __device__ __forceinline__ int first() const { return blockIdx.x / SPLIT_K; }
    __device__ __forceinline__ int step() const { return gridDim.x / SPLIT_K; }
    __device__ __forceinline__ int count() const { return rows * columns; }

    // Returns the first row and column of a tile.
    __device__ __forceinline__ int2 origin(int tile) const {
        const int group = tile / (group_m * columns), within = tile - group * group_m * columns;
        const int height = min(group_m, rows - group * group_m);
        return {(group * group_m + within % height) * TILE_M, within / height * TILE_N};
    }
};

// The gate by which x is multiplied: the `pixels` rows of x of an image share k factors. Only used with X_GATE.
struct Gate {
    const TensorMap* factors;  // TMA map of the factors, images x k
    int pixels;
};

// Loads the columns of a tile of w (n x k) at k, from `column` on. Columns of operands of 8 bits come in the order of
// gemm_hopper_eight_bits.cuh.
[[maybe_unused]] __device__ __forceinline__ void load_columns(const TensorMap& w, u32 to, u32 full, int k, int column) {
#if EIGHT_BITS && WIDTH >= 4
#pragma unroll
    for (int i = 0; i < TILE_N; i += 4 * WIDTH)
        hopper::load(w, to + i * BLOCK_ROW_BYTES, full, k, 0, (column + i) / WIDTH, 0);
#else
    hopper::load(w, to, full, k, column);
#endif
}

// ---- the producer ------------------------------------------------------------------------------------------------

// The default of InRing in `produce`, for kernels without RESULTS_IN_RING: their stages hold no tile's results, and
// `produce` does not call `fill`.
struct NoResults {
    __device__ __forceinline__ void fill(u32 stage, u32 full, int2 origin) const {}
};

// Called by one thread: fills stages for all tiles of the block. `range`: the first step along k, and the step after
// the last. Operands: MatrixOperands of gemm_operands.cuh or its counterpart for convolutions.
template <class Operands, class InRing = NoResults>
__device__ __forceinline__ void produce(Operands operands, u32 shared, const Barriers& barriers, const Tiles& tiles,
                                        int2 range, const InRing& results = {}) {
    int ahead = 0;  // number of stages whose weights are already being loaded, but whose x is not
    if (WEIGHTS_CONSTANT && tiles.first() < tiles.count()) {
        operands.begin(tiles.origin(tiles.first()));
        for (; ahead < min(STAGES, range.y - range.x); ++ahead) {
            const u32 stage = shared + ahead * STAGE_BYTES, full = barriers.full(ahead);
            hopper::barrier_arrive_expect(full, operands.bytes(range.x + ahead));
            operands.load_weights(stage, full, range.x + ahead);
        }
    }
    wait_for_predecessor();
    Ring<STAGES> ring;
    for (int tile = tiles.first(); tile < tiles.count(); tile += tiles.step()) {
        operands.begin(tiles.origin(tile));
        for (int step = range.x; step < range.y; ++step) {
            const u32 stage = shared + ring.at * STAGE_BYTES, full = barriers.full(ring.at);
            if (WEIGHTS_CONSTANT && ahead > 0) {
                --ahead;
            } else {
                hopper::barrier_wait(barriers.empty(ring.at), ring.parity ^ 1);
                hopper::barrier_arrive_expect(full, operands.bytes(step));
                operands.load_weights(stage, full, step);
            }
            operands.load_x(stage, full, step);
            ring.next();
        }
        if constexpr (RESULTS_IN_RING) {
            hopper::barrier_wait(barriers.empty(ring.at), ring.parity ^ 1);
            results.fill(shared + ring.at * STAGE_BYTES, barriers.full(ring.at), tiles.origin(tile));
            ring.next();
        }
    }
}

// ---- the consumers ----------------------------------------------------------------------------------------------

// Each of the named barriers 1 to CONSUMERS synchronises the threads of one consumer. With PINGPONG, two more named
// barriers signal which consumer is allowed to multiply. The mbarriers of the stages do not suffice for this: a
// consumer does not wait for the other consumer's stages, so it would not notice an mbarrier that advances by two
// phases, to the same parity.
__device__ __forceinline__ int turn(int consumer) { return 1 + CONSUMERS + consumer; }

__device__ __forceinline__ u64 with_low(u64 descriptor, u32 low) { return (descriptor >> 32) << 32 | low; }

// The number of stages that hold `blocks` blocks of k.
__device__ __forceinline__ int steps_of(int blocks) { return (blocks + BLOCKS - 1) / BLOCKS; }

// Sums the products over `blocks` blocks of k for this consumer's rows, from `first_row` on. A stage is released once
// the next stage's wgmmas are in flight. `pass_on`: the other consumer has a tile after this one.
template <bool ALONG_N = !TRANSPOSED>
__device__ __forceinline__ void multiply(Sum (&d)[ATOMS][SUMS], Ring<STAGES>& ring, const Barriers& barriers,
                                         u32 shared, int first_row, int blocks, int consumer, bool pass_on) {
    const int thread = threadIdx.x % 128, steps = steps_of(blocks);
    const u64 x =
        hopper::matrix_descriptor<BLOCK_ROW_BYTES>(shared + first_row * BLOCK_ROW_BYTES, 16, 8 * BLOCK_ROW_BYTES);
    const u64 w = hopper::matrix_descriptor<BLOCK_ROW_BYTES>(shared + X_BYTES, TRANSPOSED ? 16 : TILE_K * ROW_BYTES,
                                                             8 * BLOCK_ROW_BYTES);
    constexpr int X_STEP = K_BYTES / 16, W_STEP = (TRANSPOSED ? K_BYTES : 16 * ROW_BYTES) / 16;  // in units of 16 bytes
    constexpr int X_BLOCK = TILE_M * BLOCK_ROW_BYTES / 16, W_BLOCK = TILE_N * BLOCK_ROW_BYTES / 16;
    const u32 x_low = u32(x), w_low = u32(w);  // only the low words of descriptors change: they hold the addresses
    u32 before = 0;
    if constexpr (PINGPONG) hopper::named_barrier(turn(consumer), 256);
    for (int step = 0; step < steps; ++step) {
        hopper::barrier_wait(barriers.full(ring.at), ring.parity);
        if (PINGPONG && pass_on && step == steps - 1) hopper::named_barrier_arrive(turn(1 - consumer), 256);
        const u32 stage = ring.at * (STAGE_BYTES / 16);
        hopper::wgmma_fence();
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            if (BLOCKS > 1 && step * BLOCKS + block >= blocks) break;
#pragma unroll
            for (int i = 0; i < BLOCK_ROW_BYTES / K_BYTES; ++i)
#pragma unroll
                for (int atom = 0; atom < ATOMS; ++atom)
                    hopper::wgmma<ALONG_N>(
                        X(), d[atom],
                        with_low(x, x_low + stage + block * X_BLOCK + i * X_STEP + atom * (64 * BLOCK_ROW_BYTES / 16)),
                        with_low(w, w_low + stage + block * W_BLOCK + i * W_STEP), step > 0 || block > 0 || i > 0);
        }
        hopper::wgmma_commit();
        hopper::wgmma_wait<1>();
        if (step > 0 && thread == 0) hopper::barrier_arrive(before);
        before = barriers.empty(ring.at);
        ring.next();
    }
    hopper::wgmma_wait<0>();
    if (thread == 0) hopper::barrier_arrive(before);
#pragma unroll
    for (int atom = 0; atom < ATOMS; ++atom) hopper::settle(d[atom]);
}

// The counterpart of `multiply` for e4m3. wgmma truncates the sums of these products to about 14 bits: a sum of equal
// products would stop growing at 2^13 of them. So each stage, with 128 elements of k, has sums of its own, which are
// then added in fp32, while the wgmmas of another consumer are in flight.
__device__ __forceinline__ void multiply_in_stages(Sum (&d)[ATOMS][SUMS], Ring<STAGES>& ring, const Barriers& barriers,
                                                   u32 shared, int first_row, int blocks, int consumer, bool pass_on) {
    const int steps = steps_of(blocks);
    const u64 x =
        hopper::matrix_descriptor<BLOCK_ROW_BYTES>(shared + first_row * BLOCK_ROW_BYTES, 16, 8 * BLOCK_ROW_BYTES);
    const u64 w = hopper::matrix_descriptor<BLOCK_ROW_BYTES>(shared + X_BYTES, 16, 8 * BLOCK_ROW_BYTES);
    if constexpr (PINGPONG) hopper::named_barrier(turn(consumer), 256);
#pragma unroll
    for (int atom = 0; atom < ATOMS; ++atom)
#pragma unroll
        for (int i = 0; i < SUMS; ++i) d[atom][i] = 0;
    for (int step = 0; step < steps; ++step) {
        Sum sums[ATOMS][SUMS];
        hopper::barrier_wait(barriers.full(ring.at), ring.parity);
        if (PINGPONG && pass_on && step == steps - 1) hopper::named_barrier_arrive(turn(1 - consumer), 256);
        hopper::wgmma_fence();
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            if (BLOCKS > 1 && step * BLOCKS + block >= blocks) break;
            const u32 x_at = ring.at * STAGE_BYTES + block * TILE_M * BLOCK_ROW_BYTES;
            const u32 w_at = ring.at * STAGE_BYTES + block * TILE_N * BLOCK_ROW_BYTES;
#pragma unroll
            for (int i = 0; i < BLOCK_ROW_BYTES / K_BYTES; ++i)
#pragma unroll
                for (int atom = 0; atom < ATOMS; ++atom)
                    hopper::wgmma<false>(X(), sums[atom],
                                         hopper::moved(x, x_at + i * K_BYTES + atom * 64 * BLOCK_ROW_BYTES),
                                         hopper::moved(w, w_at + i * K_BYTES), block > 0 || i > 0);
        }
        hopper::wgmma_commit();
        hopper::wgmma_wait<0>();
        if (threadIdx.x % 128 == 0) hopper::barrier_arrive(barriers.empty(ring.at));
        ring.next();
#pragma unroll
        for (int atom = 0; atom < ATOMS; ++atom) {
            hopper::settle(sums[atom]);
#pragma unroll
            for (int i = 0; i < SUMS; ++i) d[atom][i] += sums[atom][i];
        }
    }
}

using Pair = Pack<T, 2>;

__device__ __forceinline__ float2 widen_pair(const Pair& pair) {
    float both[2];
    unpack(pair, both);
    return {both[0], both[1]};
}

__device__ __forceinline__ void copy_pair(float2 both, float (&to)[2]) {
    to[0] = both.x;
    to[1] = both.y;
}

// Loads two neighbouring elements of a row that has `left` elements from `from` on; elements beyond its end are zeros.
template <class Element>
__device__ __forceinline__ Pack<Element, 2> load_pair(const Element* from, int left) {
    if constexpr (!STORE_BY_THREADS) return left > 0 ? load_cached<2>(from) : Pack<Element, 2>{};
    const u32 first = left > 0 ? load_cached<1>(from).words[0] : 0;
    const u32 second = left > 1 ? load_cached<1>(from + 1).words[0] : 0;
    if constexpr (sizeof(Element) == 2) return {second << 16 | first};
    else return {first, second};
}

// The epilogue for four accumulators of a thread, in wgmma's order: two columns of two rows; `y` holds the residual.
__device__ __forceinline__ void finish_four(const float* d, const float* up, const ColumnValues<2>& values, float alpha,
                                            float beta, float (&y)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = epilogue_columns(d[i], up[i], values, i % 2, y[i], alpha, beta);
}

// A thread has two adjacent columns of two rows; this is the distance of the rows.
constexpr int ROW_STEP = W_IN_REGISTERS ? 1 : 8;

// A thread's operands of the program (the operators that are fused into the epilogue) for COUNT groups of four results:
// two columns of two rows, as in finish_four. The groups are eight columns apart.
template <bool PRESENT, int COUNT>
struct ProgramLoads {
    __device__ __forceinline__ void load(const Program& program, int2 at, int m, int n) {}
    __device__ __forceinline__ void apply(const Program& program, float (&y)[4], const float* residual, int i) const {}
};

template <int COUNT>
struct ProgramLoads<true, COUNT> {
    static constexpr bool ALIGNED = !STORE_BY_THREADS;
    Program::OfRow of_row[2];
    Program::OfColumns<2> of_columns[COUNT];
    Program::OfElements<2> of_elements[COUNT][2];
    long long at;              // the index, in y, of the thread's first element
    int rows, columns, pitch;  // rows and columns of y from this element on, and elements per row

    // `from` is the first row and column; y has m rows and n columns.
    __device__ __forceinline__ void load(const Program& program, int2 from, int m, int n) {
        at = (long long)from.x * n + from.y, rows = m - from.x, columns = n - from.y, pitch = n;
#pragma unroll
        for (int row = 0; row < 2; ++row) program.load(of_row[row], from.x + ROW_STEP * row, ROW_STEP * row < rows);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            program.load<ALIGNED>(of_columns[i], from.y + 8 * i, columns - 8 * i);
#pragma unroll
            for (int row = 0; row < 2; ++row)
                program.load<ALIGNED>(of_elements[i][row], from.x + ROW_STEP * row, from.y + 8 * i, index(i, row),
                                      left(i, row));
        }
    }

    // Applies the program (the operators that are fused into the epilogue) to the results of group i, in place.
    __device__ __forceinline__ void apply(const Program& program, float (&y)[4], const float* residual, int i) const {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            float both[2] = {y[2 * row], y[2 * row + 1]};
            const float added[2] = {residual[2 * row], residual[2 * row + 1]};
            program.apply<ALIGNED>(both, added, of_row[row], of_columns[i], of_elements[i][row], index(i, row),
                                   left(i, row));
            y[2 * row] = both[0];
            y[2 * row + 1] = both[1];
        }
    }

private:
    __device__ __forceinline__ long long index(int i, int row) const {
        return at + (row ? (long long)ROW_STEP * pitch : 0) + 8 * i;
    }
    __device__ __forceinline__ int left(int i, int row) const { return ROW_STEP * row < rows ? columns - 8 * i : 0; }
};

}  // namespace
