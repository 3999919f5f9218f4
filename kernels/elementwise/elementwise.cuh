// Elementwise kernels: each thread loads CHUNKS vectors, which lie a block's width apart, before it computes the first.
//
//   WIDTH     elements of a vector access    CHUNKS  vectors per thread    THREADS  threads of a block
//   WHOLE     1: every thread has CHUNKS vectors; 0: some threads have fewer
//   REST      1: some elements are left over after the last whole vector; one more block computes them, one per thread
//   RELEASE   1: the next kernel may start before this one stores
//   STREAMED  1: outputs leave the L2 cache first        INDEX  u32, or u64 where u32 cannot count all elements
//
// REST, RELEASE and STREAMED can depend on `count` and gridDim.
//
// An elementwise op has, for a vector of W elements that begins at element `at`,
//   Raw<W> fetch<W>(at)       the loads
//   void finish<W>(at, raw)   the computation and the store
#pragma once

#define ELEMENT_KERNEL extern "C" __global__ void __launch_bounds__(THREADS)

static_assert(WIDTH <= THREADS, "one block computes the remaining elements");

template <class Op>
__device__ __forceinline__ void each_vector(const Op& op, INDEX first, INDEX vectors) {
    typename Op::template Raw<WIDTH> raw[CHUNKS];
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k)
        if (WHOLE || first + k * THREADS < vectors) raw[k] = op.template fetch<WIDTH>((first + k * THREADS) * WIDTH);
    if (RELEASE) release_successor();
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k)
        if (WHOLE || first + k * THREADS < vectors) op.template finish<WIDTH>((first + k * THREADS) * WIDTH, raw[k]);
}

template <class Op>
__device__ __forceinline__ void each_element(const Op& op, INDEX count) {
    const INDEX vectors = count / WIDTH;
    wait_for_predecessor();
    if (REST && blockIdx.x == gridDim.x - 1) {
        const INDEX at = vectors * WIDTH + threadIdx.x;
        if (at < count) op.template finish<1>(at, op.template fetch<1>(at));
    } else {
        each_vector(op, INDEX(blockIdx.x) * (THREADS * CHUNKS) + threadIdx.x, vectors);
    }
}
