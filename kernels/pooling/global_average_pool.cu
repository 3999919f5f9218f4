// y = factor * (sum of x over the pixels of each image); global_pool.cuh divides the pixels among threads.
#include "global_pool.cuh"

struct Mean {
    float factor;

    static __device__ __forceinline__ float initial() { return 0.0f; }
    static __device__ __forceinline__ float merge(float a, float b) { return a + b; }
    __device__ __forceinline__ float finish(float sum) const { return sum * factor; }
};

GLOBAL_POOL_KERNEL global_average_pool(const X_T* x, Y_T* y, float factor, int pixels, int parts) {
    global_pool(Mean{factor}, x, y, pixels, parts);
}
