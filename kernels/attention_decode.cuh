// Results of blocks that share the keys of a head: the blocks are a cluster and meet through distributed shared memory
// (CLUSTER > 1), or leave their results in scratch memory for attention_combine, or there is one block only.
#pragma once

#include "attention_mma.cuh"
#include "attention_mma_shares.cuh"

constexpr int PEERS = CLUSTER > 1 ? CLUSTER : 1;

#if CLUSTER > 1
#define IN_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTER
#endif

__device__ __forceinline__ void cluster_sync() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ u32 address_of(const float* shared) {
    return shared_base() + u32(reinterpret_cast<const char*>(shared) - shared_bytes);
}

__device__ __forceinline__ float peer_float(u32 address, int rank) {
    float value = 0.0f;
#if CLUSTER > 1
    asm volatile("{ .reg .b32 peer; mapa.shared::cluster.u32 peer, %1, %2; ld.shared::cluster.f32 %0, [peer]; }"
                 : "=f"(value) : "r"(address), "r"(rank) : "memory");
#endif
    return value;
}

// The result of a block: rows like those of a warp, in the place of the first warp's.
struct BlockShare {
    float *o, *top, *sum;

    __device__ __forceinline__ BlockShare(const Shares& shares, int count)
        : o(shares.o), top(shares.sum + WARPS_N * ROWS), sum(top + ROWS) {
        for (int i = threadIdx.x; i < count * PIECES; i += THREADS) {
            const int row = i / PIECES, column = i % PIECES * OUT_ACCESS;
            const Merge<WARPS_N> merge = merge_warps(shares, row);
            float y[OUT_ACCESS];
            sum_shares(shares, merge, row, column, y);
#pragma unroll
            for (int e = 0; e < OUT_ACCESS; ++e) o[row * PITCH + column + e] = y[e];
            if (column == 0) top[row] = merge.top, sum[row] = merge.sum;
        }
    }
};

// Each block of the cluster writes its part of the rows.
__device__ __forceinline__ void write_cluster(const BlockShare& share, const Out& out, int rank) {
    for (int i = rank * THREADS + threadIdx.x; i < out.count * PIECES; i += PEERS * THREADS) {
        const int row = i / PIECES, column = i % PIECES * OUT_ACCESS;
        float tops[PEERS], sums[PEERS], y[OUT_ACCESS] = {};
#pragma unroll
        for (int peer = 0; peer < PEERS; ++peer) {
            tops[peer] = peer_float(address_of(share.top + row), peer);
            sums[peer] = peer_float(address_of(share.sum + row), peer);
        }
        const Merge<PEERS> merge(tops, sums);
#pragma unroll
        for (int peer = 0; peer < PEERS; ++peer)
#pragma unroll
            for (int e = 0; e < OUT_ACCESS; ++e)
                y[e] = fmaf(
                    peer_float(address_of(share.o + row * PITCH + column + e), peer), merge.factors[peer], y[e]);
#pragma unroll
        for (float& value : y) value = finished(value, merge.sum);
        store<false, OUT_ACCESS>(out.at(row) + column, y);
    }
}

// Scratch memory: per block, ROWS rows of VALUE_SIZE floats; per row, its maximum and its sum.
__device__ __forceinline__ void write_partial(const Shares& shares, int count, float* partial, float2* totals) {
    partial += (i64)blockIdx.x * ROWS * VALUE_SIZE, totals += (i64)blockIdx.x * ROWS;
    for (int i = threadIdx.x; i < count * PIECES; i += THREADS) {
        const int row = i / PIECES, column = i % PIECES * OUT_ACCESS;
        const Merge<WARPS_N> merge = merge_warps(shares, row);
        float y[OUT_ACCESS];
        sum_shares(shares, merge, row, column, y);
#pragma unroll
        for (int e = 0; e < OUT_ACCESS; ++e) partial[row * VALUE_SIZE + column + e] = y[e];
        if (column == 0) totals[row] = make_float2(merge.top, merge.sum);
    }
}

// `rank`: of the block in its cluster; without scratch memory a block has all keys.
__device__ __forceinline__ void write_rows(
    const Warp& warp, const Out& out, int rank, float* partial, float2* totals) {
    const Shares shares;
    shares.put(warp);
    if constexpr (CLUSTER > 1) {
        const BlockShare share(shares, out.count);
        cluster_sync();
        write_cluster(share, out, rank);
        cluster_sync();  // nobody's shared memory goes away while others read it
    } else if (partial) {
        write_partial(shares, out.count, partial, totals);
    } else {
        write_shares(shares, out);
    }
}
