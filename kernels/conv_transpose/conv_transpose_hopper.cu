// Transposed convolutions of channels-last tensors by wgmma and TMA on Hopper (sm_90a), with a persistent grid.
//
//   y = epilogue(conv_transpose(x, w))
//
// x is (n, h, w, CHANNELS); y and residual are (n, rows * STRIDE_H, row * STRIDE_W, FILTERS). A phase is the set of all
// pixels of y whose positions have the same remainders modulo STRIDE_H and STRIDE_W. In each image, a phase has `rows`
// rows of `row` pixels; `positions` is n * rows * row. `columns` is FILTERS times the number of phases.
//
// Macros: those of gemm_hopper.cuh and of conv_transpose_operands.cuh. GATED is 0, and PRODUCTS is 1.
#include "conv_transpose_operands.cuh"

extern "C" __global__ void __launch_bounds__(128 * (1 + CONSUMERS), 1)
    conv_transpose_hopper(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
                          const __grid_constant__ TensorMap y,
#if HAS_RESIDUAL
                          const __grid_constant__ TensorMap residual,
#endif
                          EpilogueOperands epilogue, PhaseSizes sizes) {
#if !HAS_RESIDUAL
    const TensorMap& residual = x;
#endif
    const Weights weights{{&w}, {sizes.columns}};
    const Results results{{&y}, {epilogue.bias}};
    run_tiles(PhaseOperands{x, w, sizes.rows, sizes.row}, weights, results, residual, epilogue, sizes.positions,
              ALL_BLOCKS, sizes.group_m, PhasePlace{sizes.row, sizes.box});
}
