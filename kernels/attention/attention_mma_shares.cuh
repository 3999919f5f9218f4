// Writes results to memory: those in the registers of one warp, or the combined results of several warps that share the
// keys. Each of these warps has its own maximum and sum.
#pragma once

#include "attention_mma.cuh"
#include "program.cuh"

constexpr int PITCH = PV_SIZE + 8;  // floats between rows, so that 16-byte stores of eight rows have no bank conflicts
constexpr int OUT_VECTORS = HEAD_DIM_V / OUT_WIDTH;

// The rows of the result that a block writes.
struct Out {
    OUT_T* to;
    i64 head, row;
    int first, count;  // the first row, and the number of rows
    int batch, first_head;
    Program program;

    __device__ __forceinline__ Out(const Problem& p, const WorkTile& at, const Program& program = {})
        : to(p.out.at(at.batch, at.kv * GQA_GROUP)), head(p.out.head), row(p.out.row), first(at.row),
          count(min(BLOCK_M, p.queries * GQA_GROUP - at.row)), batch(at.batch), first_head(at.kv * GQA_GROUP),
          program(program) {}

    __device__ __forceinline__ OUT_T* at(int r) const {
        return to + (first + r) % GQA_GROUP * head + (first + r) / GQA_GROUP * row;
    }

    // Stores W columns of a row.
    template <int W>
    __device__ __forceinline__ void put(int r, int column, float (&y)[W]) const {
        const int query = (first + r) / GQA_GROUP, own_head = first_head + (first + r) % GQA_GROUP;
        if constexpr (HAS_PROGRAM) apply_program(program, program.locate(batch, own_head, query), column, y);
        if constexpr (STORES_Y) store<false, W>(at(r) + column, y);
    }
};

__device__ __forceinline__ void write_warp(const WarpState& warp, const Out& out) {
#pragma unroll
    for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = warp.row(mt, half);
            if (row >= out.count) continue;
#pragma unroll
            for (int vt = 0; vt < V_TILES; ++vt) {
                float y[2] = {normalized(warp.o[mt][vt][2 * half], warp.sum[mt][half]),
                              normalized(warp.o[mt][vt][2 * half + 1], warp.sum[mt][half])};
                const int column = 8 * vt + 2 * warp.quad;
                if (OUT_WIDTH > 1 && column < HEAD_DIM_V) {
                    out.put(row, column, y);
                } else {
                    float one[1] = {y[0]}, other[1] = {y[1]};
                    if (column < HEAD_DIM_V) out.put(row, column, one);
                    if (column + 1 < HEAD_DIM_V) out.put(row, column + 1, other);
                }
            }
        }
}

// The results of a block's warps in shared memory: o[WARPS_N][BLOCK_M][PITCH], top[WARPS_N][BLOCK_M],
// sum[WARPS_N][BLOCK_M].
struct WarpResults {
    float *o, *top, *sum;

    __device__ __forceinline__ WarpResults()
        : o(reinterpret_cast<float*>(shared_bytes)), top(o + WARPS_N * BLOCK_M * PITCH), sum(top + WARPS_N * BLOCK_M) {}

    __device__ __forceinline__ void store_warp(const WarpState& warp) const {
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = warp.n * BLOCK_M + warp.row(mt, half);
                if (warp.quad == 0) top[row] = warp.top[mt][half], sum[row] = warp.sum[mt][half];
#pragma unroll
                for (int vt = 0; vt < V_TILES; ++vt)
                    *reinterpret_cast<float2*>(&o[row * PITCH + warp.column(vt)]) =
                        make_float2(warp.o[mt][vt][2 * half], warp.o[mt][vt][2 * half + 1]);
            }
        __syncthreads();
    }
};

// How to combine N partial results of a row: their common maximum and sum, and a factor for each partial result.
template <int N>
struct Combination {
    float top, sum, factors[N];

    __device__ __forceinline__ Combination(const float (&tops)[N], const float (&sums)[N])
        : top(MINUS_INFINITY), sum(0.0f) {
#pragma unroll
        for (int i = 0; i < N; ++i) top = fmaxf(top, tops[i]);
        const float zero = top == MINUS_INFINITY ? 0.0f : top;
#pragma unroll
        for (int i = 0; i < N; ++i) factors[i] = exp2_fast(tops[i] - zero), sum = fmaf(sums[i], factors[i], sum);
    }
};

__device__ __forceinline__ Combination<WARPS_N> combine_warps(const WarpResults& results, int row) {
    float tops[WARPS_N], sums[WARPS_N];
#pragma unroll
    for (int n = 0; n < WARPS_N; ++n)
        tops[n] = results.top[n * BLOCK_M + row], sums[n] = results.sum[n * BLOCK_M + row];
    return {tops, sums};
}

// Adds up OUT_WIDTH columns of a row over the warps.
__device__ __forceinline__ void sum_warps(const WarpResults& results, const Combination<WARPS_N>& combination, int row,
                                          int column, float (&y)[OUT_WIDTH]) {
#pragma unroll
    for (int i = 0; i < OUT_WIDTH; ++i) {
        y[i] = 0.0f;
#pragma unroll
        for (int n = 0; n < WARPS_N; ++n)
            y[i] = fmaf(results.o[(n * BLOCK_M + row) * PITCH + column + i], combination.factors[n], y[i]);
    }
}

__device__ __forceinline__ void write_combined(const WarpResults& results, const Out& out) {
    for (int i = threadIdx.x; i < out.count * OUT_VECTORS; i += THREADS) {
        const int row = i / OUT_VECTORS, column = i % OUT_VECTORS * OUT_WIDTH;
        const Combination<WARPS_N> combination = combine_warps(results, row);
        float y[OUT_WIDTH];
        sum_warps(results, combination, row, column, y);
#pragma unroll
        for (float& value : y) value = normalized(value, combination.sum);
        out.put(row, column, y);
    }
}
