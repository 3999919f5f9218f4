// Rings of buffers that a producer warpgroup fills and that consumer warpgroups read.
#pragma once
#include "types.cuh"

// The index of this thread's warpgroup. The shuffle tells the compiler that all threads of a warp have the same index.
__device__ __forceinline__ int warpgroup() { return __shfl_sync(0xffffffff, threadIdx.x / 128, 0); }

// A position in a ring of SIZE buffers, and the number of completed rounds modulo 2.
template <int SIZE>
struct Ring {
    int at = 0;
    u32 parity = 0;

    __device__ __forceinline__ void next() {
        if (++at == SIZE) {
            at = 0;
            parity ^= 1;
        }
    }
    __device__ __forceinline__ void skip(int count) {
        const int to = at + count;
        at = to % SIZE;
        parity ^= to / SIZE & 1;
    }
};
