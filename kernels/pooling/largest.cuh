// The pooling op of the maximum: the result over no elements is -inf, and over a NaN it is NaN.
#pragma once
#include "types.cuh"

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

    template <class... At>  // the position of the result is unused
    __device__ __forceinline__ float finish(float largest, At...) const {
        return largest;
    }
};
