// The main loop of gemm_mma.cuh with a gate before it: `pixels` neighbouring rows of x, those of an image, share k
// factors, by which their elements are multiplied, and are rounded to T as if the products were stored.
//
// A thread loads the factors of a step of k while the step before is multiplied. They come from L1, to which a block
// reads those of its rows while the first copies of x are under way.
//
// Macros: those of gemm_mma.cuh.
#pragma once
#include "epilogue.cuh"
#include "multiply_words.cuh"
#include "gemm_mma.cuh"

// The factors of a thread's rows, in the layout of its fragments of x: two rows in each of COUNT tiles of 16. COPY: bytes
// of which the addresses of an image's factors are multiples.
template <int COUNT, int COPY>
struct GateRows {
    static constexpr int EACH = 4 / sizeof(T);   // elements of a word
    static constexpr int STEP = 32 / sizeof(T);  // elements of k of an mma
    const T* rows[COUNT][2];                     // addresses of this thread's first elements of k
    int k;

    __device__ __forceinline__ GateRows() {}

    // `row` is this thread's first row of the m of x.
    __device__ __forceinline__ GateRows(const T* gate, int row, int m, int pixels, int k) : k(k) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int image = min(row + 16 * i + 8 * half, m - 1) / pixels;
                rows[i][half] = gate + (long long)image * k + threadIdx.x % 4 * EACH;
            }
    }

    // Loads the factors of the step that begins at `from`; those beyond k are zeros. WHOLE: there are none.
    template <bool WHOLE = false>
    __device__ __forceinline__ void load(unsigned (&to)[COUNT][4], int from) const {
        const int left = k - from - int(threadIdx.x) % 4 * EACH;  // elements from this thread's first one on
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

// MmaSums of gated x, over tiles of k in order. COPY: the addresses of factors are multiples of so many bytes.
template <int COPY>
struct GatedSums {
    MmaSums sums;
    const T* gate;
    int row, m, pixels;  // the block's first row of the m of x
    GateRows<MMA_M, COPY> factors;
    int k = 0;  // beginning of the tile that is added next

    // Finds the rows' factors, and reads those of the block to L1.
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
