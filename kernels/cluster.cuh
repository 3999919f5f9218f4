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

__device__ __forceinline__ unsigned address_of(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// Stores `value` in the shared memory of block `rank` of the cluster. `address` is the address of the same variable in
// this block.
__device__ __forceinline__ void store_peer(float* address, unsigned rank, float value) {
    if constexpr (CLUSTER > 1) {
        const unsigned own = address_of(address);
        asm volatile(
            "{ .reg .b32 peer; mapa.shared::cluster.u32 peer, %0, %1; st.shared::cluster.f32 [peer], %2; }" ::"r"(own),
            "r"(rank), "f"(value)
            : "memory");
    } else {
        *address = value;
    }
}

// ---- inboxes -----------------------------------------------------------------------------------------------------
// An inbox in the shared memory of a block counts the bytes that blocks of its cluster send to the block. It lets the
// block wait for these bytes alone, while a barrier of the cluster also waits for all earlier stores to global memory.
// The phases of an inbox are numbered; each ends once the block expects an amount of bytes and this amount has arrived.

struct alignas(8) Inbox { unsigned long long state; };

// One thread calls this. Other blocks may send after the next barrier of the cluster.
__device__ __forceinline__ void open_inbox(Inbox& inbox) {
    if constexpr (CLUSTER > 1)
        asm volatile(
            "mbarrier.init.shared::cta.b64 [%0], 1; fence.mbarrier_init.release.cluster;" ::"r"(address_of(&inbox))
            : "memory");
}

// Sets the bytes of the present phase; one thread calls this, once a phase.
__device__ __forceinline__ void expect(Inbox& inbox, unsigned bytes) {
    if constexpr (CLUSTER > 1)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address_of(&inbox)), "r"(bytes)
                     : "memory");
}

// Returns once a phase has ended, which is the present phase or the one before; with CLUSTER 1, once all threads of the
// block are here.
__device__ __forceinline__ void receive(Inbox& inbox, unsigned phase) {
    if constexpr (CLUSTER > 1) {
        asm volatile(
            "{ .reg .pred done;\n"
            "again:\n"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
            "@!done bra again; }" ::"r"(address_of(&inbox)),
            "r"(phase % 2)
            : "memory");
    } else {
        __syncthreads();
    }
}

// Stores like store_peer; the four bytes count in the inbox of that block.
__device__ __forceinline__ void send_peer(float* address, unsigned rank, float value, Inbox& inbox) {
    if constexpr (CLUSTER > 1) {
        asm volatile(
            "{ .reg .b32 peer, count; mapa.shared::cluster.u32 peer, %0, %2; mapa.shared::cluster.u32 count, %1, %2;\n"
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [peer], %3, [count]; }" ::"r"(
                address_of(address)),
            "r"(address_of(&inbox)), "r"(rank), "r"(__float_as_uint(value))
            : "memory");
    } else {
        *address = value;
    }
}
