// Tiles of y by wgmma and TMA on Hopper (sm_90a). Blocks are persistent: each takes every gridDim.x-th tile.
//
// The producer and the multiplication are those of gemm_hopper.cuh. A consumer processes a tile in three steps:
//   1. Before it multiplies, it loads the tile's column vectors into registers, two columns per thread. Its first
//      thread starts the TMA loads of the residual into shared memory, by subtile (64 x 64 elements of y, or 64 x 32
//      if TILE_N is not a multiple of 64).
//   2. After the multiplication it stores the column vectors in shared memory. Each thread reads the values for the
//      columns of its accumulators from there.
//   3. It applies the epilogue "by fragment" (see epilogue.cuh). It reads the residual by ldmatrix, and writes y
//      in its place by stmatrix. TMA stores the subtiles, except elements outside y, while the next tile is
//      multiplied.
// With RESULTS_IN_RING, the producer loads the residual into the stage after the tile's last one, and y replaces it.
// With STORE_BY_THREADS, step 3 ends with stores by threads, row by row in words, because rows of y are not aligned.
//
// Macros: those of gemm_hopper.cuh, and
//   PROGRAM_AHEAD   1: a subtile's operands of the program (the operators that are fused into the epilogue) are loaded
//                   while the previous subtile's results are computed
#pragma once
#include "gemm_hopper.cuh"
#include "gemm_hopper_gate.cuh"

#ifndef PROGRAM_AHEAD
#define PROGRAM_AHEAD 0
#endif

// The type of y: RESULT declares y as a parameter of the kernel, and Result is its type as a member of Results.
#if STORE_BY_THREADS
#define RESULT T*
#define RESULT_REFERENCE
using Result = T*;
#else
#define RESULT const __grid_constant__ TensorMap
#define RESULT_REFERENCE &
using Result = const TensorMap*;
#endif

namespace {

constexpr int SUBTILE_N = TILE_N % 64 ? 32 : 64;
constexpr int SUBTILE_ROW_BYTES = 2 * SUBTILE_N;  // bytes of a subtile's row; TMA swizzles within rows
constexpr int SUBTILE_COLUMNS = TILE_N / SUBTILE_N;
constexpr int SUBTILES = ATOMS * SUBTILE_COLUMNS;  // subtiles per tile in a consumer's rows
static_assert(sizeof(T) == 2 && (!STORE_BY_THREADS || SUBTILE_N == 64));
static_assert(!RESULTS_IN_RING || (!STORE_BY_THREADS && 2 * TILE_M * TILE_N <= STAGE_BYTES));
constexpr int VECTORS = HAS_BIAS + HAS_EXTRA + HAS_COLUMN_SCALE;

constexpr int SUBTILE_BYTES = 64 * SUBTILE_ROW_BYTES;
constexpr int SUBTILES_AT = STAGES * STAGE_BYTES;
constexpr int VECTORS_AT = SUBTILES_AT + (RESULTS_IN_RING ? 0 : CONSUMERS * SUBTILES * SUBTILE_BYTES);
constexpr int BARRIERS_AT = VECTORS_AT + CONSUMERS * VECTORS * TILE_N * 4;

// The operands with one number per column, such as the bias, on their way to shared memory: a thread holds two numbers
// of each.
struct Vectors {
    Pair pairs[VECTORS > 0 ? VECTORS : 1];

    __device__ __forceinline__ void fetch(const T* bias, const EpilogueOperands& of, int column, int n) {
        int i = 0;
        if constexpr (HAS_BIAS) pairs[i++] = !OPTIONAL_BIAS || bias ? load_pair(bias + column, n - column) : Pair{};
        if constexpr (HAS_EXTRA) pairs[i++] = load_pair(of.extra + column, n - column);
        if constexpr (HAS_COLUMN_SCALE) pairs[i++] = load_pair(of.column_scale + column, n - column);
    }

