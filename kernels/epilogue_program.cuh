// What the generated text of kernels/epilogue_program.py calls: accesses to W neighbouring elements of any dtype, of
// and the first `left` of them are inside of their row. ALIGNED: the first is at a multiple of W elements.
#pragma once
#include "types.cuh"
#include "activations.cuh"
#include "output_position.cuh"

namespace program {

#include "region.cuh"

template <class S, int W>
struct Elements {  // a vector as memory holds it
    S at[W];

    template <bool ALIGNED>
    __device__ __forceinline__ void load(const S* from, int left) {
        if (ALIGNED && left >= W) {
            program::load(from, at);
        } else {
#pragma unroll
            for (int i = 0; i < W; ++i) at[i] = i < left ? from[i] : S(0);
        }
    }
    // The element of column `first` + i is at from(first + i).
    template <class From>
    __device__ __forceinline__ void load_each(int first, int left, From from) {
#pragma unroll
        for (int i = 0; i < W; ++i) at[i] = i < left ? *from(first + i) : S(0);
    }
    __device__ __forceinline__ void read(S (&to)[W]) const {
#pragma unroll
        for (int i = 0; i < W; ++i) to[i] = at[i];
    }
};

template <class S, int W>
struct Floats {
    Pack<S, W> packed;

    template <bool ALIGNED>
    __device__ __forceinline__ void load(const S* from, int left) {
        if (ALIGNED && left >= W) {
            packed = load_cached<W>(from);
        } else {
            float each[W];
#pragma unroll
            for (int i = 0; i < W; ++i) each[i] = i < left ? load_one(from + i) : 0.0f;
            packed = pack<S, W>(each);
        }
    }
    template <class From>
    __device__ __forceinline__ void load_each(int first, int left, From from) {
        float each[W];
#pragma unroll
        for (int i = 0; i < W; ++i) each[i] = i < left ? load_one(from(first + i)) : 0.0f;
        packed = pack<S, W>(each);
    }
    __device__ __forceinline__ void read(float (&to)[W]) const { unpack(packed, to); }
};

template <int W> struct Elements<f32, W> : Floats<f32, W> {};
template <int W> struct Elements<f16, W> : Floats<f16, W> {};
template <int W> struct Elements<bf16, W> : Floats<bf16, W> {};

template <bool ALIGNED, int W, class S>
__device__ __forceinline__ void store(S* to, const typename Number<S>::Type (&values)[W], int left) {
    if (ALIGNED && left >= W) {
        put(false, to, values);
    } else {
#pragma unroll
        for (int i = 0; i < W; ++i)
            if (i < left) put_one(false, to + i, values[i]);
    }
}

}  // namespace program
