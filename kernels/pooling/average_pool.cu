// The mean of each window of channels-last tensors; windows are defined in pooling.cuh.
//
// The sum over a window is divided by the number of its elements inside x or, with COUNT_PADDING, inside x and its
// padding. Elements beyond the padding, as in the last window of ceil_mode or a window larger than x, do not count. A
// window without an element gives 0. QUANTIZED, 1: x and y are integers (image_quantizers.cuh).
#include "pooling.cuh"

// The pooling op of means, as an argument of the kernel; tiles.py writes the fields in this order.
struct Mean {
    PoolSizes sizes;
    int end_d, end_h, end_w;  // only elements before these indices count

    static __device__ __forceinline__ float initial() { return 0.0f; }
    static __device__ __forceinline__ float merge(float a, float b) { return a + b; }

    __device__ __forceinline__ float finish(float sum, int plane, int row, int column) const {
        const int d = elements_inside<KERNEL_D, DILATION_D>(plane * STRIDE_D - sizes.pad_d,
                                                            COUNT_PADDING ? -sizes.pad_d : 0, end_d);
        const int h = elements_inside<KERNEL_H, DILATION_H>(row * STRIDE_H - sizes.pad_h,
                                                            COUNT_PADDING ? -sizes.pad_h : 0, end_h);
        const int w = elements_inside<KERNEL_W, DILATION_W>(column * STRIDE_W - sizes.pad_w,
                                                            COUNT_PADDING ? -sizes.pad_w : 0, end_w);
        return sum * __fdiv_rn(1.0f, float(max(d * h * w, 1)));
    }
};

#if QUANTIZED
#include "image_quantizers.cuh"

struct OfIntegers : OfFloats<Mean> {
    ImageQuantizers quantizers;

    __device__ __forceinline__ Pack<T, WIDTH> padding() const {
        float zeros[WIDTH];
#pragma unroll
        for (float& each : zeros) each = quantizers.x_zero;
        return pack<T, WIDTH>(zeros);
    }
    __device__ __forceinline__ void read(const Pack<T, WIDTH>& raw, float (&values)[WIDTH]) const {
        unpack(raw, values);
#pragma unroll
        for (float& each : values) each -= quantizers.x_zero;
    }
    __device__ __forceinline__ Pack<T, WIDTH> result(float (&values)[WIDTH], int plane, int row, int column) const {
#pragma unroll
        for (float& each : values) each = quantizers.quantized(op.finish(each, plane, row, column));
        return pack<T, WIDTH>(values);
    }
};

POOL_KERNEL average_pool(const T* x, IMAGE_QUANTIZERS, T* y, Mean mean) {
    pool(OfIntegers{{mean}, {x_scale, x_zero, y_scale, y_zero}}, x, y, mean.sizes);
}
#else
POOL_KERNEL average_pool(const T* x, T* y, Mean mean) { pool(OfFloats<Mean>{mean}, x, y, mean.sizes); }
#endif
