// out = softmax(mask(cap(scale q k^T) + bias)) v for few queries and many keys, which are split over blocks.
//
// Keys and values are read once, whatever the number of query heads that share them: these are the rows of one tile.
// The blocks of a head are a cluster whose results meet through distributed shared memory (CLUSTER > 1), or leave
// their results in scratch memory for attention_combine.
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

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) IN_CLUSTER
    attention_decode(ATTENTION_PARAMETERS, int splits, float* partial, float2* totals) {
    const Problem problem{ATTENTION_ARGUMENTS};
    const int split = blockIdx.x % splits;
    const Place at = place_of(blockIdx.x / splits, problem);
    const int tiles = (at.end + BLOCK_K - 1) / BLOCK_K, each = (tiles + splits - 1) / splits;
    Warp warp;
    attend(warp, at, min(split * each, tiles), min((split + 1) * each, tiles), problem);
    const Out result(problem, at);
    const Shares shares;
    shares.put(warp);
    if constexpr (CLUSTER > 1) {
        const BlockShare share(shares, result.count);
        cluster_sync();
        write_cluster(share, result, split);
        cluster_sync();  // nobody's shared memory goes away while others read it
    } else {
        write_partial(shares, result.count, partial, totals);
    }
}

constexpr int COMBINE_THREADS = 128, MOST_SPLITS = 64;
constexpr int ABREAST = PIECES < COMBINE_THREADS ? PIECES : COMBINE_THREADS, LANES = COMBINE_THREADS / ABREAST;

// The results of all splits of a row become one; a block for each row, whose threads share columns and splits.
extern "C" __global__ void __launch_bounds__(COMBINE_THREADS) attention_combine(
    OUT_T* out, i64 out_batch, i64 out_head, i64 out_row, int queries, int kv_heads, int splits, const float* partial,
    const float2* totals) {
    __shared__ float2 shares[MOST_SPLITS];
    __shared__ float lanes[LANES][ABREAST * OUT_ACCESS];
    const int rows = queries * GROUP, head = blockIdx.x / rows, row = blockIdx.x % rows;
    const i64 first = (i64)head * splits * ROWS + row;
    if (threadIdx.x < splits) shares[threadIdx.x] = totals[first + threadIdx.x * ROWS];
    __syncthreads();
    float top = NOTHING, sum = 0.0f;
    for (int split = 0; split < splits; ++split) top = fmaxf(top, shares[split].x);
    const float zero = top == NOTHING ? 0.0f : top;
    for (int split = 0; split < splits; ++split) sum = fmaf(shares[split].y, exp2_fast(shares[split].x - zero), sum);
    OUT_T* to = out + head / kv_heads * out_batch + (head % kv_heads * GROUP + row % GROUP) * out_head;
    to += row / GROUP * out_row;
    const int lane = threadIdx.x / ABREAST, place = threadIdx.x % ABREAST;
    for (int column = place * OUT_ACCESS; column < VALUE_SIZE; column += ABREAST * OUT_ACCESS) {
        float y[OUT_ACCESS] = {};
#pragma unroll 4
        for (int split = lane; split < splits && lane < LANES; split += LANES) {
            const float factor = exp2_fast(shares[split].x - zero);
#pragma unroll
            for (int e = 0; e < OUT_ACCESS; ++e)
                y[e] = fmaf(partial[(first + split * ROWS) * VALUE_SIZE + column + e], factor, y[e]);
        }
        if constexpr (LANES > 1) {
            if (lane < LANES)
#pragma unroll
                for (int e = 0; e < OUT_ACCESS; ++e) lanes[lane][place * OUT_ACCESS + e] = y[e];
            __syncthreads();
            for (int other = 1; other < LANES && lane == 0; ++other)
#pragma unroll
                for (int e = 0; e < OUT_ACCESS; ++e) y[e] += lanes[other][place * OUT_ACCESS + e];
        }
        if (lane > 0) continue;
#pragma unroll
        for (float& value : y) value = finished(value, sum);
        store<false, OUT_ACCESS>(to + column, y);
    }
}
