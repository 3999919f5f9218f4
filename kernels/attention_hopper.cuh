// Scores of a warpgroup's thread, and their softmax: for attention_hopper.cu.
//
// A thread holds scores of two rows, 8 apart: s[4 j], s[4 j + 1] are columns 8 j + 2 (lane % 4) and the next of the
// first row, s[4 j + 2], s[4 j + 3] the same of the second.
#pragma once
#include "attention_blocks.cuh"
#include "hopper.cuh"

constexpr int SCORES = KEYS_TILE / 2;  // of a thread

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// What memory adds to the scores of a thread, loaded before they are there. KEY, QUERY: whether it differs along keys
// and queries; PAIRS: two neighbours can be read as one word (or two, of fp32).
template <class E, bool KEY, bool QUERY, bool PAIRS>
struct Fragment {
    static constexpr int ROW_COUNT = QUERY ? 2 : 1;
    static constexpr int COUNT = KEY ? KEYS_TILE / 8 : 1;
    static constexpr int EACH = sizeof(E) / 2;  // words of two elements
    Pack<E, 2> pairs[COUNT][ROW_COUNT];

    __device__ __forceinline__ void load(const char* data, const long long (&rows)[2], int column, int keys) {
        const E* from = reinterpret_cast<const E*>(data);
#pragma unroll
        for (int j = 0; j < COUNT; ++j)
#pragma unroll
            for (int r = 0; r < ROW_COUNT; ++r) {
                const int at = column + 8 * j;
                if constexpr (!KEY) {
                    const Pack<E, 1> one = load_cached<1>(from + rows[r]);
                    pairs[j][r] = both(one, one);
                } else if constexpr (PAIRS) {
                    pairs[j][r] = load_cached<2>(from + rows[r] + min(at, keys - 2));
                } else {
                    pairs[j][r] = both(load_cached<1>(from + rows[r] + min(at, keys - 1)),
                                       load_cached<1>(from + rows[r] + min(at + 1, keys - 1)));
                }
            }
    }

    static __device__ __forceinline__ Pack<E, 2> both(const Pack<E, 1>& low, const Pack<E, 1>& high) {
        if constexpr (sizeof(E) == 4) return {{low.words[0], high.words[0]}};
        else return {{low.words[0] | high.words[0] << 16}};
    }

    __device__ __forceinline__ void add(float (&s)[SCORES]) const {
#pragma unroll
        for (int j = 0; j < KEYS_TILE / 8; ++j)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float values[2];
                unpack(pairs[KEY ? j : 0][QUERY ? r : 0], values);
                s[4 * j + 2 * r] += values[0];
                s[4 * j + 2 * r + 1] += values[1];
            }
    }
};

__device__ __forceinline__ float capped(float s, float cap, float cap_reciprocal) {
    // tanh(x) = 1 - 2 / (1 + exp(2 x)), to 2e-7; the instruction tanh.approx is exact to 5e-4 only
    const float power = exp2_fast(2.0f * LOG2_E * s * cap_reciprocal);
    return cap - 2.0f * cap * reciprocal(1.0f + power);
}

struct Softmax {
    float top[2] = {minus_infinity(), minus_infinity()};
    float sum[2] = {0.0f, 0.0f};  // of this thread's columns

    // Scores to weights; returns by what earlier weights are to be multiplied.
    __device__ __forceinline__ void take(float (&s)[SCORES], float scale, float (&factor)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float best = top[r];
#pragma unroll
            for (int j = 0; j < KEYS_TILE / 8; ++j) best = fmaxf(best, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
            best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 1));
            best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 2));
            if (LAZY && (best - top[r]) * (RAW ? scale : LOG2_E) <= 8.0f) best = top[r];
            const float from = best == minus_infinity() ? 0.0f : best;  // -inf less -inf would be NaN
            if (RAW) {
                const float scaled = __fmul_rn(from, scale);
                factor[r] = exp2_fast(__fmul_rn(top[r], scale) - scaled);
#pragma unroll
                for (int j = 0; j < KEYS_TILE / 8; ++j)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& value = s[4 * j + 2 * r + e];
                        value = exp2_fast(__fmaf_rn(value, scale, -scaled));
                    }
            } else {
                factor[r] = exp2_fast(LOG2_E * (top[r] - from));
#pragma unroll
                for (int j = 0; j < KEYS_TILE / 8; ++j)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& value = s[4 * j + 2 * r + e];
                        value = exp2_fast(LOG2_E * (value - from));
                    }
            }
            top[r] = best;
            sum[r] *= factor[r];
#pragma unroll
            for (int j = 0; j < KEYS_TILE / 8; ++j) sum[r] += s[4 * j + 2 * r] + s[4 * j + 2 * r + 1];
        }
    }

    // Of the whole row.
    __device__ __forceinline__ float total(int r) const {
        const float pair = sum[r] + __shfl_xor_sync(0xffffffffu, sum[r], 1);
        return pair + __shfl_xor_sync(0xffffffffu, pair, 2);
    }
};
