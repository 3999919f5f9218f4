// Convolutions of channels-last integers of 8 bits by wgmma and TMA on Hopper (sm_90a), with a persistent grid.
//
//   y = epilogue(conv(x - x_zero, w) * x_scale * w_scale)
//
// x is (n, d, h, w, CHANNELS) of s8 or u8, w is (m, KERNEL_D, KERNEL_H, KERNEL_W, CHANNELS) of s8, y is (n, y_d, y_h,
// y_w, m) of T. Often the program (the fused operators) stores y as integers instead. `pixels` is n * y_d * y_h * y_w.
// With two spatial axes there is no d, and with one neither d nor h.
//
// Macros: those of gemm_hopper.cuh, conv_operands.cuh, conv_edges.cuh and gemm_hopper_eight_bits.cuh. TRANSPOSED is 1,
// GATED is 0, and PRODUCTS is 1.
#include "conv_edges.cuh"
#include "conv_operands.cuh"
#include "gemm_hopper_eight_bits.cuh"

extern "C" __global__ void __launch_bounds__(128 * (1 + CONSUMERS), 1)
    quantized_conv(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, EpilogueOperands epilogue,
                   EightBitOperands integers, PixelSizes sizes, Position x_sizes PROGRAM_PARAMETERS) {
    const Weights weights{{&w}, {sizes.filters}};
    const Edges edges{x_sizes, {sizes.d, sizes.h, sizes.w}};
    run_tiles<EightBitResults>(
        PixelOperands{x, w, sizes}, weights,
        EightBitOutput{integers, {epilogue, {PROGRAM_ARGUMENTS}}, sizes.pixels, sizes.filters, edges}, ALL_BLOCKS,
        sizes.group_m);
}
