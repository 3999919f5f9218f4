// What follows a matrix product whose sums lie in shared memory: bias, activation, gate, column scale, residual.
//
//   ITEM_T  storage of all tensors    COLUMNS, DEPTH  n and k    CLUSTER  blocks whose sums add up to the product
//   WIDTH   elements of an access to y, residual and the vectors of n; divides n
//   PARTS   2: a gated product        BIAS, UP_BIAS, COLUMN_SCALE, RESIDUAL  1: there is one    ACTIVATION, PRECISE
#pragma once

using T = ITEM_T;
using i64 = long long;

constexpr int N = COLUMNS, K = DEPTH;
static_assert(N % WIDTH == 0, "vectors end with a row");

#if CLUSTER > 1
#define SUMS_SPACE ".shared::cluster"
#else
#define SUMS_SPACE ".shared"
#endif

__device__ __forceinline__ unsigned shared_address(const void* place) {
    return static_cast<unsigned>(__cvta_generic_to_shared(place));
}

__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank = 0;
    if constexpr (CLUSTER > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void tile_barrier() {  // over the blocks that share a tile
    if constexpr (CLUSTER > 1)
        asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
    else __syncthreads();
}

// COUNT floats in the shared memory of block `rank` of the cluster, at the place where this block has `from`.
template <int COUNT>
__device__ __forceinline__ void load_sums(const float* from, int rank, float (&to)[COUNT]) {
    unsigned place = shared_address(from);
    if constexpr (CLUSTER > 1)
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(place) : "r"(shared_address(from)), "r"(rank));
    constexpr int EACH = COUNT % 4 ? 1 : 4;
#pragma unroll
    for (int i = 0; i < COUNT; i += EACH) {
        if constexpr (EACH == 4)
            asm volatile("ld" SUMS_SPACE ".v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(to[i]), "=f"(to[i + 1]), "=f"(to[i + 2]), "=f"(to[i + 3]) : "r"(place + 4 * i));
        else
            asm volatile("ld" SUMS_SPACE ".f32 %0, [%1];" : "=f"(to[i]) : "r"(place + 4 * i));
    }
}

// The sums of all blocks that share the tile.
template <int COUNT>
__device__ __forceinline__ void add_ranks(const float* from, float (&total)[COUNT]) {
    float read[CLUSTER][COUNT];
#pragma unroll
    for (int rank = 0; rank < CLUSTER; ++rank) load_sums(from, rank, read[rank]);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        total[i] = read[0][i];
#pragma unroll
        for (int rank = 1; rank < CLUSTER; ++rank) total[i] += read[rank][i];
    }
}

struct Epilogue {
    const T *bias, *up_bias, *column_scale, *residual;
    T* y;
    float alpha, beta;

    // `sums` is where those of the first of WIDTH columns are, those of the other part `part` floats further.
    __device__ __forceinline__ void finish(const float* sums, int part, i64 row, int column) const {
        float values[WIDTH], other[WIDTH];
        add_ranks(sums, values);
        if constexpr (BIAS) {
            unpack(load_cached<WIDTH>(bias + column), other);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) values[i] += other[i];
        }
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) values[i] = activate::ACTIVATION(values[i], alpha, beta);
        if constexpr (PARTS == 2) gate(sums + part, column, values);
        if constexpr (COLUMN_SCALE) {
            unpack(load_cached<WIDTH>(column_scale + column), other);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) values[i] *= other[i];
        }
        if constexpr (RESIDUAL) {
            unpack(load_once<WIDTH>(residual + row * N + column), other);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) values[i] += other[i];
        }
        store<false>(y + row * N + column, values);
    }

    __device__ __forceinline__ void gate(const float* sums, int column, float (&values)[WIDTH]) const {
        float up[WIDTH], other[WIDTH];
        add_ranks(sums, up);
        if constexpr (UP_BIAS) {
            unpack(load_cached<WIDTH>(up_bias + column), other);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) up[i] += other[i];
        }
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) values[i] *= up[i];
    }
};
