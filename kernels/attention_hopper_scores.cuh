// Scores of a warpgroup's thread, and their softmax: for attention_hopper.cu.
//
// A thread holds scores of two rows, 8 apart: s[4 j], s[4 j + 1] are columns 8 j + 2 (lane % 4) and the next of the
// first row, s[4 j + 2], s[4 j + 3] the same of the second.
#pragma once
#include "attention_hopper_shape.cuh"

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// What is added to a score, in the score's units: with RAW these are of q k^T, where -3.4e38 may be too much.
template <class E>
__device__ __forceinline__ float in_units(E, float value, float unit, float lowest) {
    return !RAW ? value : value == minus_infinity() ? value : fmaxf(value * unit, lowest);
}
__device__ __forceinline__ float in_units(f16, float value, float unit, float) { return RAW ? value * unit : value; }

// What memory adds to a thread's scores of KEYS keys. KEY, QUERY: whether it differs along keys and queries; PAIRS: two
// neighbours can be read as one word (or two, of fp32).
template <class E, bool KEY, bool QUERY, bool PAIRS, int KEYS>
struct Fragment {
    static constexpr int ROW_COUNT = QUERY ? 2 : 1;
    static constexpr int COUNT = KEY ? KEYS / 8 : 1;
    Pack<E, 2> pairs[COUNT][ROW_COUNT];

    // `from`: in the thread's first row, `next` before its second; `left`: so many keys are there.
    __device__ __forceinline__ void load(const E* from, int next, int left) {
#pragma unroll
        for (int r = 0; r < ROW_COUNT; ++r)
#pragma unroll
            for (int j = 0; j < COUNT; ++j) {
                const E* const place = from + r * next + 8 * j;
                Pack<E, 1> one[2] = {};
                pairs[j][r] = {};
                if constexpr (KEY && PAIRS) {
                    if (8 * j < left) pairs[j][r] = load_cached<2>(place);
                } else {
                    if (!KEY || 8 * j < left) one[0] = load_cached<1>(place);
                    if (KEY && 8 * j + 1 < left) one[1] = load_cached<1>(place + 1);
                    pairs[j][r] = both(one[0], one[KEY]);
                }
            }
    }

    static __device__ __forceinline__ Pack<E, 2> both(const Pack<E, 1>& low, const Pack<E, 1>& high) {
        if constexpr (sizeof(E) == 4) return {{low.words[0], high.words[0]}};
        else return {{low.words[0] | high.words[0] << 16}};
    }

