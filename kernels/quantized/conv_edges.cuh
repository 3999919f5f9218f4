// The taps of a filter that lie outside x, for gemm_hopper_integers.cuh.
//
// Macros: those of conv_operands.cuh, and EDGES of gemm_hopper_integers.cuh.
#pragma once
#include "conv_operands.cuh"

namespace {

// The sizes of x, and those of y.
struct Edges {
    int x_d, x_h, x_w, y_d, y_h, y_w;

    // Returns the taps of the filter that lie outside x for a pixel of y: bit t of tap t, where W is innermost.
    __device__ __forceinline__ u64 outside(int pixel) const {
        const int lines = pixel / y_w, planes = lines / y_h;
        const int w = pixel - lines * y_w, h = lines - planes * y_h, d = planes % y_d;
        if (inside(w * STRIDE_W - PAD_W, KERNEL_W, DILATION_W, x_w) &&
            inside(h * STRIDE_H - PAD_H, KERNEL_H, DILATION_H, x_h) &&
            inside(d * STRIDE_D - PAD_D, KERNEL_D, DILATION_D, x_d))
            return 0;
        u64 found = 0;
#pragma unroll
        for (int tap = 0; tap < KERNEL_D * KERNEL_H * KERNEL_W; ++tap) {
            const int of_w = w * STRIDE_W - PAD_W + tap % KERNEL_W * DILATION_W;
            const int of_h = h * STRIDE_H - PAD_H + tap / KERNEL_W % KERNEL_H * DILATION_H;
            const int of_d = d * STRIDE_D - PAD_D + tap / (KERNEL_W * KERNEL_H) * DILATION_D;
            if (u32(of_w) >= u32(x_w) || u32(of_h) >= u32(x_h) || u32(of_d) >= u32(x_d)) found |= 1ull << tap;
        }
        return found;
    }

private:
    // Whether all taps along an axis lie inside x.
    static __device__ __forceinline__ bool inside(int first, int taps, int dilation, int size) {
        return first >= 0 && first + (taps - 1) * dilation < size;
    }
};

static_assert(!EDGES || KERNEL_D * KERNEL_H * KERNEL_W <= 64);

}  // namespace
