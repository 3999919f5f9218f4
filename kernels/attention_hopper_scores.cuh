// Scores of a warpgroup's thread, and their softmax: for attention_hopper.cu.
//
// A thread holds scores of two rows, 8 apart: s[4 j], s[4 j + 1] are columns 8 j + 2 (lane % 4) and the next of the
// first row, s[4 j + 2], s[4 j + 3] the same of the second.
#pragma once
#include "attention_hopper_shape.cuh"

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

// What masks, bias, cap, diagonal and last key make of a thread's scores.
struct Terms {
    int group, column, keys;  // column: in a tile
    int limit[2], unlimited;  // how many keys each row sees, and how many all of the warpgroup
    float scale, cap, cap_reciprocal, masked_score;
    const char *mask, *bias;
    long long mask_rows[2], bias_rows[2];
    const u32* own_bits;

    Fragment<MASK_T, MASK_KEY, MASK_QUERY, MASK_PAIRS> added_mask;
    Fragment<BIAS_T, BIAS_KEY, BIAS_QUERY, BIAS_PAIRS> added_bias;
    u32 bits[BIT_WORDS];

    __device__ __forceinline__ bool masked(u32 info) const { return MASK && (info >> (KINDS + 2 * group) & 3) != 2; }

    // The bits of a mask that is the same for all queries come with the keys, and are read before the products that let
    // the keys go.
    __device__ __forceinline__ void read_row(const u32* row_bits) {
        if constexpr (ROW_MASK && BOOLEAN) {
#pragma unroll
            for (int w = 0; w < BIT_WORDS; ++w) bits[w] = reread(row_bits[w]) >> column;
        }
    }

    // Loads, beside the products, what else the tile's scores will need.
    __device__ __forceinline__ void prepare(u32 info) {
        const int tile = info & END, first = tile * KEYS_TILE + column;
        if constexpr (BIAS) added_bias.load(bias, bias_rows, first, keys);
        if (!masked(info)) return;
        if constexpr (ADDITIVE) added_mask.load(mask, mask_rows, first, keys);
        if constexpr (BOOLEAN && !ROW_MASK) {
#pragma unroll
            for (int w = 0; w < BIT_WORDS; ++w) bits[w] = __ldg(own_bits + ((long long)tile * BIT_WORDS + w) * 128);
        }
    }

    __device__ __forceinline__ bool counts(int i) const {
        const int at = ROW_MASK ? i / 4 * 8 + i % 2 : i;
        return bits[at / 32] >> at % 32 & 1;
    }

    __device__ __forceinline__ void apply(float (&s)[SCORES], u32 info) const {
        const int first = (info & END) * KEYS_TILE + column;
        if constexpr (!RAW) {
#pragma unroll
            for (int i = 0; i < SCORES; ++i) s[i] = SOFTCAP ? capped(s[i] * scale, cap, cap_reciprocal) : s[i] * scale;
            if constexpr (BIAS) added_bias.add(s);
        }
        if (masked(info)) {
            if constexpr (ADDITIVE) added_mask.add(s);
            if constexpr (BOOLEAN) {
#pragma unroll
                for (int i = 0; i < SCORES; ++i)
                    if (!counts(i)) s[i] = RAW ? minus_infinity() : masked_score;
            }
        }
        if (first - column + KEYS_TILE > unlimited) {
#pragma unroll
            for (int i = 0; i < SCORES; ++i)
                if (first + i / 4 * 8 + i % 2 >= limit[i / 2 % 2]) s[i] = minus_infinity();
        }
    }
};

// LAZY: a row's reference is raised only once its largest score is 2^8 times above; weights up to 256 are as exact in
// fp16 and bf16 as those up to 1, and results are rescaled in few tiles instead of most.
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
