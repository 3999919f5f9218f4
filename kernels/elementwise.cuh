// Elementwise kernels: each thread loads CHUNKS vectors, far apart, before it computes the first.
//
//   WIDTH    elements of a vector access    CHUNKS  vectors per thread    THREADS  of a block
//   STREAMED 1: outputs leave the L2 cache first        INDEX  u32, or u64 where that cannot count all elements
//
// An elementwise op has, for vectors of W elements from element `at` on,
//   Raw<W> fetch<W>(at)       the loads
//   void finish<W>(at, raw)   the result and its store
// What is left over after the last whole vector is done by the last block, an element per thread.
#pragma once

#define ELEMENT_KERNEL extern "C" __global__ void __launch_bounds__(THREADS)

template <bool WHOLE, class Op>
__device__ __forceinline__ void each_vector(const Op& op, INDEX first, INDEX vectors) {
    typename Op::template Raw<WIDTH> raw[CHUNKS];
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k)
        if (WHOLE || first + k * THREADS < vectors) raw[k] = op.template fetch<WIDTH>((first + k * THREADS) * WIDTH);
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k)
        if (WHOLE || first + k * THREADS < vectors) op.template finish<WIDTH>((first + k * THREADS) * WIDTH, raw[k]);
}

template <class Op>
__device__ __forceinline__ void each_element(const Op& op, INDEX count) {
    const INDEX vectors = count / WIDTH;
    const INDEX block = INDEX(blockIdx.x) * (THREADS * CHUNKS);
    if (block + THREADS * CHUNKS <= vectors) each_vector<true>(op, block + threadIdx.x, vectors);
    else each_vector<false>(op, block + threadIdx.x, vectors);
    if constexpr (WIDTH > 1) {
        const INDEX at = vectors * WIDTH + threadIdx.x;
        if (blockIdx.x == gridDim.x - 1 && at < count) op.template finish<1>(at, op.template fetch<1>(at));
    }
}
