// The multiplication of TF32 operands whose weights are k x n, for gemm_hopper_threads.cuh.
//
// wgmma reads TF32 operands in shared memory only along k. So it computes the transposed tile, w^T x^T: x is its operand
// in shared memory, and each thread loads its elements of w^T into registers. Boxes of w have 32 columns. Which column is
// which row of an atom is free, see Place: rows r and r + 8 of a warp's sixteen rows are neighbouring columns of w, which
// a thread loads at once, and stores at once in the end.
//
// Macros: those of gemm_hopper.cuh.
#pragma once
#include "gemm_hopper.cuh"

namespace {

// A thread's two columns among the 64 columns of an atom: a half of a chunk of 16 bytes. A warp has eight chunks of a
// box, four of them twice eight bytes wide apart, so that the sixteen lanes of a phase, which read four rows of k, meet
// all banks once under TMA's swizzle.
struct Place {
    int chunk, half, box;

    __device__ __forceinline__ Place() {
        const int warp = threadIdx.x / 32 % 4, line = threadIdx.x % 32 / 4;
        box = warp / 2;
        chunk = warp % 2 * 2 + line / 4 + line % 2 * 4;
        half = line / 2 % 2;
    }
    __device__ __forceinline__ int column() const { return 32 * box + 4 * chunk + 2 * half; }
    // Returns the offset of the columns in row k = threadIdx.x % 4 of the atom's boxes.
    __device__ __forceinline__ u32 offset() const {
        const int k = threadIdx.x % 4;
        return (box * TILE_K + k) * ROW_BYTES + (chunk ^ k) * 16 + half * 8;
    }
};

// A thread's elements of w for half of the wgmmas of a stage.
struct HalfStage {
    static constexpr int COUNT = ROW_BYTES / K_BYTES / 2;
    u32 words[COUNT][ATOMS][4];  // as wgmma's operand a: element k and k + 4 of both columns

    __device__ __forceinline__ void load(u32 from) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int atom = 0; atom < ATOMS; ++atom) {
                u32(&to)[4] = words[i][atom];
                const int at = 8 * i * ROW_BYTES + 2 * atom * TILE_K * ROW_BYTES;
                hopper::load_words(from + at, to[0], to[1]);
                hopper::load_words((from ^ 64) + at + 4 * ROW_BYTES, to[2], to[3]);  // the swizzle of row k + 4
            }
    }
};

// The counterpart of `multiply` for W_IN_REGISTERS, for a consumer's columns from `first_column` on. While the wgmmas of
// half a stage are in flight, the registers of the next half are loaded.
template <class Sums>
__device__ __forceinline__ void multiply_along_n(Sums& d, Ring<STAGES>& ring, const Barriers& barriers, u32 shared,
                                                 int first_column, int steps, int consumer, bool pass_on) {
    const int thread = threadIdx.x % 128;
    const u64 x = hopper::matrix_descriptor<ROW_BYTES>(shared, 16, 8 * ROW_BYTES);
    const u32 w = shared + X_BYTES + first_column / 32 * TILE_K * ROW_BYTES + Place().offset();
    const auto release = [&](u32 empty) {
        if (thread % (128 / RELEASES) == 0) hopper::barrier_arrive(empty);
    };
    HalfStage halves[2];
    u32 before = 0;
    if constexpr (PINGPONG) hopper::named_barrier(turn(consumer), 256);
    hopper::barrier_wait(barriers.full(ring.at), ring.parity);
    halves[0].load(w + ring.at * STAGE_BYTES);
    for (int step = 0; step < steps; ++step) {
        if (PINGPONG && pass_on && step == steps - 1) hopper::named_barrier_arrive(turn(1 - consumer), 256);
        const u32 stage = ring.at * STAGE_BYTES, empty = barriers.empty(ring.at);
        ring.next();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            hopper::wgmma_fence();
#pragma unroll
            for (int i = 0; i < HalfStage::COUNT; ++i)
#pragma unroll
                for (int atom = 0; atom < ATOMS; ++atom)
                    hopper::wgmma<false>(X(), d[atom], halves[half].words[i][atom],
                                         hopper::moved(x, stage + (half * HalfStage::COUNT + i) * K_BYTES),
                                         step > 0 || half > 0 || i > 0);
            hopper::wgmma_commit();
            hopper::wgmma_wait<1>();  // afterwards the other half's registers can be loaded
            if (half == 0) {
                if (step > 0) release(before);
                halves[1].load(w + stage + TILE_K / 2 * ROW_BYTES);
            } else if (step < steps - 1) {
                hopper::barrier_wait(barriers.full(ring.at), ring.parity);
                halves[0].load(w + ring.at * STAGE_BYTES);
            }
        }
        before = empty;
    }
    hopper::wgmma_wait<0>();
    release(before);
#pragma unroll
    for (int atom = 0; atom < ATOMS; ++atom) hopper::settle(d[atom]);
}

}  // namespace
