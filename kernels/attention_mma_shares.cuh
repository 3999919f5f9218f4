// Results of attention on their way out: from the registers of a warp, or put together from several warps' shares of
// the keys, each with its own maximum and sum.
#pragma once

#include "attention_mma.cuh"

constexpr int PITCH = PV_SIZE + 8;  // floats of a row: the 16-byte stores of eight rows meet no bank twice
constexpr int PIECES = VALUE_SIZE / OUT_ACCESS;

// The result of one block.
struct Out {
    OUT_T* to;
    i64 head, row;
    int first, count;  // rows

    __device__ __forceinline__ Out(const Problem& p, const Place& at)
        : to(p.out + at.batch * p.out_batch + (i64)at.kv * GROUP * p.out_head), head(p.out_head), row(p.out_row),
          first(at.row), count(min(ROWS, p.queries * GROUP - at.row)) {}

    __device__ __forceinline__ OUT_T* at(int r) const {
        return to + (first + r) % GROUP * head + (first + r) / GROUP * row;
    }
};

__device__ __forceinline__ void write_warp(const Warp& warp, const Out& out) {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = warp.row(mt, half);
            if (row >= out.count) continue;
            OUT_T* to = out.at(row) + 2 * warp.quad;
#pragma unroll
            for (int vt = 0; vt < PV_TILES; ++vt) {
                const float y[2] = {finished(warp.o[mt][vt][2 * half], warp.sum[mt][half]),
                                    finished(warp.o[mt][vt][2 * half + 1], warp.sum[mt][half])};
                const int column = 8 * vt + 2 * warp.quad;
                if (OUT_ACCESS > 1 && column < VALUE_SIZE) {
                    store<false, 2>(to + 8 * vt, y);
                } else {
                    if (column < VALUE_SIZE) store<false, 1>(to + 8 * vt, {y[0]});
                    if (column + 1 < VALUE_SIZE) store<false, 1>(to + 8 * vt + 1, {y[1]});
                }
            }
        }
}

// In shared memory: o[WARPS_N][ROWS][PITCH], top[WARPS_N][ROWS], sum[WARPS_N][ROWS].
struct Shares {
    float *o, *top, *sum;

    __device__ __forceinline__ Shares()
        : o(reinterpret_cast<float*>(shared_bytes)), top(o + WARPS_N * ROWS * PITCH), sum(top + WARPS_N * ROWS) {}

    __device__ __forceinline__ void put(const Warp& warp) const {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = warp.n * ROWS + warp.row(mt, half);
                if (warp.quad == 0) top[row] = warp.top[mt][half], sum[row] = warp.sum[mt][half];
#pragma unroll
                for (int vt = 0; vt < PV_TILES; ++vt)
                    *reinterpret_cast<float2*>(&o[row * PITCH + 8 * vt + 2 * warp.quad]) =
                        make_float2(warp.o[mt][vt][2 * half], warp.o[mt][vt][2 * half + 1]);
            }
        __syncthreads();
    }
};

// N shares of a row: what each counts for against their common maximum, and the sum.
template <int N>
struct Merge {
    float top, sum, factors[N];

    __device__ __forceinline__ Merge(const float (&tops)[N], const float (&sums)[N]) : top(NOTHING), sum(0.0f) {
#pragma unroll
        for (int i = 0; i < N; ++i) top = fmaxf(top, tops[i]);
        const float zero = top == NOTHING ? 0.0f : top;
#pragma unroll
        for (int i = 0; i < N; ++i) factors[i] = exp2_fast(tops[i] - zero), sum = fmaf(sums[i], factors[i], sum);
    }
};

__device__ __forceinline__ Merge<WARPS_N> merge_warps(const Shares& shares, int row) {
    float tops[WARPS_N], sums[WARPS_N];
#pragma unroll
    for (int n = 0; n < WARPS_N; ++n) tops[n] = shares.top[n * ROWS + row], sums[n] = shares.sum[n * ROWS + row];
    return {tops, sums};
}

// OUT_ACCESS columns of a row of which the warps have shares.
__device__ __forceinline__ void sum_shares(
    const Shares& shares, const Merge<WARPS_N>& merge, int row, int column, float (&y)[OUT_ACCESS]) {
#pragma unroll
    for (int i = 0; i < OUT_ACCESS; ++i) {
        y[i] = 0.0f;
#pragma unroll
        for (int n = 0; n < WARPS_N; ++n)
            y[i] = fmaf(shares.o[(n * ROWS + row) * PITCH + column + i], merge.factors[n], y[i]);
    }
}

__device__ __forceinline__ void write_shares(const Shares& shares, const Out& out) {
    for (int i = threadIdx.x; i < out.count * PIECES; i += THREADS) {
        const int row = i / PIECES, column = i % PIECES * OUT_ACCESS;
        const Merge<WARPS_N> merge = merge_warps(shares, row);
        float y[OUT_ACCESS];
        sum_shares(shares, merge, row, column, y);
#pragma unroll
        for (float& value : y) value = finished(value, merge.sum);
        store<false, OUT_ACCESS>(out.at(row) + column, y);
    }
}
