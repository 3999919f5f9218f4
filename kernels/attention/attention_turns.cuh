// The norm and the rotation of the new keys and of the queries of an attention over caches.
//
// Macros: those of rotation.cuh, where SIZE is the size of a head and X_T the type of its elements.
#pragma once
#include "types.cuh"
#include "rotation.cuh"

// The operands; cache.py writes the fields in this order.
struct Turns {
    const COS_T* cos;
    const SIN_T* sin;
    const long long* positions;  // (batch, new rows); null: a row's position is its row in the cache
    const SCALE_T *q_scale, *k_scale;
    float q_epsilon, k_epsilon;
    int table_rows;

    // Returns where the tables have the angles of a new row: number `item` of all elements of the batch, and row `row`
    // of its cache.
    __device__ __forceinline__ long long table(long long item, int row) const {
        const long long position = positions ? positions[item] : row;
        return max(0LL, min(position, table_rows - 1LL)) * TABLE_ROW;
    }
};