    __device__ __forceinline__ void put(float2* vectors) const {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) vectors[i * TILE_N / 2] = widen_pair(pairs[i]);
    }
};

// Reads the column values of a thread's accumulators in a subtile: two columns of every eight. The kernel calls this
// before the first store_matrices, because later reads would have to wait for that store.
__device__ __forceinline__ void read_column_values(const float2* vectors, int column,
                                                   ColumnValues<2> (&values)[SUBTILE_N / 8]) {
    const float2* at = vectors + column / 2;
#pragma unroll
    for (int i = 0; i < SUBTILE_N / 8; ++i) {
        if constexpr (HAS_BIAS) copy_pair(at[4 * i], values[i].bias);
        if constexpr (HAS_EXTRA) copy_pair(at[HAS_BIAS * TILE_N / 2 + 4 * i], values[i].extra);
        if constexpr (HAS_COLUMN_SCALE) copy_pair(at[(HAS_BIAS + HAS_EXTRA) * TILE_N / 2 + 4 * i], values[i].scale);
    }
}

// The operands of the program (the operators that are fused into the epilogue) that a thread loads per subtile.
using SubtileLoads = ProgramLoads<HAS_PROGRAM, SUBTILE_N / 8>;

// The y and the bias of each product.
struct Results {
    Result y[PRODUCTS];
    const T* bias[PRODUCTS];  // with OPTIONAL_BIAS, null if the product has no bias
};

// Called by a warp: stores the first `left` elements of a subtile's row. `word` holds the lane's two elements, and
// `before` the two elements of the previous lane; the last lane comes before lane 0. Elements are stored in pairs that
// begin at multiples of 4 bytes. If the row begins at another address, lane 0 stores its first and last element singly.
[[maybe_unused]] __device__ __forceinline__ void store_row(u32 word, u32 before, T* to, int left) {
    const int lane = threadIdx.x % 32, odd = size_t(to) / sizeof(T) % 2;
    const u32 both = odd ? word << 16 | before >> 16 : word, high = both >> 16;
    const int first = (2 * lane - odd) & 63, second = 2 * lane + 1 - odd;
    const bool pair = first < second && second < left;
    if (pair) store_bytes<false, 4>(reinterpret_cast<char*>(to + first), &both);
    if (!pair && first < left) store_bytes<false, 2>(reinterpret_cast<char*>(to + first), &both);
    if (!pair && second < left) store_bytes<false, 2>(reinterpret_cast<char*>(to + second), &high);
}

// Loads and stores the subtile of y or of the residual at row and column `origin`, and maps columns to elements of the
// column vectors. This class is for matrices and convolutions; transposed convolutions use PhasePlace.
struct MatrixPlace {
    __device__ __forceinline__ void load(const TensorMap& from, u32 to, u32 full, int2 origin) const {
        hopper::load(from, to, full, origin.y, origin.x);
    }
    __device__ __forceinline__ void store(const TensorMap& to, u32 from, int2 origin) const {
        hopper::store(to, from, origin.y, origin.x);
    }
    static __device__ __forceinline__ int column(int column) { return column; }
};

// Computes y from a consumer's accumulators and stores it.
template <class Place>
struct Output {
    const Place& place;
    const Program& program;
    const TensorMap& residual;
    const char* results;    // the subtiles in shared memory, with TMA's swizzle
    u32 subtiles;           // the 32-bit address of the subtiles
    u32 lane_offset;        // offset of this lane's row of an 8 x 8 matrix in a subtile
    const float2* vectors;  // the column vectors in shared memory
    u32 residual_full;      // mbarrier: the tile's residual has arrived
    int thread, named;      // index of the thread in its warpgroup, and the warpgroup's named barrier
    u32 parity;

    // Returns the first row and column of the consumer's subtile i.
    static __device__ __forceinline__ int2 subtile_at(int2 origin, int i) {
        return {origin.x + i / SUBTILE_COLUMNS * 64, origin.y + i % SUBTILE_COLUMNS * SUBTILE_N};
    }

