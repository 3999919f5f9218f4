// The multiplication of gemm_hopper.cuh with a gate: x is first multiplied by factors and rounded to T, as if a
// separate kernel had stored the gated x.
//
// A stage also holds the factors for its elements of k: one row per image, for GATE_IMAGES images from the tile's first
// image on. wgmma takes x from registers: while earlier wgmmas are in flight, a warp loads fragments of x and of the
// factors by ldmatrix. For each row of x, it loads the row of factors of the image to which that row belongs.
//
// Macros: those of gemm_hopper.cuh. T has 16 bits, GATED is 0, and a block of k is a whole stage.
#pragma once
#include "gemm_hopper.cuh"
#include "packed_words.cuh"

#if X_GATE

namespace {

static_assert(sizeof(T) == 2 && BLOCKS == 1 && !GATED);

// The offset at which TMA puts a row's first 16-byte chunk; chunk c is at this offset XOR 16 c.
__device__ __forceinline__ u32 swizzled(int row) { return row * ROW_BYTES + (row % 8 << 4); }

// The counterpart of `multiply` for a gate: sums the products over `blocks` blocks of k for this consumer's rows, which
// begin at row `first_row` of the tile. `row` is the tile's first row of x; an image has `pixels` rows.
__device__ __forceinline__ void multiply_gated(float (&d)[ATOMS][COLUMNS / 2], Ring<STAGES>& ring,
                                               const Barriers& barriers, u32 shared, int first_row, int blocks,
                                               int consumer, bool pass_on, int pixels, int row) {
    constexpr int STEPS = ROW_BYTES / K_BYTES;  // wgmma steps per block of k
    constexpr int TOGETHER = 2 / ATOMS;         // steps whose wgmmas are in flight while the next ones are prepared
    static_assert(ATOMS <= 2);
    const int thread = threadIdx.x % 128, lane = thread % 32;
    const u64 w =
        hopper::matrix_descriptor<ROW_BYTES>(shared + X_BYTES, TRANSPOSED ? 16 : TILE_K * ROW_BYTES, 8 * ROW_BYTES);
    constexpr int W_STEP = (TRANSPOSED ? K_BYTES : 16 * ROW_BYTES) / 16;  // in units of 16 bytes
    const u32 w_low = u32(w);
    // For each atom (the 64 rows of a wgmma): the addresses of this lane's row of x and of the row's factors, at the
    // lane's chunk of the first step.
    const int own = first_row + thread / 32 * 16 + lane % 16;
    u32 x[ATOMS], factors[ATOMS];
#pragma unroll
    for (int atom = 0; atom < ATOMS; ++atom) {
        const int image = (row + own + 64 * atom) / pixels - row / pixels;
        x[atom] = shared + swizzled(own + 64 * atom) ^ lane / 16 << 4;
        factors[atom] = shared + FACTORS_AT + swizzled(image) ^ lane / 16 << 4;
    }
    u32 before = 0,
        fragments[2][TOGETHER][ATOMS][4];  // wgmmas can still read fragments in the next round of the loop
    if constexpr (PINGPONG) hopper::named_barrier(turn(consumer), 256);
    for (int block = 0; block < blocks; ++block) {
        hopper::barrier_wait(barriers.full(ring.at), ring.parity);
        if (PINGPONG && pass_on && block == blocks - 1) hopper::named_barrier_arrive(turn(1 - consumer), 256);
        const u32 stage = ring.at * STAGE_BYTES;
#pragma unroll
        for (int first = 0; first < STEPS; first += TOGETHER) {
            u32 loaded[TOGETHER][ATOMS][4], by[TOGETHER][ATOMS][4];
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i)
#pragma unroll
                for (int atom = 0; atom < ATOMS; ++atom) {
                    hopper::load_matrices(x[atom] + stage ^ (first + i) * K_BYTES, loaded[i][atom]);
                    hopper::load_matrices(factors[atom] + stage ^ (first + i) * K_BYTES, by[i][atom]);
                }
            hopper::wgmma_wait<1>();  // waits for all groups but the last: the next lines overwrite their fragments
            if (first == TOGETHER && block > 0 && thread == 0) hopper::barrier_arrive(before);
            u32(&products)[TOGETHER][ATOMS][4] = fragments[first / TOGETHER % 2];
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i)
#pragma unroll
                for (int atom = 0; atom < ATOMS; ++atom)
#pragma unroll
                    for (int part = 0; part < 4; ++part)
                        products[i][atom][part] = multiply_words(T(), loaded[i][atom][part], by[i][atom][part]);
            hopper::wgmma_fence();
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i)
#pragma unroll
                for (int atom = 0; atom < ATOMS; ++atom)
                    hopper::wgmma<!TRANSPOSED>(T(), d[atom], products[i][atom],
                                               with_low(w, w_low + stage / 16 + (first + i) * W_STEP),
                                               block > 0 || first + i > 0);
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

}  // namespace

#endif
