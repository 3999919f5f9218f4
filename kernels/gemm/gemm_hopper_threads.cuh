// Tiles of y by wgmma and TMA on Hopper (sm_90a). Blocks are persistent: each takes every gridDim.x-th tile.
// Threads load the epilogue's operands and store y.
//
// gemm_hopper.cuh has the producer and the multiplication. This epilogue is for fp32: tiles of y in shared memory would
// leave little of that memory for the ring. Four lanes store 32 bytes of a row, a whole sector of L2. For operands of 8
// bits, gemm_hopper_eight_bits.cuh has EightBitResults and EightBitOutput in place of TileResults and FragmentOutput.
//
// Macros: those of gemm_hopper.cuh.
#pragma once
#include "gemm_hopper_along_n.cuh"
#include "gemm_hopper_fragments.cuh"

namespace {

constexpr int BARRIERS_AT = STAGES * STAGE_BYTES;
constexpr int EIGHTS = SUMS / 4;  // groups of eight columns of a wgmma per thread in an atom (its 64 rows)
// FETCHED is the number of groups whose operands are loaded before the first group is stored. Registers limit it.
constexpr int FREE = (CONSUMER_REGISTERS - ATOMS * SUMS) / ATOMS;  // registers per thread besides the accumulators
constexpr int FETCHED_ALONG_N = HAS_PROGRAM || FREE <= 64 ? 2 : FREE <= 104 ? 4 : 8;
[[maybe_unused]] constexpr int FETCHED = W_IN_REGISTERS                      ? FETCHED_ALONG_N
                                         : CONSUMERS == 3                    ? 2
                                         : ATOMS * EIGHTS > 24 || EIGHTS % 8 ? 4
                                                                             : 8;

static_assert(SPLIT_K == 1 && !GATED);

#if !EIGHT_BITS

// Applies the epilogue to an atom, and stores its results. `origin` is the atom's first row and column.
__device__ __forceinline__ void finish_atom(const float (&d)[SUMS], int2 origin, const FragmentOutput& of) {
    constexpr int DOWN = W_IN_REGISTERS ? 8 : 0, RIGHT = 8 - DOWN;  // from a group to the next
    const int thread = threadIdx.x % 128, line = thread / 32 * 16 + thread % 32 / 4, pair = thread % 4 * 2;
    int row = origin.x + (W_IN_REGISTERS ? pair : line);
    if constexpr (W_IN_REGISTERS) hopper::settle(row);  // registers do not hold the offsets of all rows for two atoms
    const int column = origin.y + (W_IN_REGISTERS ? Place().column() : pair);
#pragma unroll
    for (int first = 0; first < EIGHTS; first += FETCHED) {
        Fragment fetched[FETCHED];
#pragma unroll
        for (int i = 0; i < FETCHED; ++i) {
            fetched[i].row = row + DOWN * (first + i);
            fetched[i].column = column + RIGHT * (first + i);
            fetched[i].fetch(of);
        }
#pragma unroll
        for (int i = 0; i < FETCHED; ++i) {
            const float* group = &d[4 * (first + i)];
            const float sums[4] = {group[0], group[W_IN_REGISTERS ? 2 : 1], group[W_IN_REGISTERS ? 1 : 2], group[3]};
            fetched[i].finish(sums, sums, of);  // the second `sums` is unused
        }
    }
}

// The results of a consumer's part of a tile. `origin` is the first row and column.
template <class Output>
struct TileResults {
    const Output& of;
    int2 origin;

    __device__ __forceinline__ TileResults(const Output& of, int2 origin) : of(of), origin(origin) {}
    __device__ __forceinline__ void finish(const float (&d)[ATOMS][SUMS]) {
        constexpr int DOWN = W_IN_REGISTERS ? 0 : 64, RIGHT = 64 - DOWN;  // from an atom to the next
#pragma unroll
        for (int atom = 0; atom < ATOMS; ++atom)
            finish_atom(d[atom], {origin.x + DOWN * atom, origin.y + RIGHT * atom}, of);
    }
};

#endif

// Multiplies a consumer's tiles, and stores the results. Results: TileResults, or another class whose constructor can
// load the first operands of the epilogue before the multiplication.
template <class Results, class Output>
__device__ __forceinline__ void consume(u32 shared, const Barriers& barriers, const Tiles& tiles, int blocks,
                                        const Output& of) {
    const int consumer = warpgroup() - 1, steps = steps_of(blocks);
    const int before = PINGPONG ? 0 : consumer * CONSUMER_ROWS;  // rows of the tile, or its columns
    Ring<STAGES> ring;
    int tile = tiles.first();
    if (PINGPONG && consumer > 0) {
        tile += tiles.step();
        ring.skip(steps);
        hopper::named_barrier_arrive(turn(0), 256);
    }
    for (; tile < tiles.count(); tile += tiles.step() * (PINGPONG ? CONSUMERS : 1)) {
        const int2 origin = tiles.origin(tile);
        Results results(of, {origin.x + (W_IN_REGISTERS ? 0 : before), origin.y + (W_IN_REGISTERS ? before : 0)});
        Sum d[ATOMS][SUMS];
        const bool pass_on = tile + tiles.step() < tiles.count();
        if constexpr (IN_STAGES<X>) multiply_in_stages(d, ring, barriers, shared, before, blocks, consumer, pass_on);
        else if constexpr (W_IN_REGISTERS)
            multiply_along_n(d, ring, barriers, shared, before, steps, consumer, pass_on);
        else multiply(d, ring, barriers, shared, before, blocks, consumer, pass_on);
        if (PINGPONG) ring.skip(steps);
        results.finish(d);
    }
}

// The body of the kernel, which all threads run: y = epilogue(x w) over `blocks` blocks of k.
template <class Results, class Operands, class Output>
__device__ __forceinline__ void run_tiles(Operands operands, const Weights& weights, const Output& output, int blocks,
                                          int group_m) {
    extern __shared__ __align__(1024) char memory[];
    const u32 shared = hopper::shared_address(memory);
    const Barriers barriers{shared + BARRIERS_AT};
    if (threadIdx.x == 0) {
        hopper::prefetch(operands.x);
        hopper::prefetch(*weights.maps[0]);
    }
    init_barriers(barriers, 0);
    sync_blocks();
    const Tiles tiles(output.m, weights.columns(), group_m);
    release_successor();
    if (warpgroup() == 0) {
        hopper::give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) produce(operands, shared, barriers, tiles, int2{0, steps_of(blocks)});
        __syncwarp();
    } else {
        hopper::take_registers<CONSUMER_REGISTERS>();
        wait_for_predecessor();
        consume<Results>(shared, barriers, tiles, blocks, output);
    }
}

}  // namespace