    // Called by one thread: once TMA has read the previous tile's results, overwrites them by this tile's residual.
    __device__ __forceinline__ void fetch_residual(int2 origin) const {
        hopper::store_wait_read<0>();
        hopper::barrier_arrive_expect(residual_full, SUBTILES * SUBTILE_BYTES);
#pragma unroll
        for (int i = 0; i < SUBTILES; ++i)
            place.load(residual, subtiles + i * SUBTILE_BYTES, residual_full, subtile_at(origin, i));
    }

    // Loads the operands of the epilogue's program for subtile i, if there is a subtile i.
    __device__ __forceinline__ void load_program(SubtileLoads& loads, int2 origin, int i, int m, int n) const {
        if (i >= SUBTILES) return;
        const int2 at = subtile_at(origin, i);
        loads.load(program, {at.x + thread / 32 * 16 + thread % 32 / 4, at.y + thread % 4 * 2}, m, n);
    }

    // Applies the epilogue to a warp's 16 rows of a subtile, and writes y to shared memory. `d` and `up` are the
    // thread's accumulators.
    __device__ __forceinline__ void finish_subtile(u32 subtile, const float* d, const float* up, int column,
                                                   const EpilogueOperands& of, const SubtileLoads& loads) const {
        ColumnValues<2> values[SUBTILE_N / 8];
        read_column_values(vectors, column, values);
#pragma unroll
        for (int i = 0; i < SUBTILE_N / 16; ++i) {
            const u32 address = (subtile + lane_offset) ^ i << 5;  // 16 i columns further, in swizzled rows
            float results[2][4] = {};
            u32 words[4];
            if constexpr (HAS_RESIDUAL) {
                hopper::load_matrices(address, words);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float2 both = widen_pair({words[j]});
                    results[j / 2][j % 2 * 2] = both.x;
                    results[j / 2][j % 2 * 2 + 1] = both.y;
                }
            }
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int at = 4 * (2 * i + j);
                const float added[4] = {results[j][0], results[j][1], results[j][2], results[j][3]};
                finish_four(d + at, up + at, values[2 * i + j], of.alpha, of.beta, results[j]);
                loads.apply(program, results[j], added, 2 * i + j);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) words[j] = narrow(T(), &results[j / 2][j % 2 * 2]);
            if constexpr (STORES_Y) hopper::store_matrices(address, words);
        }
    }

    // Applies the epilogue to a tile, and starts the stores of y.
    __device__ __forceinline__ void finish(const float (&d)[ATOMS][COLUMNS / 2], Result y, int2 origin, int m, int n,
                                           const EpilogueOperands& of) {
        SubtileLoads loads[1 + PROGRAM_AHEAD];
        if (PROGRAM_AHEAD) load_program(loads[0], origin, 0, m, n);
        if constexpr (HAS_RESIDUAL && !RESULTS_IN_RING) {
            hopper::barrier_wait(residual_full, parity);
            parity ^= 1;
        }
#pragma unroll
        for (int i = 0; i < SUBTILES; ++i) {
            const float* sums = &d[i / SUBTILE_COLUMNS][i % SUBTILE_COLUMNS * (SUBTILE_N / 2)];
            load_program(loads[(i + 1) % (1 + PROGRAM_AHEAD)], origin, i + PROGRAM_AHEAD, m, n);
            finish_subtile(subtiles + i * SUBTILE_BYTES, sums, sums + (GATED ? TILE_N / 2 : 0),
                           i % SUBTILE_COLUMNS * SUBTILE_N + thread % 4 * 2, of, loads[i % (1 + PROGRAM_AHEAD)]);
        }
        hopper::store_fence();
        hopper::named_barrier(named, 128);
        if constexpr (STORES_Y) store_tile(y, origin, m, n);
    }

    template <class Y>  // a template, so that the branch for the other type of y is not compiled
    __device__ __forceinline__ void store_tile(Y y, int2 origin, int m, int n) const {
        if constexpr (STORE_BY_THREADS) {
            const int lane = thread % 32, warp = thread / 32;
            const char* own = results + warp * ROW_BYTES + lane % 4 * 4;
#pragma unroll
            for (int i = 0; i < 2 * SUBTILES; ++i) {  // each step stores half of a subtile
                const int above = i / 2 / SUBTILE_COLUMNS * 64 + i % 2 * 32, row = origin.x + above + warp;
                const int column = origin.y + i / 2 % SUBTILE_COLUMNS * 64;
                u32 words[8], before[8];  // all reads come first: the compiler cannot move reads across stores
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const int offset = (i * 32 + 4 * j) * ROW_BYTES + ((lane / 4 ^ warp ^ j % 2 * 4) << 4);
                    words[j] = *reinterpret_cast<const u32*>(own + offset);
                    before[j] = __shfl_sync(0xffffffff, words[j], (lane + 31) % 32);
                }
                T* to = y + size_t(row) * n + column;
#pragma unroll
                for (int j = 0; j < 8; ++j, to += 4 * size_t(n))
                    if (row + 4 * j < m) store_row(words[j], before[j], to, n - column);
            }
            if (!HAS_RESIDUAL) return;
            hopper::store_fence();
            hopper::named_barrier(named, 128);  // before the next residual overwrites the results
        } else {
            if (thread > 0) return;
#pragma unroll
            for (int i = 0; i < SUBTILES; ++i) place.store(*y, subtiles + i * SUBTILE_BYTES, subtile_at(origin, i));
            hopper::store_commit();
        }
    }
};

