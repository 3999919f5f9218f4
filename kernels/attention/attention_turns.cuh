// Normalizes and rotates the queries and the new keys of an attention with caches.
//
// Macros: those of rotation.cuh, where SIZE is the size of a head and X_T the type of its elements; TURNS, 0: nothing is
// turned, and the operands are absent.
#pragma once
#include "types.cuh"
#if defined(TURNS) && !TURNS
struct Turns {
    const void* operands[5];
    float epsilons[2];
    int table_rows;
};
#else
#include "rotation.cuh"

// The operands of the norm and the rotation; cache.py writes the fields in this order.
struct Turns {
    const COS_T* cos;
    const SIN_T* sin;
    const long long* positions;  // (batch, new rows); null: a row's position is its row in the cache
    const SCALE_T *q_scale, *k_scale;
    float q_epsilon, k_epsilon;
    int table_rows;

    // Returns the offset in the tables at which a new row's angles begin. `item` is the row's index among the new rows
    // of the whole batch, and `row` its index in the cache.
    __device__ __forceinline__ long long table(long long item, int row) const {
        const long long position = positions ? positions[item] : row;
        return max(0LL, min(position, table_rows - 1LL)) * TABLE_ROW;
    }
};
#endif
