// Tiles of y by wgmma and TMA on Hopper (sm_90a). Blocks are persistent: each takes every gridDim.x-th tile.
// Threads load the epilogue's operands and store y.
//
// gemm_hopper.cuh has the producer and the multiplication. This epilogue is for fp32: tiles of y in shared memory would
// leave little of that memory for the ring. Four lanes store 32 bytes of a row, a whole sector of L2. For operands of 8
// bits, gemm_hopper_eight_bits.cuh has another finish_atom, and EightBitOutput in place of FragmentOutput.
//
// Macros: those of gemm_hopper.cuh.
#pragma once
#include "gemm_hopper_fragments.cuh"

namespace {

constexpr int BARRIERS_AT = STAGES * STAGE_BYTES;
constexpr int EIGHTS = TILE_N / 8;  // groups of eight columns per thread in an atom (the 64 rows of a wgmma)
// The number of groups whose operands are loaded before the first group is stored. Registers limit it.
[[maybe_unused]] constexpr int FETCHED = CONSUMERS == 3 ? 2 : ATOMS * EIGHTS > 24 || EIGHTS % 8 ? 4 : 8;

static_assert(SPLIT_K == 1 && PRODUCTS == 1 && !GATED);

#if !EIGHT_BITS

// Applies the epilogue to the 64 rows of an atom, and stores them. `origin` is the atom's first row and column.
__device__ __forceinline__ void finish_atom(const float (&d)[COLUMNS / 2], int2 origin, const FragmentOutput& of) {
    const int thread = threadIdx.x % 128;
    const int row = origin.x + thread / 32 * 16 + thread % 32 / 4, column = origin.y + thread % 4 * 2;
#pragma unroll
    for (int first = 0; first < EIGHTS; first += FETCHED) {
        Fragment fetched[FETCHED];
#pragma unroll
        for (int i = 0; i < FETCHED; ++i) {
            fetched[i].row = row;
            fetched[i].column = column + 8 * (first + i);
            fetched[i].fetch(of);
        }
#pragma unroll
        for (int i = 0; i < FETCHED; ++i) {
            const float* sums = &d[4 * (first + i)];
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
    const int above = PINGPONG ? 0 : consumer * CONSUMER_ROWS;
    Ring<STAGES> ring;
    int tile = tiles.first();
    if (PINGPONG && consumer > 0) {
        tile += tiles.step();
        ring.skip(steps);
        hopper::named_barrier_arrive(turn(0), 256);
    }
    for (; tile < tiles.count(); tile += tiles.step() * (PINGPONG ? CONSUMERS : 1)) {
        const int2 origin = tiles.origin(tile);
        Sum d[ATOMS][COLUMNS / 2];
        const bool pass_on = tile + tiles.step() < tiles.count();
        if constexpr (IN_STAGES<X>) multiply_in_stages(d, ring, barriers, shared, above, blocks, consumer, pass_on);
        else multiply(d, ring, barriers, shared, above, blocks, consumer, pass_on);
        if (PINGPONG) ring.skip(steps);
#pragma unroll
        for (int atom = 0; atom < ATOMS; ++atom) finish_atom(d[atom], {origin.x + above + 64 * atom, origin.y}, of);
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
