// The multiplication of gemm_hopper.cuh with a gate in front of it (gate_rows.cuh).
//
// wgmma takes fragments of x from registers then: a warp loads them from the stage by ldmatrix, a step of k ahead of the
// wgmmas, and multiplies them by factors, which it has loaded before it waits for the stage.
//
// Macros: those of gemm_hopper.cuh, of 16-bit types, not GATED and with whole stages as blocks of k.
#pragma once
#include "gemm_hopper.cuh"
#include "gate_rows.cuh"

namespace {

// The operand of a gate: k factors for every `pixels` of the m rows of x.
struct GateOperand {
    const T* factors;
    int m, k, pixels;
};

#if X_GATE

static_assert(sizeof(T) == 2 && BLOCKS == 1 && !GATED);

// Sums over `blocks` blocks of k from the one with index `first_block` on for this consumer's rows, which begin with row
// `row` of x and row `first_row` of a stage; else as `multiply`.
__device__ __forceinline__ void multiply_gated(float (&d)[ATOMS][COLUMNS / 2], Ring<STAGES>& ring,
                                               const Barriers& barriers, u32 shared, int first_row, int first_block,
                                               int blocks, int consumer, bool pass_on, const GateOperand& gate, int row) {
    constexpr int STEPS = ROW_BYTES / K_BYTES, STEP = K_BYTES / int(sizeof(T));  // of a stage; elements of k
    const int thread = threadIdx.x % 128, lane = thread % 32;
    const GateRows<ATOMS, 64, 16> rows(gate.factors, row + thread / 32 * 16 + lane / 4, gate.m, gate.pixels, gate.k);
    const u64 w = hopper::matrix_descriptor<ROW_BYTES>(
        shared + X_BYTES, TRANSPOSED ? 16 : TILE_K * ROW_BYTES, 8 * ROW_BYTES);
    constexpr int W_STEP = (TRANSPOSED ? K_BYTES : 16 * ROW_BYTES) / 16;  // in units of 16 bytes
    const u32 w_low = u32(w);
    // This lane's row of x, and the chunk of 16 bytes in which its first step begins, as TMA swizzles them.
    const int own = first_row + thread / 32 * 16 + lane % 16;
    const u32 x = shared + own * ROW_BYTES, chunk = lane / 16, swizzle = own % 8;
    u32 before = 0, fragments[2][ATOMS][4];  // which wgmmas read until they have ended, beyond their block of k
    if constexpr (PINGPONG) hopper::named_barrier(turn(consumer), 256);
    for (int block = 0; block < blocks; ++block) {
        u32 factors[STEPS][ATOMS][4];
#pragma unroll
        for (int i = 0; i < STEPS; ++i) rows.load(factors[i], (first_block + block) * TILE_K + i * STEP);
        hopper::barrier_wait(barriers.full(ring.at), ring.parity);
        if (PINGPONG && pass_on && block == blocks - 1) hopper::named_barrier_arrive(turn(1 - consumer), 256);
        const u32 stage = ring.at * STAGE_BYTES;
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            hopper::wgmma_wait<1>();  // that of the step before the last, whose fragments are overwritten
            if (i == 1 && block > 0 && thread == 0) hopper::barrier_arrive(before);
#pragma unroll
            for (int atom = 0; atom < ATOMS; ++atom)
                hopper::load_matrices(x + stage + atom * 64 * ROW_BYTES + ((2 * i + chunk ^ swizzle) << 4),
                                      fragments[i % 2][atom]);
            multiply_fragments(fragments[i % 2], factors[i]);
            hopper::wgmma_fence();
#pragma unroll
            for (int atom = 0; atom < ATOMS; ++atom)
                hopper::wgmma<!TRANSPOSED>(T(), d[atom], fragments[i % 2][atom],
                                           with_low(w, w_low + stage / 16 + i * W_STEP), block > 0 || i > 0);
            hopper::wgmma_commit();
        }
        before = barriers.empty(ring.at);
        ring.next();
    }
    hopper::wgmma_wait<0>();
    if (thread == 0) hopper::barrier_arrive(before);
#pragma unroll
    for (int atom = 0; atom < ATOMS; ++atom) hopper::settle(d[atom]);
}

#endif

}  // namespace
