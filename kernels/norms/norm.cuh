// Norms along rows with weights; a residual may be added first.
//
//   X_T ... SUM_T   storage types; those of absent operands do not matter
//   RESIDUAL, BIAS  1: the operand is present    SUM  1: x + residual is an output
#pragma once

#include "row_program.cuh"
#include "statistics.cuh"

template <bool ADDS>
struct RawPack {
    Pack<X_T, WIDTH> x;
};

template <>
struct RawPack<true> {
    Pack<X_T, WIDTH> x;
    Pack<RESIDUAL_T, WIDTH> residual;
};

// A row op, which rows.cuh calls: y = (v - shift) * slope * scale + bias, where v is x, or x + residual. With SUM, v is
// written as well. The program (program.cuh), which is applied to y, consists of the operators fused after the norm.
template <class Statistic, bool ADDS = RESIDUAL>
struct Norm {
    using Partial = Statistic;
    static constexpr bool WEIGHTS_VARY = HAS_PROGRAM;
    static constexpr bool LOCATES = false;
    using Raw = RawPack<ADDS>;
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
    bool streamed;
    RowProgram program;
    Weights packs[CHUNKS];
    float shift, slope;

    static __device__ __forceinline__ long long at(long long row, int pack) { return row * ROW + pack * WIDTH; }

    __device__ __forceinline__ Raw fetch(long long row, int pack) const {
        Raw raw;
        raw.x = load_once<WIDTH>(x + at(row, pack));
        if constexpr (ADDS) raw.residual = load_once<WIDTH>(residual + at(row, pack));
        return raw;
    }

    __device__ __forceinline__ void copy_async(Raw& raw, long long row, int pack) const {
        copy_to_shared<WIDTH>(raw.x, x + at(row, pack));
        if constexpr (ADDS) copy_to_shared<WIDTH>(raw.residual, residual + at(row, pack));
    }

    __device__ __forceinline__ void convert(const Raw& raw, long long row, int pack, float (&values)[WIDTH],
                                            bool first) {
        unpack(raw.x, values);
        if constexpr (ADDS) {
            float added[WIDTH];
            unpack(raw.residual, added);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) values[i] += added[i];
        }
        if constexpr (SUM)
            if (first) store_as(streamed, sum + at(row, pack), values);
    }

    __device__ __forceinline__ void load_weights(int k, long long row, int pack) {
        packs[k].scale = load_cached<WIDTH, WEIGHTS_CONSTANT>(scale + pack * WIDTH);
        if constexpr (BIAS) packs[k].bias = load_cached<WIDTH, WEIGHTS_CONSTANT>(bias + pack * WIDTH);
        program.load_early(k, row, pack * WIDTH, at(row, pack));
    }

    template <class Exists>
    __device__ __forceinline__ Partial reduce_thread(const float (&values)[CHUNKS][WIDTH], Exists exists) const {
        return Statistic::of(values, exists);
    }

    __device__ __forceinline__ void set_statistics(const Partial& row) {
        shift = row.shift();
        slope = row.slope(ROW, epsilon);
    }

    __device__ __forceinline__ void store_result(long long row, int k, int pack, float (&values)[WIDTH]) {
        float scales[WIDTH], biases[WIDTH];
        unpack(packs[k].scale, scales);
        if constexpr (BIAS) unpack(packs[k].bias, biases);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const float normalized = (Statistic::CENTRED ? values[i] - shift : values[i]) * slope;
            values[i] = BIAS ? fmaf(normalized, scales[i], biases[i]) : normalized * scales[i];
        }
        program.apply(k, row, pack * WIDTH, at(row, pack), values);
        store_as(streamed, y + at(row, pack), values);
    }
};
