// A gate in front of a product: `pixels` neighbouring rows of x, those of an image, share k factors, by which their
// elements are multiplied, and are rounded to T as if the products were stored.
#pragma once
#include "types.cuh"
#include "epilogue.cuh"
#include "multiply_words.cuh"

// The factors of a thread's rows, in the layout of its fragments of x: two rows in each of COUNT tiles of 16 or more,
// which lie STRIDE rows apart. COPY: bytes of which the addresses of an image's factors are multiples.
template <int COUNT, int STRIDE, int COPY>
struct GateRows {
    static constexpr int EACH = 4 / sizeof(T);    // elements of a word
    static constexpr int STEP = 32 / sizeof(T);   // elements of k of an mma
    const T* rows[COUNT][2];                      // for this thread's first elements of k
    int k;

    __device__ __forceinline__ GateRows() {}

    // `row` is this thread's first row of the m of x.
    __device__ __forceinline__ GateRows(const T* gate, int row, int m, int pixels, int k) : k(k) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int image = min(row + STRIDE * i + 8 * half, m - 1) / pixels;
                rows[i][half] = gate + (long long)image * k + threadIdx.x % 4 * EACH;
            }
    }

    // Loads the factors of the step that begins at `from`; those beyond k are zeros. WHOLE: there are none.
    template <bool WHOLE = false>
    __device__ __forceinline__ void load(unsigned (&to)[COUNT][4], int from) const {
        const int left = k - from - int(threadIdx.x) % 4 * EACH;  // from this thread's first element on
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
