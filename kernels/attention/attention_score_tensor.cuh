// A mask or a bias, as an argument of a kernel.
#pragma once

struct b8 { unsigned char bits; };

// A tensor of (batch, heads, queries, keys); its stride along keys is a macro or an argument of its own. problem.py
// writes the fields in this order.
template <class E>
struct ScoreTensor {
    const E* elements;
    long long batch, head, query;  // strides in elements; 0 along an axis that broadcasts

    __device__ __forceinline__ const E* plane(int b, int h) const { return elements + b * batch + h * head; }

    // Returns whether `number`, a power of two, divides all strides and `other`.
    __device__ __forceinline__ bool multiples_of(int number, int other = 0) const {
        return (batch | head | query | other) % number == 0;
    }
};
