// Helpers for a cluster of CLUSTER blocks (sm_90 and later); with CLUSTER 1, for a single block.
#pragma once

#if CLUSTER > 1
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_DIMS
#endif

__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank = 0;
    if constexpr (CLUSTER > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The two halves of a barrier over all blocks of the cluster. With CLUSTER 1, cluster_arrive does nothing, and
// cluster_wait is __syncthreads.
__device__ __forceinline__ void cluster_arrive() {
    if constexpr (CLUSTER > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
    if constexpr (CLUSTER > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    else __syncthreads();
}

// Stores `value` in the shared memory of block `rank` of the cluster. `address` is the address of the same variable in
// this block.
__device__ __forceinline__ void store_peer(float* address, unsigned rank, float value) {
    if constexpr (CLUSTER > 1) {
        const unsigned own = static_cast<unsigned>(__cvta_generic_to_shared(address));
        asm volatile(
            "{ .reg .b32 peer; mapa.shared::cluster.u32 peer, %0, %1; st.shared::cluster.f32 [peer], %2; }" ::"r"(own),
            "r"(rank), "f"(value)
            : "memory");
    } else {
        *address = value;
    }
}
