// Convolutions of channels-last integers of 8 bits by wgmma and TMA on Hopper (sm_90a), with a persistent grid.
//
//   y = epilogue(conv(x - x_zero, w) * x_scale * w_scale)
//
// x is (n, d, h, w, CHANNELS) of s8 or u8, w is (m, KERNEL_D, KERNEL_H, KERNEL_W, CHANNELS) of s8, y is (n, y_d, y_h,
// y_w, m) of T; y is often stored as integers, by the program. `pixels` is n * y_d * y_h * y_w. With two spatial axes
// there is no d, and with one neither d nor h.
//
// Macros: those of gemm_hopper.cuh, conv_operands.cuh, conv_edges.cuh and gemm_hopper_integers.cuh. TRANSPOSED is 1,
// GATED is 0, and PRODUCTS is 1.
#include "conv_edges.cuh"
#include "conv_operands.cuh"
#include "gemm_hopper_integers.cuh"

extern "C" __global__ void __launch_bounds__(128 * (1 + CONSUMERS), 1)
    quantized_conv(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, T* y, const T* bias,
                   const T* residual, const T* x_scale, const T* w_scale, const OPERAND* x_zero, const f32* w_sums,
                   int pixels, int m, int y_d, int y_h, int y_w, int group_m, int x_d, int x_h,
                   int x_w PROGRAM_PARAMETERS) {
    const Weights weights{{&w}, {m}};
    const Epilogue epilogue{bias, nullptr, nullptr, residual, y, 0.0f, 0.0f, {PROGRAM_ARGUMENTS}};
    const Edges edges{x_d, x_h, x_w, y_d, y_h, y_w};
    run_tiles(PixelOperands{x, w, y_d, y_h, y_w}, weights,
              IntegerOutput{epilogue, x_scale, w_scale, x_zero, w_sums, edges, pixels, m}, ALL_BLOCKS, group_m);
}
