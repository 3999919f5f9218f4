// Tiles of y by wgmma and TMA on Hopper (sm_90a). Blocks are persistent: each takes every gridDim.x-th tile.
// Threads load the epilogue's operands and store y.
//
// gemm_hopper.cuh has the producer and the multiplication. This epilogue is for fp32: tiles of y in shared memory would
// leave little of that memory for the ring. Four lanes store 32 bytes of a row, a whole sector of L2. For operands of 8
// bits, gemm_hopper_eight_bits.cuh has another finish_atom, and EightBitOutput in place of FragmentOutput.
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

#endif

// Multiplies a consumer's tiles, and stores the results by atoms of 64 rows. Output: FragmentOutput, or another class
// for which there is an overload of finish_atom.
template <class Output>
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
        Sum d[ATOMS][SUMS];
        const bool pass_on = tile + tiles.step() < tiles.count();
        if constexpr (IN_STAGES<X>) multiply_in_stages(d, ring, barriers, shared, before, blocks, consumer, pass_on);
        else if constexpr (W_IN_REGISTERS)
            multiply_along_n(d, ring, barriers, shared, before, steps, consumer, pass_on);
        else multiply(d, ring, barriers, shared, before, blocks, consumer, pass_on);
        if (PINGPONG) ring.skip(steps);
#pragma unroll
        for (int atom = 0; atom < ATOMS; ++atom) {
            const int at = before + 64 * atom;
            finish_atom(d[atom], {origin.x + (W_IN_REGISTERS ? 0 : at), origin.y + (W_IN_REGISTERS ? at : 0)}, of);
        }
    }
}

// The body of the kernel, which all threads run: y = epilogue(x w) over `blocks` blocks of k.
template <class Operands, class Output>
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
        consume(shared, barriers, tiles, blocks, output);
    }
}

}  // namespace
