// The main loop of gemm_mma.cuh for an x that is multiplied by a gate first. The gate has k factors per image, which
// the `pixels` rows of x of this image share. Products of x and factors are rounded to T, as if a separate kernel had
// stored the gated x.
//
// A thread loads the factors of a step of k while the previous step is multiplied. They come from L1: a block reads the
// factors of its rows into L1 while the first copies of x are in flight.
//
// Macros: the macros of gemm_mma.cuh.
#pragma once
#include "epilogue.cuh"
#include "packed_words.cuh"
#include "gemm_mma.cuh"

// The factors of a thread's rows, in the layout of its fragments of x: two rows in each of COUNT tiles of 16 rows.
// COPY: alignment in bytes of each image's factors.
template <int COUNT, int COPY>
struct GateRows {
    static constexpr int EACH = 4 / sizeof(T);   // elements per word
    static constexpr int STEP = 32 / sizeof(T);  // elements of k per mma
    const T* rows[COUNT][2];                     // where this thread begins to read each of its rows
    int k;

    __device__ __forceinline__ GateRows() {}

    // `row` is this thread's first row among the m rows of x.
    __device__ __forceinline__ GateRows(const T* gate, int row, int m, int pixels, int k) : k(k) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int image = min(row + 16 * i + 8 * half, m - 1) / pixels;
                rows[i][half] = gate + (long long)image * k + threadIdx.x % 4 * EACH;
            }
    }

    // Loads the factors of the step that begins at `from`; factors beyond k are zeros. WHOLE: the step ends within k.
    template <bool WHOLE = false>
    __device__ __forceinline__ void load(unsigned (&to)[COUNT][4], int from) const {
        const int left = k - from - int(threadIdx.x) % 4 * EACH;  // elements of the row from this thread's first one on
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                const int at = part / 2 * (STEP / 2);
                to[i][part] = word<WHOLE>(rows[i][part % 2] + from + at, left - at);
            }
    }

private:
    template <bool WHOLE>
    static __device__ __forceinline__ unsigned word(const T* from, int left) {
        if constexpr (COPY >= 4) {
            return WHOLE || left > 0 ? load_cached<EACH>(from).words[0] : 0;
        } else {
            const unsigned low = left > 0 ? load_cached<1>(from).words[0] : 0;
            const unsigned high = left > 1 ? load_cached<1>(from + 1).words[0] : 0;
            return low | high << 16;
        }
    }
};

// Multiplies fragments of x by their factors.
template <int COUNT>
__device__ __forceinline__ void multiply_fragments(unsigned (&x)[COUNT][4], const unsigned (&factors)[COUNT][4]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int part = 0; part < 4; ++part) x[i][part] = multiply_words(T(), x[i][part], factors[i][part]);
}

// MmaSums for a gated x; the tiles of k must be added in order. COPY: alignment in bytes of each image's factors.
template <int COPY>
struct GatedSums {
    MmaSums sums;
    const T* gate;
    int row, m, pixels;  // the block's first row, the rows of x, and the rows per image
    GateRows<MMA_M, COPY> factors;
    int k = 0;  // position along k of the next tile to add

    // Finds the addresses of the rows' factors, and reads the block's factors into L1.
    __device__ __forceinline__ void prepare() {
        const int own = row + threadIdx.x / 32 / WARPS_N * MMA_M * 16 + threadIdx.x % 32 / 4;
        factors = GateRows<MMA_M, COPY>(gate, own, m, pixels, GEMM_K);
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
