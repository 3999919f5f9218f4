// A gate in front of the main loop of gemm_mma.cuh: `pixels` neighbouring rows of x, those of an image, share K factors.
// The elements of x are multiplied by these, and rounded to T as if the gated x were stored.
//
// A thread holds factors in the layout of its fragments of x, and loads those of a step of k while the step before is
// multiplied. They come from L1, to which a block reads the factors of its rows before it waits for x.
//
// Macros: those of gemm_mma.cuh.
#pragma once
#include "types.cuh"
#include "gemm_mma.cuh"

// The factors of the rows of a warp. K: those of an image. COPY: bytes of which their addresses are multiples.
template <int K, int COPY>
struct Gate {
    static constexpr int EACH = 4 / ITEM;  // elements of a word
    static constexpr int STEP = 32 / ITEM;  // elements of k of an mma
    const T* rows[MMA_M][2];  // for this thread's first elements of k, of its two rows in each tile of 16

    // `row` is the block's first row of the m of x.
    __device__ __forceinline__ Gate(const T* gate, int row, int m, int pixels) {
        const int first = row / pixels, last = (min(row + TILE_M, m) - 1) / pixels;
        for (int at = threadIdx.x; at * (128 / ITEM) < (last - first + 1) * K; at += THREADS)
            load_cached<1>(gate + i64(first) * K + at * (128 / ITEM));
        const int lane = threadIdx.x % 32, own = row + threadIdx.x / 32 / WARPS_N * MMA_M * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < MMA_M; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                rows[i][half] = gate + i64(min(own + 16 * i + 8 * half, m - 1) / pixels) * K + lane % 4 * EACH;
    }

    // Loads the factors of the step that begins at k; those beyond K are zeros.
    __device__ __forceinline__ void load(unsigned (&to)[MMA_M][4], int k) const {
        const int left = K - k - threadIdx.x % 4 * EACH;  // from this thread's first element on
#pragma unroll
        for (int i = 0; i < MMA_M; ++i)
#pragma unroll
            for (int part = 0; part < 4; ++part)
                to[i][part] = word(rows[i][part % 2] + k + part / 2 * (STEP / 2), left - part / 2 * (STEP / 2));
    }

private:
    static __device__ __forceinline__ unsigned word(const T* from, int left) {
        if constexpr (COPY >= 4) {
            return K % TILE_K == 0 || left > 0 ? load_cached<EACH>(from).words[0] : 0;
        } else {
            const unsigned low = left > 0 ? load_cached<1>(from).words[0] : 0;
            const unsigned high = left > 1 ? load_cached<1>(from + 1).words[0] : 0;
            return low | high << 16;
        }
    }
};

// MmaSums of x behind a gate, over tiles of k in order.
template <class Factors>
struct GatedSums {
    MmaSums sums;
    const Factors& gate;
    int k;  // of the tile that is added next

    __device__ __forceinline__ void add(unsigned stage) {
        Fragments fragments[2];
        unsigned factors[2][MMA_M][4];
        gate.load(factors[0], k);
        fragments[0].load<false>(stage, 0);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (step + 1 < STEPS) {
                gate.load(factors[(step + 1) % 2], k + (step + 1) * (32 / ITEM));
                fragments[(step + 1) % 2].load<false>(stage, step + 1);
            }
#pragma unroll
            for (int i = 0; i < MMA_M; ++i)
#pragma unroll
                for (int part = 0; part < 4; ++part)
                    fragments[step % 2].x[i][part] =
                        multiply_words(T(), fragments[step % 2].x[i][part], factors[step % 2][i][part]);
            if constexpr (TF32) fragments[step % 2].round();
            fragments[step % 2].multiply_all(sums.at);
        }
        k += TILE_K;
    }
};
