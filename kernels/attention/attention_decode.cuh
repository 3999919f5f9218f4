// Combines the results of the blocks that share the keys of a head: in a cluster through distributed shared memory, or
// through scratch memory, which attention_combine reads. CLUSTER is the number of blocks of a cluster; if it is 0, the
// launch sets this number. A block that processes all keys of a head writes its result without combining.
#pragma once

#include "attention_mma.cuh"
#include "attention_mma_shares.cuh"

constexpr int CLUSTER_BLOCKS = CLUSTER ? CLUSTER : 8;  // maximum number of blocks of a cluster

#if CLUSTER > 1
#define IN_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTER
#endif

__device__ __forceinline__ void cluster_sync() {
#if CLUSTER != 1
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ u32 address_of(const float* shared) {
    return shared_base() + u32(reinterpret_cast<const char*>(shared) - shared_bytes);
}

__device__ __forceinline__ float load_peer(u32 address, int rank) {
    float value = 0.0f;
#if CLUSTER != 1
    asm volatile("{ .reg .b32 peer; mapa.shared::cluster.u32 peer, %1, %2; ld.shared::cluster.f32 %0, [peer]; }"
                 : "=f"(value)
                 : "r"(address), "r"(rank)
                 : "memory");
#endif
    return value;
}

// The result of a block, combined from the results of its warps. In shared memory it overwrites the first warp's
// result.
struct BlockResult {
    float *o, *top, *sum;

    __device__ __forceinline__ BlockResult(const WarpResults& results, int count)
        : o(results.o), top(results.sum + WARPS_N * BLOCK_M), sum(top + BLOCK_M) {
        for (int i = threadIdx.x; i < count * OUT_VECTORS; i += THREADS) {
            const int row = i / OUT_VECTORS, column = i % OUT_VECTORS * OUT_WIDTH;
            const Combination<WARPS_N> combination = combine_warps(results, row);
            float y[OUT_WIDTH];
            sum_warps(results, combination, row, column, y);
#pragma unroll
            for (int e = 0; e < OUT_WIDTH; ++e) o[row * PITCH + column + e] = y[e];
            if (column == 0) top[row] = combination.top, sum[row] = combination.sum;
        }
    }
};

// Combines the results of the cluster's `blocks` blocks; each block writes an equal part of the rows.
__device__ __forceinline__ void write_cluster(const BlockResult& share, const Out& out, int rank, int blocks) {
    for (int i = rank * THREADS + threadIdx.x; i < out.count * OUT_VECTORS; i += blocks * THREADS) {
        const int row = i / OUT_VECTORS, column = i % OUT_VECTORS * OUT_WIDTH;
        float tops[CLUSTER_BLOCKS], sums[CLUSTER_BLOCKS], y[OUT_WIDTH] = {};
#pragma unroll
        for (int peer = 0; peer < CLUSTER_BLOCKS; ++peer) {
            tops[peer] = peer < blocks ? load_peer(address_of(share.top + row), peer) : MINUS_INFINITY;
            sums[peer] = peer < blocks ? load_peer(address_of(share.sum + row), peer) : 0.0f;
        }
        const Combination<CLUSTER_BLOCKS> combination(tops, sums);
#pragma unroll
        for (int peer = 0; peer < CLUSTER_BLOCKS; ++peer) {
            if (peer >= blocks) break;
#pragma unroll
            for (int e = 0; e < OUT_WIDTH; ++e)
                y[e] = fmaf(load_peer(address_of(share.o + row * PITCH + column + e), peer), combination.factors[peer],
                            y[e]);
        }
#pragma unroll
        for (float& value : y) value = normalized(value, combination.sum);
        out.put(row, column, y);
    }
}

// Writes the block's result to scratch memory: BLOCK_M rows of HEAD_DIM_V floats, and each row's maximum and sum.
__device__ __forceinline__ void write_partial(const WarpResults& results, int count, const Splits& splits) {
    float* const partial = splits.partial + (i64)blockIdx.x * BLOCK_M * HEAD_DIM_V;
    float2* const totals = splits.totals + (i64)blockIdx.x * BLOCK_M;
    for (int i = threadIdx.x; i < count * OUT_VECTORS; i += THREADS) {
        const int row = i / OUT_VECTORS, column = i % OUT_VECTORS * OUT_WIDTH;
        const Combination<WARPS_N> combination = combine_warps(results, row);
        float y[OUT_WIDTH];
        sum_warps(results, combination, row, column, y);
#pragma unroll
        for (int e = 0; e < OUT_WIDTH; ++e) partial[row * HEAD_DIM_V + column + e] = y[e];
        if (column == 0) totals[row] = make_float2(combination.top, combination.sum);
    }
}

// Writes the result of a block, which has slice `split` of the keys: combined with those of other blocks, or alone.
__device__ __forceinline__ void write_rows(const WarpState& warp, const Out& out, int split, const Splits& splits) {
    const WarpResults results;
    results.store_warp(warp);
    if (CLUSTER <= 1 && splits.partial) {
        write_partial(results, out.count, splits);
    } else if (CLUSTER > 1 || (CLUSTER == 0 && splits.count > 1)) {
        const BlockResult share(results, out.count);
        cluster_sync();
        write_cluster(share, out, split, CLUSTER ? CLUSTER : splits.count);
        cluster_sync();  // no block ends while others read its shared memory
    } else {
        write_combined(results, out);
    }
}
