// The largest element of each window of channels-last tensors; windows are as pooling.cuh has them.
//
// Padding counts as -inf, so that a window without an element gives -inf. A NaN in a window gives NaN.
#include "pooling.cuh"

struct Largest {
    static __device__ __forceinline__ float initial() { return __uint_as_float(0xff800000u); }

    static __device__ __forceinline__ float merge(float a, float b) {
#if __CUDA_ARCH__ >= 800
        float y;
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
        return y;
#else
        return a > b || a != a ? a : b;
#endif
    }

    __device__ __forceinline__ float finish(float largest, int, int, int) const { return largest; }
};

POOL_KERNEL max_pool(const T* x, T* y, int depth, int height, int width, int y_depth, int y_height, int y_width,
                     int pad_d, int pad_h, int pad_w) {
    pool(Largest{}, x, y, {depth, height, width, y_depth, y_height, y_width, pad_d, pad_h, pad_w});
}
