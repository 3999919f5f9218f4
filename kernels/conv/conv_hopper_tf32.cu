// Convolutions of channels-last fp32 tensors in TF32 by wgmma and TMA on Hopper (sm_90a), with a persistent grid.
//
//   y = epilogue(conv(x, w))
//
// x is (n, d, h, w, CHANNELS), y and residual are (n, y_d, y_h, y_w, m), w is (m, KERNEL_D, KERNEL_H, KERNEL_W,
// CHANNELS); `pixels` is n * y_d * y_h * y_w. With two spatial axes there is no d, and with one neither d nor h.
//
// Macros: those of gemm_hopper.cuh and of conv_operands.cuh. TRANSPOSED is 1, GATED is 0, and PRODUCTS is 1.
#include "gemm_hopper_threads.cuh"
#include "conv_operands.cuh"

extern "C" __global__ void __launch_bounds__(128 * (1 + CONSUMERS), 1)
    conv_hopper_tf32(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
                     EpilogueOperands epilogue, PixelSizes sizes PROGRAM_PARAMETERS) {
    const Weights weights{{&w}, {sizes.filters}};
    run_tiles<TileResults<FragmentOutput>>(PixelOperands{x, w, sizes}, weights,
                                           FragmentOutput{epilogue, sizes.pixels, sizes.filters, {PROGRAM_ARGUMENTS}},
                                           ALL_BLOCKS, sizes.group_m);
}
