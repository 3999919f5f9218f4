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

// Loads N neighbouring floats of block `rank` of the cluster; the address is a multiple of 16 if N is a multiple of 4.
template <int N>
__device__ __forceinline__ void load_peer(u32 address, int rank, float (&to)[N]) {
#if CLUSTER != 1
    u32 peer;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(address), "r"(rank));
    constexpr int EACH = N % 4 ? 1 : 4;
#pragma unroll
    for (int i = 0; i < N; i += EACH)
        if constexpr (EACH == 4)
            asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(to[i]), "=f"(to[i + 1]), "=f"(to[i + 2]), "=f"(to[i + 3])
                         : "r"(peer + i * 4)
                         : "memory");
        else asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(to[i]) : "r"(peer + i * 4) : "memory");
#endif
}

// Returns the sum, or the maximum, of a value of CLUSTER_BLOCKS neighbouring lanes.
template <bool MAXIMUM>
__device__ __forceinline__ float over_lanes(float value) {
#pragma unroll
    for (int offset = CLUSTER_BLOCKS / 2; offset > 0; offset /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, value, offset);
        value = MAXIMUM ? fmaxf(value, other) : value + other;
    }
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

// Combines the results of the cluster's `blocks` blocks, which take the vectors of the result in turn. Neighbouring lanes
// each load the share of one block, so that all loads of a vector are in flight at once.
__device__ __forceinline__ void write_cluster(const BlockResult& share, const Out& out, int rank, int blocks) {
    constexpr int AT_ONCE = THREADS / CLUSTER_BLOCKS;
    const int peer = threadIdx.x % CLUSTER_BLOCKS, vectors = out.count * OUT_VECTORS;
    for (int from = rank; from < vectors;
         from += AT_ONCE * blocks) {  // all threads run each round, and exchange values
        const int i = from + threadIdx.x / CLUSTER_BLOCKS * blocks;
        const int row = i / OUT_VECTORS, column = i % OUT_VECTORS * OUT_WIDTH;
        float top[1] = {MINUS_INFINITY}, sum[1] = {}, y[OUT_WIDTH] = {};
        if (i < vectors && peer < blocks) {
            load_peer(address_of(share.top + row), peer, top), load_peer(address_of(share.sum + row), peer, sum);
            load_peer(address_of(share.o + row * PITCH + column), peer, y);
        }
        const float most = over_lanes<true>(top[0]);
        const float factor = exp2_fast(top[0] - (most == MINUS_INFINITY ? 0.0f : most));
        const float total = over_lanes<false>(sum[0] * factor);
#pragma unroll
        for (float& value : y) value = normalized(over_lanes<false>(value * factor), total);
        if (i < vectors && peer == 0) out.put(row, column, y);
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
