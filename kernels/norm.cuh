// A norm along rows with weights, with or without a residual in front.
//
//   X_T ... SUM_T   storage types; those of absent operands do not matter
//   RESIDUAL, BIAS  1 where the operand is there    SUM  1 where x + residual is an output
#pragma once

#include "statistics.cuh"

template <bool ADDS>
struct Read {
    Pack<X_T, WIDTH> x;
};

template <>
struct Read<true> {
    Pack<X_T, WIDTH> x;
    Pack<RESIDUAL_T, WIDTH> residual;
};

// y = (v - shift) * slope * scale + bias with v = x, or v = x + residual, which is also written where SUM is 1.
template <class Statistic, bool ADDS = RESIDUAL>
struct Norm {
    using Partial = Statistic;
    static constexpr bool WEIGHTS_VARY = false;
    static constexpr bool SEEKS = false;
    using Raw = Read<ADDS>;
    struct Weights {
        Pack<SCALE_T, WIDTH> scale;
        Pack<BIAS_T, WIDTH> bias;
    };

    const X_T* x;
    const RESIDUAL_T* residual;
    const SCALE_T* scale;
    const BIAS_T* bias;
    Y_T* y;
    SUM_T* sum;
    float epsilon;
    Weights held[CHUNKS];
    float shift, slope;

    static __device__ __forceinline__ long long at(long long row, int pack) { return row * ROW + pack * WIDTH; }

    __device__ __forceinline__ Raw fetch(long long row, int pack) const {
        Raw raw;
        raw.x = load_once<WIDTH>(x + at(row, pack));
        if constexpr (ADDS) raw.residual = load_once<WIDTH>(residual + at(row, pack));
        return raw;
    }

    __device__ __forceinline__ void copy(Raw& raw, long long row, int pack) const {
        copy_later<WIDTH>(raw.x, x + at(row, pack));
        if constexpr (ADDS) copy_later<WIDTH>(raw.residual, residual + at(row, pack));
    }

    __device__ __forceinline__ void open(const Raw& raw, long long row, int pack, float (&values)[WIDTH], bool first) {
        unpack(raw.x, values);
        if constexpr (ADDS) {
            float added[WIDTH];
            unpack(raw.residual, added);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) values[i] += added[i];
        }
        if constexpr (SUM)
            if (first) store<STREAMED>(sum + at(row, pack), values);
    }

    __device__ __forceinline__ void weights(int k, long long, int pack) {
        held[k].scale = load_cached<WIDTH, WEIGHTS_CONSTANT>(scale + pack * WIDTH);
        if constexpr (BIAS) held[k].bias = load_cached<WIDTH, WEIGHTS_CONSTANT>(bias + pack * WIDTH);
    }

    template <class Has>
    __device__ __forceinline__ Partial local(const float (&values)[CHUNKS][WIDTH], Has has) const {
        return Statistic::of(values, has);
    }

    __device__ __forceinline__ void finish(const Partial& row) {
        shift = row.shift();
        slope = row.slope(epsilon);
    }

    __device__ __forceinline__ void close(long long row, int k, int pack, float (&values)[WIDTH]) const {
        float scales[WIDTH], biases[WIDTH];
        unpack(held[k].scale, scales);
        if constexpr (BIAS) unpack(held[k].bias, biases);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const float normal = (Statistic::CENTRED ? values[i] - shift : values[i]) * slope;
            values[i] = BIAS ? fmaf(normal, scales[i], biases[i]) : normal * scales[i];
        }
        store<STREAMED>(y + at(row, pack), values);
    }
};
