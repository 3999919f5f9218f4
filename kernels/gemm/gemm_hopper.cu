// Matrix products by wgmma and TMA on Hopper (sm_90a). Blocks are persistent: each takes every gridDim.x-th tile.
//
//   y = activation(x w + bias) [* (x up + up_bias)] * column_scale + column_shift + residual
//
// Macros: those of gemm_hopper.cuh.
#include "gemm_hopper_tiles.cuh"
#include "gemm_operands.cuh"

// The bias of each product; hopper.py writes the fields in this order.
struct Biases { const T EACH_PRODUCT(*, bias); };

extern "C" __global__ void __launch_bounds__(128 * (1 + CONSUMERS), BLOCKS_PER_SM)
    gemm_hopper(const __grid_constant__ TensorMap x, EACH_PRODUCT(const __grid_constant__ TensorMap, w),
#if GATED
                const __grid_constant__ TensorMap up,
#endif
                EACH_PRODUCT(RESULT, y),
#if HAS_RESIDUAL
                const __grid_constant__ TensorMap residual,
#endif
                EpilogueOperands epilogue, Biases biases, ProductSizes sizes GATE_PARAMETERS PROGRAM_PARAMETERS) {
#if !GATED
    const TensorMap& up = w;
#endif
#if !HAS_RESIDUAL
    const TensorMap& residual = x;
#endif
    const Gate gate{GATE_ARGUMENTS};
    const Weights weights{{EACH_PRODUCT(&, w)}, {EACH_PRODUCT(, sizes.n)}};
    const Results results{{EACH_PRODUCT(RESULT_REFERENCE, y)}, {EACH_PRODUCT(, biases.bias)}};
    run_tiles(MatrixOperands{x, weights, up, gate}, weights, results, residual, epilogue, sizes.m, sizes.blocks(),
              sizes.group_m, MatrixPlace{}, {PROGRAM_ARGUMENTS}, gate);
}
