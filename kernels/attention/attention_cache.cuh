// A growing cache of keys or values in two forms: for all heads, as an argument of the kernels in attention_append.cu
// and attention_with_cache.cu; and for a single head. T is the element type, but for caches that are quantized.
#pragma once
#include "types.cuh"
#include "head_tensor.cuh"
#include "quantized_cache.cuh"

using i64 = long long;

// The rows that a cache consists of: those of the past, followed by the new ones. cache.py writes the fields in this
// order.
struct CacheRows {
    HeadTensor<const Cached> past;
    HeadTensor<const T> added;
};

// The cache of the keys, or of the values, of one head.
struct Cache {
    const Cached* past;
    const T* added;
    Cached* present;
    int past_row, added_row, present_row;  // strides from row to row
    int rows;                              // rows of the past
    bool in_place;                         // the present cache is the same memory as the past cache

    // `to` is the present cache. Its elements are const if it is also an operand of the attention.
    template <class E>
    __device__ __forceinline__ Cache(const CacheRows& of, const HeadTensor<E>& to, int batch, int head, int rows,
                                     bool in_place)
        : past(of.past.at(batch, head)), added(of.added.at(batch, head)),
          present(const_cast<Cached*>(to.at(batch, head))), past_row(int(of.past.row)), added_row(int(of.added.row)),
          present_row(int(to.row)), rows(rows), in_place(in_place) {}
};