    __device__ __forceinline__ void add(float* s, float unit, float lowest) const {
#pragma unroll
        for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float values[2];
                unpack(pairs[KEY ? j : 0][QUERY ? r : 0], values);
                s[4 * j + 2 * r] += in_units(E(), values[0], unit, lowest);
                s[4 * j + 2 * r + 1] += in_units(E(), values[1], unit, lowest);
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
    float scale, cap, cap_reciprocal;
    float masked, unit, lowest;  // what does not count; units of a score in one of its additions, the least finite one
    const MASK_T* mask;          // of the first row
    const BIAS_T* bias;
    int next_mask, next_bias;  // to the second
    const u32* bits_from;
    int own_tiles;  // the number of the first tile of the warpgroup's rows

    Fragment<MASK_T, MASK_KEY, MASK_QUERY, MASK_PAIRS, KEYS_TILE> added_mask;
    Fragment<BIAS_T, BIAS_KEY, BIAS_QUERY, BIAS_PAIRS, KEYS_TILE> added_bias;
    u32 bits[BIT_WORDS];

    __device__ __forceinline__ u32 kind(u32 info) const { return info >> (KINDS + 2 * group) & 3; }

    // The bits of a mask that is the same for all queries come with the keys.
    __device__ __forceinline__ void read_row(const u32* row_bits) {
        if constexpr (ROW_MASK) {
#pragma unroll
            for (int w = 0; w < BIT_WORDS; ++w) bits[w] = reread(row_bits[w]) >> column;
        }
    }

    // Loads, beside the products, what else the tile's scores will need.
    __device__ __forceinline__ void prepare(u32 info) {
        const int tile = info & END, first = tile * KEYS_TILE + column;
        if constexpr (BIAS) added_bias.load(bias + first * BIAS_KEY, next_bias, keys - first);
        if constexpr (ADDITIVE && !LATE) {
            if (kind(info) == 1) added_mask.load(mask + first * MASK_KEY, next_mask, keys - first);
        }
        if constexpr (MASK && !ROW_MASK) {
            const u32* from = bits_from + (long long)(own_tiles + tile) * BIT_WORDS * 128 + threadIdx.x % 128;
#pragma unroll
            for (int w = 0; w < BIT_WORDS; ++w) {
                bits[w] = 0;
                if (kind(info) == 3) load_bytes<Use::OFTEN, 4>(reinterpret_cast<const char*>(from + w * 128), bits + w);
            }
        }
    }

    __device__ __forceinline__ bool counts(int i) const {
        const int at = ROW_MASK ? i / 4 * 8 + i % 2 : i;
        return bits[at / 32] >> at % 32 & 1;
    }

    // Where registers have no room for a mask's elements beside the products, they are loaded after them, a few at a
    // time: only tiles of kind 1 need any.
    __device__ __forceinline__ void add_mask(float (&s)[SCORES], int first) const {
        if constexpr (ADDITIVE && LATE) {
            constexpr int PART = 32 / sizeof(MASK_T);  // keys
#pragma unroll
            for (int k = 0; k < KEYS_TILE; k += PART) {
                __syncwarp();  // or all loads come first, into registers that there are not
                Fragment<MASK_T, MASK_KEY, MASK_QUERY, MASK_PAIRS, PART> added;
                added.load(mask + (first + k) * MASK_KEY, next_mask, keys - first - k);
                added.add(s + k / 2, unit, lowest);
            }
        } else if constexpr (ADDITIVE) {
            added_mask.add(s, unit, lowest);
        }
    }

    __device__ __forceinline__ void apply(float (&s)[SCORES], u32 info) const {
        const int first = (info & END) * KEYS_TILE + column;
        if constexpr (!RAW) {
#pragma unroll
            for (int i = 0; i < SCORES; ++i) s[i] = SOFTCAP ? capped(s[i] * scale, cap, cap_reciprocal) : s[i] * scale;
            if constexpr (BIAS) added_bias.add(s, unit, lowest);
        }
        if constexpr (ADDED) {
            leave_out(s, first, MASK && kind(info) != 2);
        } else if (ADDITIVE && kind(info) == 1) {
            add_mask(s, first);
        } else if (MASK && kind(info) != 2) {
#pragma unroll
            for (int i = 0; i < SCORES; ++i)
                if (!counts(i)) s[i] = BOOLEAN && FINITE ? masked : minus_infinity();
        }
        if (first - column + KEYS_TILE > unlimited) {
#pragma unroll
            for (int i = 0; i < SCORES; ++i)
                if (first + i / 4 * 8 + i % 2 >= (ADDED ? keys : limit[i / 2 % 2])) s[i] = minus_infinity();
        }
    }

    // `masked` is added where the mask or the diagonal leaves a score out.
    __device__ __forceinline__ void leave_out(float (&s)[SCORES], int first, bool by_mask) const {
        if (!by_mask && first - column + KEYS_TILE <= unlimited) return;
#pragma unroll
        for (int i = 0; i < SCORES; ++i)
            if ((by_mask && !counts(i)) || first + i / 4 * 8 + i % 2 >= limit[i / 2 % 2]) s[i] += masked;
    }
};

// LAZY: a row's reference is raised only once its largest score is 2^8 times above; weights up to 256 are as exact in
// fp16 and bf16 as those up to 1, and results are rescaled in few tiles instead of most.
// FAR: below it a RAW score's product with the scale, rounded, is so far from the exact one that weights overflow. Only
// rows of which a mask leaves nothing come there, and of additive masks in fp16 none.
constexpr float FAR = 1e7f;
template <class E> constexpr bool IS_HALF = false;
template <> constexpr bool IS_HALF<f16> = true;
constexpr bool FAR_SCORES = RETURNS && (ADDED || !IS_HALF<MASK_T>);

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
            float from = best == minus_infinity() ? 0.0f : best, before = top[r];  // -inf less -inf would be NaN
            if (RAW) {
                if (FAR_SCORES && from * scale < -FAR) {
#pragma unroll
                    for (int j = 0; j < KEYS_TILE / 8; ++j) s[4 * j + 2 * r] -= from, s[4 * j + 2 * r + 1] -= from;
                    before -= from, from = 0.0f;
                }
                const float scaled = __fmul_rn(from, scale);
                factor[r] = exp2_fast(__fmul_rn(before, scale) - scaled);
#pragma unroll
                for (int j = 0; j < KEYS_TILE / 8; ++j)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& value = s[4 * j + 2 * r + e];
                        value = exp2_fast(__fmaf_rn(value, scale, -scaled));
                    }
            } else {
                factor[r] = exp2_fast(LOG2_E * (before - from));
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
