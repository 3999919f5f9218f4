// The epilogue of Hopper GEMMs "by fragment" (see epilogue.cuh): each thread loads the operands and stores y for its
// own accumulators, in wgmma's layout.
//
// Macros: those of gemm_hopper.cuh.
#pragma once
#include "gemm_hopper.cuh"

namespace {

// The epilogue's operands and program, and y with its m rows and n columns.
struct FragmentOutput : EpilogueOperands {
    int m, n;
    Program program;
};

// A thread's part of eight columns (with W_IN_REGISTERS: of eight rows): two adjacent columns of two rows, and the
// epilogue's operands for them.
struct Fragment {
    int row, column;
    Pair bias, extra, scale, residual[2];
    ProgramLoads<HAS_PROGRAM, 1> loads;

    // Returns how many columns y has from the fragment's first column on; 0 if y lacks the fragment's row i.
    __device__ __forceinline__ int left(const FragmentOutput& of, int i) const {
        return row + ROW_STEP * i < of.m ? of.n - column : 0;
    }
    __device__ __forceinline__ size_t at(const FragmentOutput& of, int i) const {
        return size_t(row + ROW_STEP * i) * of.n + column;
    }

    __device__ __forceinline__ void fetch(const FragmentOutput& of) {
        if constexpr (HAS_BIAS) bias = !OPTIONAL_BIAS || of.bias ? load_pair(of.bias + column, of.n - column) : Pair{};
        if constexpr (HAS_EXTRA) extra = load_pair(of.extra + column, of.n - column);
        if constexpr (HAS_COLUMN_SCALE) scale = load_pair(of.column_scale + column, of.n - column);
        if constexpr (HAS_RESIDUAL)
#pragma unroll
            for (int i = 0; i < 2; ++i) residual[i] = load_pair(of.residual + at(of, i), left(of, i));
        loads.load(of.program, {row, column}, of.m, of.n);
    }

    __device__ __forceinline__ void finish(const float* d, const float* up, const FragmentOutput& of) const {
        ColumnValues<2> values;
        if constexpr (HAS_BIAS) unpack(bias, values.bias);
        if constexpr (HAS_EXTRA) unpack(extra, values.extra);
        if constexpr (HAS_COLUMN_SCALE) unpack(scale, values.scale);
        float results[4] = {};
        if constexpr (HAS_RESIDUAL)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float2 both = widen_pair(residual[i]);
                results[2 * i] = both.x;
                results[2 * i + 1] = both.y;
            }
        const float added[4] = {results[0], results[1], results[2], results[3]};
        finish_four(d, up, values, of.alpha, of.beta, results);
        loads.apply(of.program, results, added, 0);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (!STORES_Y || left(of, i) <= 0) continue;
            const float both[2] = {results[2 * i], results[2 * i + 1]};
            T* to = of.y + at(of, i);
            if constexpr (STORE_BY_THREADS) {
                const float first[1] = {both[0]}, second[1] = {both[1]};
                store<false>(to, first);
                if (left(of, i) > 1) store<false>(to + 1, second);
            } else {
                store<false>(to, both);
            }
        }
    }
};

}  // namespace
