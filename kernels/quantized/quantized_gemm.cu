// Matrix products of integers of 8 bits by wgmma and TMA on Hopper (sm_90a), with a persistent grid.
//
//   y = epilogue((x - x_zero) w * x_scale * w_scale)
//
// x is m x k of s8 or u8, w is n x k of s8, y is m x n of T; y is often stored as integers, by the program.
//
// Macros: those of gemm_hopper.cuh and gemm_hopper_integers.cuh. TRANSPOSED is 1, GATED is 0, and PRODUCTS is 1.
#include "gemm_hopper_integers.cuh"
#include "gemm_operands.cuh"

extern "C" __global__ void __launch_bounds__(128 * (1 + CONSUMERS), 1)
    quantized_gemm(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, T* y, const T* bias,
                   const T* residual, const T* x_scale, const T* w_scale, const OPERAND* x_zero, const f32* w_sums,
                   int m, int n, int k, int group_m PROGRAM_PARAMETERS) {
    const Weights weights{{&w}, {n}};
    const Epilogue epilogue{bias, nullptr, nullptr, residual, y, 0.0f, 0.0f, {PROGRAM_ARGUMENTS}};
    run_tiles(MatrixOperands{x, weights, w, {}}, weights,
              IntegerOutput{epilogue, x_scale, w_scale, x_zero, w_sums, {}, m, n}, (k + TILE_K - 1) / TILE_K, group_m);
}
