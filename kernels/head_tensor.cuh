// The layout in memory of the heads of an attention or a rotary embedding, as an argument of a kernel.
#pragma once

// A tensor of (batch, heads, rows, elements), whose last axis is contiguous. head_tensor.py writes the fields in this
// order.
template <class E>
struct HeadTensor {
    E* data;
    long long batch, head, row;  // strides in elements

    __device__ __forceinline__ E* at(int b, int h) const { return data + b * batch + h * head; }
};
