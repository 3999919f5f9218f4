// Matrix products by wgmma and TMA on Hopper (sm_90a) for few tiles and long k: blocks of a cluster share a tile.
//
//   y = activation(x w + bias) [* (x up + up_bias)] * column_scale + column_shift + residual
//
// Macros: those of gemm_hopper.cuh; PINGPONG is 0. Every block has at least one step of k.
#include "gemm_hopper_split.cuh"
#include "gemm_operands.cuh"

extern "C" __global__ void __launch_bounds__(128 * (1 + CONSUMERS), 1)
    gemm_hopper_split(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
#if GATED
                      const __grid_constant__ TensorMap up,
#endif
                      EpilogueOperands epilogue, ProductSizes sizes GATE_PARAMETERS PROGRAM_PARAMETERS) {
#if !GATED
    const TensorMap& up = w;
#endif
    const Gate gate{GATE_ARGUMENTS};
    const Weights weights{{&w}, {sizes.n}};
    run_split(MatrixOperands{x, weights, up, gate}, weights, {epilogue, sizes.m, sizes.n, {PROGRAM_ARGUMENTS}},
              sizes.blocks(), sizes.group_m, gate);
}
