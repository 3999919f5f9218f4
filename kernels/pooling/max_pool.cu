// The largest element of each window of channels-last tensors; windows are defined in pooling.cuh.
//
// Padding counts as -inf, and a NaN in a window gives NaN. A window without an element, possible with dilations, gives
// the lowest finite number of fp32, as in onnxruntime: in 16 bits that is rounded to -inf, and integers get their
// lowest number.
#include "largest.cuh"
#include "pooling.cuh"

struct LargestOfWindow : Largest {
    PoolSizes sizes;

    __device__ __forceinline__ float finish(float largest, int plane, int row, int column) const {
        if ((DILATION_D == 1 && DILATION_H == 1 && DILATION_W == 1) || largest != initial()) return largest;
        const bool has_element =
            elements_inside<KERNEL_D, DILATION_D>(plane * STRIDE_D - sizes.pad_d, 0, sizes.depth) &&
            elements_inside<KERNEL_H, DILATION_H>(row * STRIDE_H - sizes.pad_h, 0, sizes.height) &&
            elements_inside<KERNEL_W, DILATION_W>(column * STRIDE_W - sizes.pad_w, 0, sizes.width);
        return has_element ? largest : __uint_as_float(0xff7fffffu);
    }
};

__device__ __forceinline__ unsigned largest_halves(unsigned a, unsigned b) {  // of 16 bits
#if __CUDA_ARCH__ >= 900
    unsigned y;
    asm("max.u16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
#else
    return max(a & 0xffff0000u, b & 0xffff0000u) | max(a & 0xffffu, b & 0xffffu);
#endif
}

// Integers of 8 bits, two in a value: the high byte of each half is an element. Its low byte decides only between equal
// elements. FLIPPED gives int8 the order of unsigned bytes.
template <unsigned FLIPPED>
struct LargestBytes {
    using Value = unsigned;
    static constexpr int WORDS = (WIDTH + 3) / 4, VALUES = 2 * WORDS;

    static __device__ __forceinline__ unsigned initial() { return 0; }
    static __device__ __forceinline__ unsigned merge(unsigned a, unsigned b) { return largest_halves(a, b); }
    static __device__ __forceinline__ Pack<T, WIDTH> padding() {
        Pack<T, WIDTH> packed;
#pragma unroll
        for (unsigned& word : packed.words) word = FLIPPED;
        return packed;
    }
    static __device__ __forceinline__ void read(const Pack<T, WIDTH>& raw, unsigned (&values)[VALUES]) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            values[2 * i] = raw.words[i] ^ FLIPPED;
            values[2 * i + 1] = values[2 * i] << 8;
        }
    }
    __device__ __forceinline__ Pack<T, WIDTH> result(const unsigned (&values)[VALUES], int, int, int) const {
        Pack<T, WIDTH> packed;
#pragma unroll
        for (int i = 0; i < WORDS; ++i)
            packed.words[i] = (values[2 * i] & 0xff00ff00u | values[2 * i + 1] >> 8 & 0x00ff00ffu) ^ FLIPPED;
        return packed;
    }
};

__device__ __forceinline__ LargestBytes<0> largest(u8, const PoolSizes&) { return {}; }
__device__ __forceinline__ LargestBytes<0x80808080u> largest(s8, const PoolSizes&) { return {}; }
template <class E>
__device__ __forceinline__ OfFloats<LargestOfWindow> largest(E, const PoolSizes& sizes) {
    return {{{}, sizes}};
}

POOL_KERNEL max_pool(const T* x, T* y, PoolSizes sizes) { pool(largest(T(), sizes), x, y, sizes); }
