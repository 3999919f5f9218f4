// Loads the operands of a matrix product for the producer of gemm_hopper.cuh.
#pragma once
#include "gemm_hopper.cuh"

// Lists a declaration or an expression for each product of the launch: `before` name, `before` name_2, `before` name_3.
#if PRODUCTS == 1
#define EACH_PRODUCT(before, name) before name
#elif PRODUCTS == 2
#define EACH_PRODUCT(before, name) before name, before name##_2
#else
#define EACH_PRODUCT(before, name) before name, before name##_2, before name##_3
#endif

// The gate's parameters in the parameter list of a kernel, and the same parameters as initializers of the members of
// Gate. Both are empty without X_GATE.
#if X_GATE
#define GATE_PARAMETERS , const __grid_constant__ TensorMap factors, int pixels
#define GATE_ARGUMENTS &factors, pixels
#else
#define GATE_PARAMETERS
#define GATE_ARGUMENTS
#endif

namespace {

// The sizes of the products, as an argument of kernels; hopper.py writes the fields in this order.
struct ProductSizes {
    int m, EACH_PRODUCT(, n), k;
    int group_m;  // as in Tiles of gemm_hopper.cuh

    __device__ __forceinline__ int blocks() const { return (k + TILE_K - 1) / TILE_K; }  // blocks of k
};

// x and the weights of one product of the launch, for one tile.
struct MatrixOperands {
    const TensorMap& x;
    const Weights& weights;
    const TensorMap& up;
    Gate gate;
    const TensorMap* w;
    int row, column;

    __device__ __forceinline__ void begin(int2 origin) {
        w = pick(weights.maps, weights.find(origin.y));
        row = origin.x;
        column = origin.y;
    }
    static __device__ __forceinline__ u32 bytes(int) { return STAGE_BYTES; }

    __device__ __forceinline__ void load_x(u32 stage, u32 full, int step) const {
        hopper::load(x, stage, full, step * TILE_K, row);
        if constexpr (X_GATE > 0)
            hopper::load(*gate.factors, stage + FACTORS_AT, full, step * TILE_K, row / gate.pixels);
    }
    __device__ __forceinline__ void load_weights(u32 stage, u32 full, int step) const {
        load_weight(*w, stage + X_BYTES, full, step * TILE_K);
        if constexpr (GATED) load_weight(up, stage + X_BYTES + TILE_N * ROW_BYTES, full, step * TILE_K);
    }

private:
    __device__ __forceinline__ void load_weight(const TensorMap& from, u32 to, u32 full, int k) const {
        if constexpr (TRANSPOSED) {
            load_columns(from, to, full, k, column);
        } else {
            constexpr int BOX = ROW_BYTES / sizeof(X);  // columns
#pragma unroll
            for (int i = 0; i < TILE_N / BOX; ++i)
                hopper::load(from, to + i * TILE_K * ROW_BYTES, full, column + BOX * i, k);
        }
    }
};

}  // namespace
