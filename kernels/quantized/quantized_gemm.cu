// Matrix products of integers of 8 bits, or of float8 numbers, by wgmma and TMA on Hopper (sm_90a), with a persistent
// grid.
//
//   y = epilogue((x - x_zero) w * x_scale * w_scale)
//
// x is m x k of s8 or u8 and w is n x k of s8, or both are of e4m3; y is m x n of T. Often the program (the fused
// operators) stores y in 8 bits instead.
//
// Macros: those of gemm_hopper.cuh and gemm_hopper_eight_bits.cuh. TRANSPOSED is 1, GATED is 0, and PRODUCTS is 1.
#include "gemm_hopper_eight_bits.cuh"
#include "gemm_operands.cuh"

extern "C" __global__ void __launch_bounds__(128 * (1 + CONSUMERS), 1)
    quantized_gemm(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, EpilogueOperands epilogue,
                   EightBitOperands integers, ProductSizes sizes PROGRAM_PARAMETERS) {
    const Weights weights{{&w}, {sizes.n}};
    run_tiles<EightBitResults>(MatrixOperands{x, weights, w, {}}, weights,
                               EightBitOutput{integers, {epilogue, {PROGRAM_ARGUMENTS}}, sizes.m, sizes.n},
                               sizes.blocks(), sizes.group_m);
}