// Loads a tile's residual into the stage where the tile's results replace it.
template <class Place>
struct ResidualInRing {
    const Place& place;
    const TensorMap& residual;

    __device__ __forceinline__ void fill(u32 stage, u32 full, int2 origin) const {
        if constexpr (HAS_RESIDUAL) {
            hopper::barrier_arrive_expect(full, SUBTILES * SUBTILE_BYTES);
#pragma unroll
            for (int i = 0; i < SUBTILES; ++i)
                place.load(residual, stage + i * SUBTILE_BYTES, full, Output<Place>::subtile_at(origin, i));
        } else {
            hopper::barrier_arrive(full);
        }
    }
};

template <class Place>
__device__ __forceinline__ void consume(const Place& place, const Results& results, const TensorMap& residual,
                                        char* memory, Barriers barriers, const Tiles& tiles, const Weights& weights,
                                        const EpilogueOperands& of, int m, int blocks, const Program& program,
                                        const Gate& gate) {
    const u32 shared = hopper::shared_address(memory);
    const int consumer = CONSUMERS == 1 ? 0 : warpgroup() - 1, thread = threadIdx.x % 128, lane = thread % 32;
    float2* vectors = reinterpret_cast<float2*>(memory + VECTORS_AT) + consumer * VECTORS * TILE_N / 2;
    const int row = thread / 32 * 16 + lane % 16;
    const int subtiles = SUBTILES_AT + consumer * SUBTILES * SUBTILE_BYTES;
    Output<Place> output{
        place,
        program,
        residual,
        memory + subtiles,
        shared + subtiles,
        u32(row * SUBTILE_ROW_BYTES + ((lane / 16 ^ row / (128 / SUBTILE_ROW_BYTES) % (SUBTILE_N / 8)) << 4)),
        vectors,
        barriers.first + 8 * (2 * STAGES + consumer),
        thread,
        1 + consumer,
        0};
    const int stride = tiles.step() * (PINGPONG ? CONSUMERS : 1);
    const int above = PINGPONG ? 0 : consumer * CONSUMER_ROWS;
    const int steps = steps_of(blocks);
    Ring<STAGES> ring;
    int tile = tiles.first();
    if (PINGPONG && consumer > 0) {
        tile += tiles.step();
        ring.skip(steps);
        hopper::named_barrier_arrive(turn(0), 256);
    }
    for (; tile < tiles.count(); tile += stride) {
        int2 origin = tiles.origin(tile);
        origin.x += above;
        const int product = weights.find(origin.y);
        if (HAS_RESIDUAL && !RESULTS_IN_RING && thread == 0) {
            // The residual is loaded after the tile's first x and w, which are needed earlier.
            if (!PINGPONG) hopper::barrier_wait(barriers.full(ring.at), ring.parity);
            output.fetch_residual(origin);
        }
        Vectors fetched;
        if (VECTORS > 0 && thread < TILE_N / 2)
            fetched.fetch(pick(results.bias, product), of, place.column(origin.y + 2 * thread),
                          pick(weights.n, product));
        float d[ATOMS][COLUMNS / 2];
        const bool pass_on = tile + tiles.step() < tiles.count();
#if X_GATE
        multiply_gated(d, ring, barriers, shared, above, blocks, consumer, pass_on, gate.pixels, origin.x - above);
#else
        multiply(d, ring, barriers, shared, above, blocks, consumer, pass_on);
#endif
        if (PINGPONG) ring.skip(steps);
        if constexpr (RESULTS_IN_RING) {
            hopper::barrier_wait(barriers.full(ring.at), ring.parity);
            output.subtiles = shared + ring.at * STAGE_BYTES;
        }
        if (!HAS_RESIDUAL && thread == 0) hopper::store_wait_read<0>();  // waits until TMA has read previous results
        if (VECTORS > 0 && thread < TILE_N / 2) fetched.put(vectors + thread);
        if (VECTORS > 0 || !HAS_RESIDUAL) hopper::named_barrier(output.named, 128);
        output.finish(d, pick(results.y, product), origin, m, pick(weights.n, product), of);
        if constexpr (RESULTS_IN_RING) {
            if (thread == 0) {
                hopper::store_wait_read<0>();
                hopper::barrier_arrive(barriers.empty(ring.at));
            }
            ring.next();
        }
    }
    if (thread == 0) hopper::store_wait_read<0>();
}

