// y = factor * (sum of x over the pixels of each image); global_pool.cuh divides the pixels among threads.
// QUANTIZED, 1: y is integers, and x is integers or sums of them (image_quantizers.cuh).
#include "global_pool.cuh"

struct Mean {
    float factor;

    static __device__ __forceinline__ float initial() { return 0.0f; }
    static __device__ __forceinline__ float merge(float a, float b) { return a + b; }
    __device__ __forceinline__ float finish(float sum) const { return sum * factor; }
};

#if QUANTIZED
#include "image_quantizers.cuh"

struct MeanOfIntegers : Mean {
    ImageQuantizers quantizers;

    __device__ __forceinline__ float finish(float sum) const {
        return quantizers.quantized(Mean::finish(sum) - quantizers.x_zero);
    }
};

GLOBAL_POOL_KERNEL global_average_pool(const X_T* x, IMAGE_QUANTIZERS, Y_T* y, float factor, int pixels, int parts) {
    global_pool(MeanOfIntegers{{factor}, {x_scale, x_zero, y_scale, y_zero}}, x, y, pixels, parts);
}
#else
GLOBAL_POOL_KERNEL global_average_pool(const X_T* x, Y_T* y, float factor, int pixels, int parts) {
    global_pool(Mean{factor}, x, y, pixels, parts);
}
#endif
