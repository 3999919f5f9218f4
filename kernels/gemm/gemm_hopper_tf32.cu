// Products of fp32 matrices in TF32 by wgmma and TMA on Hopper (sm_90a), with a persistent grid.
//
//   y = activation(x w + bias) * column_scale + column_shift + residual
//
// Macros: those of gemm_hopper.cuh. TRANSPOSED and GATED are 0.
#include "gemm_hopper_threads.cuh"
#include "gemm_operands.cuh"

// The bias of each product; hopper.py writes the fields in this order.
struct Biases { const T EACH_PRODUCT(*, bias); };

namespace {

// The outputs of the products of a launch, whose tiles lie side by side.
struct ProductOutputs : FragmentOutput {
    const Weights& weights;
    T* y_of[PRODUCTS];
    const T* bias_of[PRODUCTS];
};

__device__ __forceinline__ void finish_atom(const float (&d)[SUMS], int2 origin, const ProductOutputs& of) {
    FragmentOutput one = of;
    const int product = of.weights.find(origin.y);
    one.n = pick(of.weights.n, product);
    one.y = pick(of.y_of, product);
    one.bias = pick(of.bias_of, product);
    finish_atom(d, origin, one);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128 * (1 + CONSUMERS), 1)
    gemm_hopper_tf32(const __grid_constant__ TensorMap x, EACH_PRODUCT(const __grid_constant__ TensorMap, w),
                     EACH_PRODUCT(T*, y), EpilogueOperands epilogue, Biases biases,
                     ProductSizes sizes PROGRAM_PARAMETERS) {
    const Weights weights{{EACH_PRODUCT(&, w)}, {EACH_PRODUCT(, sizes.n)}};
    const ProductOutputs outputs{
        {epilogue, sizes.m, sizes.n, {PROGRAM_ARGUMENTS}}, weights, {EACH_PRODUCT(, y)}, {EACH_PRODUCT(, biases.bias)}};
    run_tiles<TileResults<ProductOutputs>>(MatrixOperands{x, weights, w, {}}, weights, outputs, sizes.blocks(),
                                           sizes.group_m);
}