// The body of the kernel, which all threads run: y = epilogue(x w) over `blocks` blocks of k.
template <class Operands, class Place = MatrixPlace>
__device__ __forceinline__ void run_tiles(Operands operands, const Weights& weights, const Results& results,
                                          const TensorMap& residual, const EpilogueOperands& of, int m, int blocks,
                                          int group_m, const Place& place = {}, const Program& program = {},
                                          const Gate& gate = {}) {
    extern __shared__ __align__(1024) char memory[];
    const u32 shared = hopper::shared_address(memory);
    const Barriers barriers{shared + BARRIERS_AT};
    if (threadIdx.x == 0) {
        hopper::prefetch(operands.x);
        for (const TensorMap* map : weights.maps) hopper::prefetch(*map);
        if constexpr (GATED) hopper::prefetch(operands.up);
        if constexpr (X_GATE > 0) hopper::prefetch(*gate.factors);
        if constexpr (HAS_RESIDUAL) hopper::prefetch(residual);
#if !STORE_BY_THREADS
        for (Result each : results.y) hopper::prefetch(*each);
#endif
    }
    init_barriers(barriers, CONSUMERS);
    sync_blocks();
    const Tiles tiles(m, weights.columns(), group_m);
    release_successor();
    if (warpgroup() == 0) {
        hopper::give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0)
            produce(operands, shared, barriers, tiles, int2{0, steps_of(blocks)},
                    ResidualInRing<Place>{place, residual});
        __syncwarp();
    } else {
        hopper::take_registers<CONSUMER_REGISTERS>();
        wait_for_predecessor();
        consume(place, results, residual, memory, barriers, tiles, weights, of, m, blocks, program, gate);
    }
}

}  // namespace
