// The main loop of gemm_mma.cuh with a gate in front of it (gate_rows.cuh).
//
// A thread loads the factors of a step of k while the step before is multiplied. They come from L1, to which a block
// reads those of its rows while the first copies of x are under way.
//
// Macros: those of gemm_mma.cuh.
#pragma once
#include "gate_rows.cuh"
#include "gemm_mma.cuh"

// MmaSums of x behind a gate, over tiles of k in order. COPY: bytes of which the addresses of factors are multiples.
template <int COPY>
struct GatedSums {
    MmaSums sums;
    const T* gate;
    int row, m, pixels;  // the block's first row of the m of x
    GateRows<MMA_M, 16, COPY> factors;
    int k = 0;           // of the tile that is added next

    // Finds the rows' factors, and reads those of the block to L1.
    __device__ __forceinline__ void prepare() {
        const int own = row + threadIdx.x / 32 / WARPS_N * MMA_M * 16 + threadIdx.x % 32 / 4;
        factors = GateRows<MMA_M, 16, COPY>(gate, own, m, pixels, GEMM_K);
        const int first = row / pixels, last = (min(row + TILE_M, m) - 1) / pixels;
        for (int at = threadIdx.x; at * (128 / ITEM) < (last - first + 1) * GEMM_K; at += THREADS)
            load_cached<1>(gate + i64(first) * GEMM_K + at * (128 / ITEM));
    }

    __device__ __forceinline__ void add(unsigned stage) {
        constexpr bool WHOLE = GEMM_K % TILE_K == 0;
        Fragments fragments[2];
        unsigned loaded[2][MMA_M][4];
        factors.template load<WHOLE>(loaded[0], k);
        fragments[0].load<false>(stage, 0);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (step + 1 < STEPS) {
                factors.template load<WHOLE>(loaded[(step + 1) % 2], k + (step + 1) * (32 / ITEM));
                fragments[(step + 1) % 2].load<false>(stage, step + 1);
            }
            multiply_fragments(fragments[step % 2].x, loaded[step % 2]);
            if constexpr (TF32) fragments[step % 2].round();
            fragments[step % 2].multiply_all(sums.at);
        }
        k += TILE_K;
    }
};
