// The operations of attention_hopper.cu on a thread's scores: cap, bias, mask, limits and the online softmax.
//
// A thread holds scores of two rows, 8 apart. With c = 8 j + 2 (lane % 4), s[4 j] and s[4 j + 1] are columns c and
// c + 1 of the first row, and s[4 j + 2] and s[4 j + 3] are the same columns of the second row.
#pragma once
#include "attention_hopper_shape.cuh"

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// Converts a number that is added to a score to the score's units. With SCALE_IN_EXPONENT these are the units of q k^T.
// A finite number stays finite: the conversion of -3.4e38 could otherwise overflow.
template <class E>
__device__ __forceinline__ float in_units(E, float value, const ScoreUnits& units) {
    return !SCALE_IN_EXPONENT ? value : value == minus_infinity() ? value : fmaxf(value * units.unit, units.lowest);
}
__device__ __forceinline__ float in_units(f16, float value, const ScoreUnits& units) {
    return SCALE_IN_EXPONENT ? value * units.unit : value;
}

// The addresses at which a thread reads a mask or bias for its two rows. Rows beyond the last query read the last row.
template <class Tensor>
struct Rows {
    const typename Tensor::Element* from;  // the thread's address in its first row
    int next;                              // elements from the thread's first row to its second
    bool in_pairs;                         // whether one access can read two neighbours; used if Tensor::PAIRS is 2

    __device__ __forceinline__ Rows(const Tensor& tensor, const typename Tensor::Element* plane, int row,
                                    const Shape& shape) {
        const int first = min(row, shape.queries - 1), second = min(row + 8, shape.queries - 1);
        from = plane + first * tensor.query;
        settle(from);  // otherwise the address is computed again for each tile: up to 4 % more instructions, and spills
        next = (second - first) * int(tensor.query);
        in_pairs = tensor.multiples_of(2, shape.keys);
    }
};

// The elements of a mask or bias that are added to a thread's scores of KEYS keys.
template <class Tensor, int KEYS>
struct Fragment {
    using E = typename Tensor::Element;
    static constexpr bool KEY = Tensor::KEY, QUERY = Tensor::QUERY;
    static constexpr int ROW_COUNT = QUERY ? 2 : 1;
    static constexpr int COUNT = KEY ? KEYS / 8 : 1;
    Pack<E, 2> pairs[COUNT][ROW_COUNT];

    // `first`: the thread's first key; `left`: the number of keys from `first` on.
    __device__ __forceinline__ void load(const Rows<Tensor>& rows, int first, int left) {
        const E* const from = rows.from + first * Tensor::KEY;
        if constexpr (Tensor::PAIRS < 2) load_elements<Tensor::PAIRS>(from, rows.next, left);
        else if (rows.in_pairs) load_elements<true>(from, rows.next, left);
        else load_elements<false>(from, rows.next, left);
    }

    template <bool IN_PAIRS>
    __device__ __forceinline__ void load_elements(const E* from, int next, int left) {
#pragma unroll
        for (int r = 0; r < ROW_COUNT; ++r)
#pragma unroll
            for (int j = 0; j < COUNT; ++j) {
                const E* const element = from + r * next + 8 * j;
                Pack<E, 1> one[2] = {};
                pairs[j][r] = {};
                if constexpr (KEY && IN_PAIRS) {
                    if (8 * j < left) pairs[j][r] = load_cached<2>(element);
                } else {
                    if (!KEY || 8 * j < left) one[0] = load_cached<1>(element);
                    if (KEY && 8 * j + 1 < left) one[1] = load_cached<1>(element + 1);
                    pairs[j][r] = both(one[0], one[KEY]);
                }
            }
    }

    static __device__ __forceinline__ Pack<E, 2> both(const Pack<E, 1>& low, const Pack<E, 1>& high) {
        if constexpr (sizeof(E) == 4) return {{low.words[0], high.words[0]}};
        else return {{low.words[0] | high.words[0] << 16}};
    }

    __device__ __forceinline__ void add(float* s, const ScoreUnits& units) const {
#pragma unroll
        for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float values[2];
                unpack(pairs[KEY ? j : 0][QUERY ? r : 0], values);
                s[4 * j + 2 * r] += in_units(E(), values[0], units);
                s[4 * j + 2 * r + 1] += in_units(E(), values[1], units);
            }
    }

    // Adds the elements times `slope` to the scores `s`; `slope` is in the scores' units.
    __device__ __forceinline__ void add_times(float* s, float slope) const {
#pragma unroll
        for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float values[2];
                unpack(pairs[KEY ? j : 0][QUERY ? r : 0], values);
                s[4 * j + 2 * r] = fmaf(slope, values[0], s[4 * j + 2 * r]);
                s[4 * j + 2 * r + 1] = fmaf(slope, values[1], s[4 * j + 2 * r + 1]);
            }
    }
};

// An odd polynomial that maps small products of q and k to log2(e) times their capped scores.
template <int TERMS>
struct CapPolynomial {
    float largest;  // largest product for which the polynomial is accurate
    // If a row's reference (the score of weight 1) is at least `lowest`, products below -largest have no weight.
    float lowest;
    float terms[TERMS];

    __device__ __forceinline__ bool holds(float product, float reference) const {
        return product <= largest && reference >= lowest;
    }
    // Returns the weight of a product; `from` is log2(e) times the row's reference, the score whose weight is 1.
    __device__ __forceinline__ float weight(float product, float from) const {
        const float square = product * product;
        float sum = terms[TERMS - 1];
#pragma unroll
        for (int i = TERMS - 2; i >= 0; --i) sum = fmaf(sum, square, terms[i]);
        return exp2_fast(fmaf(product, sum, -from));
    }
    __device__ __forceinline__ void weigh(float (&s)[SCORES], const float (&from)[2]) const {
#pragma unroll
        for (int i = 0; i < SCORES; ++i) s[i] = weight(s[i], from[i / 2 % 2]);
    }
};

// The softcap. All fields but `limit` are for LATE_CAP, which applies the cap while products of q and k become weights.
// Exponentials and reciprocals share one unit (16 per clock), which limits the kernel. A polynomial that is accurate
// for all scores of a warp replaces the tanh, and takes only FMAs. hopper.py writes the fields in this order. The
// struct is a kernel parameter, so that its fields take no registers.
struct Cap {
    float limit;
    float rate;  // 2 log2(e) scale / limit
    // If a row's reference (the score of weight 1) is at most `highest`, every product that is too large for the
    // polynomial `smallest` (above smallest.largest) has a weight above KEPT.
    float highest;
    CapPolynomial<3> smallest;
    CapPolynomial<5> small;

    // Returns limit * tanh(s / limit) for a score s = scale * q k; `reciprocal_limit` is 1 / limit.
    __device__ __forceinline__ float apply(float s, float reciprocal_limit) const {
        // tanh(x) = 1 - 2 / (1 + exp(2 x)), to 2e-7; the instruction tanh.approx is exact to 5e-4 only
        const float power = exp2_fast(2.0f * LOG2_E * s * reciprocal_limit);
        return limit - 2.0f * limit * reciprocal(1.0f + power);
    }
    // Returns the capped score of a product of q and k.
    __device__ __forceinline__ float score(float product) const {
        if (product == minus_infinity()) return product;
        return limit - 2.0f * limit * reciprocal(1.0f + exp2_fast(rate * product));
    }
    __device__ __forceinline__ void score_all(float (&s)[SCORES]) const {
#pragma unroll
        for (int i = 0; i < SCORES; ++i) {
            if (i % 8 == 0) __syncwarp();  // limits the values in flight to the available registers
            s[i] = score(s[i]);
        }
    }
};

// Applies cap, bias and mask to a thread's scores, and excludes the keys beyond the diagonal and after the last key.
struct ScoreMod {
    const int keys;
    const ScoreUnits& units;
    const Cap& cap;
    const u32* const bits_from;
    const Rows<Mask> mask;
    const Rows<Bias> bias;
    const int group, column;        // the warpgroup, and the thread's first column in a tile
    const int limit[2], unlimited;  // keys that each of the thread's rows sees; keys that all the warpgroup's rows see
    const int window, windowed;     // with WINDOW: keys that a row sees; the first key that all rows see
    const int first_tile;           // the first tile of keys that the block's rows see
    const float reciprocal_limit;   // 1 / cap.limit
    float masked = minus_infinity();
    float slope = 0.0f;  // the head's slope, in the scores' units
    int own_tiles = 0;   // the index of the first tile of the warpgroup's rows, among all tiles of the mask

    Fragment<Mask, BLOCK_N> added_mask;
    Fragment<Bias, BLOCK_N> added_bias;
    u32 bits[BIT_WORDS];

    // `first`: the first row of the warpgroup; `row`: the first row of the thread.
    __device__ __forceinline__ ScoreMod(const Shape& shape, const ScoreUnits& units, const Cap& cap, const u32* bits,
                                        const Rows<Mask>& mask, const Rows<Bias>& bias, int group, int first, int row)
        : keys(shape.keys), units(units), cap(cap), bits_from(bits), mask(mask), bias(bias), group(group),
          column(threadIdx.x % 4 * 2), limit{shape.keys_of(row), shape.keys_of(row + 8)},
          unlimited(shape.keys_of(first)), window(shape.window), windowed(shape.keys_of(first + 63) - shape.window),
          first_tile(shape.first_tile(first - 64 * group)), reciprocal_limit(1.0f / cap.limit) {}

    __device__ __forceinline__ u32 kind(u32 info) const { return info >> (KINDS + 2 * group) & 3; }

    // Reads the mask bits stored with the keys, if the mask is the same for all queries.
    __device__ __forceinline__ void read_row(const u32* row_bits) {
        if constexpr (ROW_MASK) {
#pragma unroll
            for (int w = 0; w < BIT_WORDS; ++w) bits[w] = reread(row_bits[w]) >> column;
        }
    }

    // Starts the loads of the mask and bias elements of the tile, while the products run.
    __device__ __forceinline__ void prepare(u32 info) {
        const int tile = info & END, first = tile * BLOCK_N + column;
        if constexpr (BIAS && !BIAS_FIRST) added_bias.load(bias, first, keys - first);
        if constexpr (ADDITIVE && !LATE_MASK) {
            if (kind(info) == 1) added_mask.load(mask, first, keys - first);
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

    // With LATE_MASK registers have no room for a mask's elements during the products. The elements are loaded
    // afterwards, a few at a time; only tiles of kind 1 (some scores change) need mask elements.
    __device__ __forceinline__ void add_mask(float (&s)[SCORES], int first) const {
        if constexpr (ADDITIVE && LATE_MASK) {
            constexpr int KEYS_AT_ONCE = 32 / sizeof(Mask::Element);
#pragma unroll
            for (int k = 0; k < BLOCK_N; k += KEYS_AT_ONCE) {
                __syncwarp();  // otherwise the compiler moves all loads here, and lacks registers
                Fragment<Mask, KEYS_AT_ONCE> added;
                added.load(mask, first + k, keys - first - k);
                added.add(s + k / 2, units);
            }
        } else if constexpr (ADDITIVE) {
            added_mask.add(s, units);
        }
    }

    __device__ __forceinline__ void to_natural_units(float (&s)[SCORES]) const {
#pragma unroll
        for (int i = 0; i < SCORES; ++i) {
            if (LATE_CAP && i % 8 == 0) __syncwarp();  // limits the registers of this loop, which few tiles run
            s[i] *= units.scale;
            if (SOFTCAP) s[i] = cap.apply(s[i], reciprocal_limit);
        }
    }

    // Applies cap, bias, mask and limits to the scores of a tile. Returns true if the scores are then in the units of
    // ScoreUnits. Without LATE_CAP, the result is true. With LATE_CAP, it is true only if a mask adds numbers to scores
    // or replaces some by a finite number; otherwise the scores are still bare products of q and k.
    __device__ __forceinline__ bool apply(float (&s)[SCORES], u32 info) const {
        const int first = (info & END) * BLOCK_N + column;
        const bool in_units = !LATE_CAP || (SECOND_PASS && masked != minus_infinity()) || (ADDITIVE && kind(info) == 1);
        if constexpr (!SCALE_IN_EXPONENT) {
            if (in_units) to_natural_units(s);
            if constexpr (BIAS == 1) added_bias.add(s, units);
        }
        if constexpr (BIAS == 2 && !BIAS_FIRST) added_bias.add_times(s, slope);
        if constexpr (ADD_MASKED_SCORE) {
            add_masked(s, first, MASK && kind(info) != 2);
        } else if (ADDITIVE && kind(info) == 1) {
            add_mask(s, first);
        } else if (MASK && kind(info) != 2) {
#pragma unroll
            for (int i = 0; i < SCORES; ++i)
                if (!counts(i)) s[i] = BOOLEAN && SECOND_PASS ? masked : minus_infinity();
        }
        if (first - column + BLOCK_N > unlimited) {
#pragma unroll
            for (int i = 0; i < SCORES; ++i)
                if (first + i / 4 * 8 + i % 2 >= (ADD_MASKED_SCORE ? keys : limit[i / 2 % 2])) s[i] = minus_infinity();
        }
        if (WINDOW && first - column < windowed) {
#pragma unroll
            for (int i = 0; i < SCORES; ++i)
                if (first + i / 4 * 8 + i % 2 < limit[i / 2 % 2] - window) s[i] = minus_infinity();
        }
        return in_units;
    }

    // Adds `masked` to the scores that the diagonal or, if `by_mask`, the mask excludes.
    __device__ __forceinline__ void add_masked(float (&s)[SCORES], int first, bool by_mask) const {
        if (!by_mask && first - column + BLOCK_N <= unlimited) return;
#pragma unroll
        for (int i = 0; i < SCORES; ++i)
            if ((by_mask && !counts(i)) || first + i / 4 * 8 + i % 2 >= limit[i / 2 % 2]) s[i] += masked;
    }
};

// The form of a warp's scores with LATE_CAP: in the units of ScoreUnits, or products of q and k, to which scale and cap
// are not applied yet. If all of these products are small enough, the cap is computed by a polynomial: Cap::small for
// SMALL_PRODUCTS, Cap::smallest for SMALLEST_PRODUCTS.
enum class Scores { IN_UNITS, PRODUCTS, SMALL_PRODUCTS, SMALLEST_PRODUCTS };

// A row's reference is the score whose weight is 1. It need not be the largest score: weights above 1 are as exact in
// fp16 and bf16 as smaller ones, and results need no rescaling while the reference stays. Therefore weights are
// computed with the current references. Only if a thread's weights of a row add up to more than KEPT, the largest
// scores are determined and the references raised. A tile of 64 keys of 64 elements that skips this step takes 200
// instructions instead of 253. With LAZY_RESCALE, a reference is raised only if weights would exceed 2^4.
//
// With SCALE_IN_EXPONENT, scores below -FAR need separate code: rounding their products with the scale would make
// weights overflow. Only fully masked rows have such scores; under additive masks in fp16, no row has them.
constexpr float FAR = 1e7f;
template <class E> constexpr bool IS_HALF = false;
template <> constexpr bool IS_HALF<f16> = true;
constexpr bool FAR_SCORES = SECOND_PASS && (ADD_MASKED_SCORE || !IS_HALF<Mask::Element>);

// The weights of a tile, as wgmma's operand in registers. A thread has weights of neighbouring keys 2 c and 2 c + 1. With
// TF32, wgmma takes these as keys c and c + 4 of eight: attention_values.cu orders the values accordingly.
using Weights = u32[BLOCK_N / K_STEP][4];

// Rounds pair i of a thread's weights and stores it to `p`.
__device__ __forceinline__ void put(Weights& p, int i, const float (&pair)[2]) {
    if constexpr (TF32) {  // wgmma ignores the last 13 bits
        p[i / 2][i % 2] = __float_as_uint(pair[0]) + 0x1000u;
        p[i / 2][2 + i % 2] = __float_as_uint(pair[1]) + 0x1000u;
    } else {
        p[i / 4][i % 4] = narrow(T(), pair);
    }
}

struct Softmax {
    float top[2] = {minus_infinity(), minus_infinity()};
    float sum[2] = {0.0f, 0.0f};  // per row, the sum of the weights in this thread's columns
    float scaled[2];              // the rows' references (the scores of weight 1), as exponents of 2
    bool keeps = false;           // whether the next tile is tried with the present references first

    // Computes packed weights from scores with the current references (the scores of weight 1), without determining the
    // largest score, and adds the weights to the sums. If weights are so large that a reference must be raised, returns
    // false, and leaves the sums unchanged.
    __device__ __forceinline__ bool keep(const float (&s)[SCORES], Weights& p, float scale, const Cap& cap) {
        float more[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < SCORES / 2; ++i) {
            float weights[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float value = s[2 * i + e], from = scaled[i % 2];
                if (LATE_CAP) weights[e] = cap.smallest.weight(value, from);
                else weights[e] = exp2_fast(__fmaf_rn(value, SCALE_IN_EXPONENT ? scale : LOG2_E, -from));
            }
            put(p, i, weights);
            more[i % 2] += weights[0] + weights[1];
        }
        if (!__all_sync(0xffffffffu, more[0] <= KEPT && more[1] <= KEPT)) return false;
        sum[0] += more[0], sum[1] += more[1];
        return true;
    }

    // Decides whether all rows of the warp can keep their references (the scores of weight 1) for the next tile.
    __device__ __forceinline__ void decide(float scale, const Cap& cap) {
        bool may = true;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            scaled[r] = __fmul_rn(reference(r), SCALE_IN_EXPONENT ? scale : LOG2_E);
            may &= top[r] > minus_infinity() && !is_far(top[r], scale);
            if (!SCALE_IN_EXPONENT) may &= fabsf(top[r]) < 1000.0f;  // above 1000, rounding `scaled` changes weights
            if (LATE_CAP) may &= top[r] >= cap.smallest.lowest && top[r] <= cap.highest;
        }
        keeps = __all_sync(0xffffffffu, may);
    }

    // Raises the rows' references (the scores of weight 1) to the largest scores of this tile, if these are larger.
    // Writes to `factor` the factors for earlier sums and results.
    __device__ __forceinline__ void raise(const float (&s)[SCORES], float scale, float (&factor)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float before = raise(r, largest(s, r), scale), from = reference(r);
            if (is_far(from, scale)) factor[r] = exp2_fast(__fmul_rn(before - from, scale));
            else if (SCALE_IN_EXPONENT) factor[r] = exp2_fast(__fmul_rn(before, scale) - __fmul_rn(from, scale));
            else factor[r] = exp2_fast(LOG2_E * (before - from));
        }
    }

    // With LATE_CAP, raises the rows' references (the scores of weight 1) to the largest scores of this tile, if these
    // are larger, and writes to `factor` the factors for earlier sums and results. `in_units`: the result of
    // `apply` for these scores. Returns the form of the scores.
    __device__ __forceinline__ Scores raise(const float (&s)[SCORES], const Cap& cap, bool in_units,
                                            float (&factor)[2]) {
        bool small = true, smallest = true;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float best = largest(s, r), before = raise(r, in_units ? best : cap.score(best), 1.0f);
            factor[r] = exp2_fast(LOG2_E * (before - reference(r)));
            small &= cap.small.holds(best, reference(r));
            smallest &= cap.smallest.holds(best, reference(r));
        }
        if (in_units) return Scores::IN_UNITS;
        if (__all_sync(0xffffffffu, smallest)) return Scores::SMALLEST_PRODUCTS;
        return __all_sync(0xffffffffu, small) ? Scores::SMALL_PRODUCTS : Scores::PRODUCTS;
    }

    // Replaces scores by weights, and adds the weights to the rows' sums.
    __device__ __forceinline__ void weigh(float (&s)[SCORES], float scale, const float (&factor)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float from = reference(r);
            if (!SCALE_IN_EXPONENT) {
                weigh(s, r, from);
                continue;
            }
            if (is_far(from, scale)) {
#pragma unroll
                for (int j = 0; j < BLOCK_N / 8; ++j) s[4 * j + 2 * r] -= from, s[4 * j + 2 * r + 1] -= from;
                from = 0.0f;
            }
            const float scaled = __fmul_rn(from, scale);
#pragma unroll
            for (int j = 0; j < BLOCK_N / 8; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& value = s[4 * j + 2 * r + e];
                    value = exp2_fast(__fmaf_rn(value, scale, -scaled));
                }
        }
        add(s, factor);
    }

    __device__ __forceinline__ void weigh(float (&s)[SCORES], const Cap& cap, Scores scores, const float (&factor)[2]) {
        const float from[2] = {LOG2_E * reference(0), LOG2_E * reference(1)};
        if (scores == Scores::SMALLEST_PRODUCTS) {
            cap.smallest.weigh(s, from);
            add(s, factor);
        } else if (scores == Scores::SMALL_PRODUCTS) {
            cap.small.weigh(s, from);
            add(s, factor);
        } else {
            if (scores == Scores::PRODUCTS) cap.score_all(s);
            weigh(s, 0, reference(0));
            weigh(s, 1, reference(1));
            add(s, factor);
        }
    }

    // Returns, in all lanes of row r, the row's largest score in this tile.
    __device__ __forceinline__ static float largest(const float (&s)[SCORES], int r) {
        float best = minus_infinity();
#pragma unroll
        for (int j = 0; j < BLOCK_N / 8; ++j) best = fmaxf(best, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
        best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 1));
        return fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 2));
    }

    // Raises the maximum of row r to the score `to`, if that is larger, and returns the previous maximum. With
    // LAZY_RESCALE, the maximum stays if weights remain at most 2^4.
    __device__ __forceinline__ float raise(int r, float to, float scale) {
        const float before = top[r], best = fmaxf(before, to);
        const bool stays = LAZY_RESCALE && (best - before) * (SCALE_IN_EXPONENT ? scale : LOG2_E) <= 4.0f;
        if (!stays) top[r] = best;
        return before;
    }

    // Returns the score of row r whose weight is 1. If this score is -inf, returns 0, because -inf - -inf would be NaN.
    __device__ __forceinline__ float reference(int r) const { return top[r] == minus_infinity() ? 0.0f : top[r]; }

    __device__ __forceinline__ static bool is_far(float reference, float scale) {
        return SCALE_IN_EXPONENT && FAR_SCORES && reference * scale < -FAR;
    }

    // Replaces the scores s of row r by weights exp(s - from). The scores must be in natural units, which exp takes.
    __device__ __forceinline__ static void weigh(float (&s)[SCORES], int r, float from) {
#pragma unroll
        for (int j = 0; j < BLOCK_N / 8; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& value = s[4 * j + 2 * r + e];
                value = exp2_fast(LOG2_E * (value - from));
            }
    }

    __device__ __forceinline__ void add(const float (&s)[SCORES], const float (&factor)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            sum[r] *= factor[r];
#pragma unroll
            for (int j = 0; j < BLOCK_N / 8; ++j) sum[r] += s[4 * j + 2 * r] + s[4 * j + 2 * r + 1];
        }
    }

    // Returns the sum of the row's weights, added up over all lanes that share the row. With SINKS, this includes the
    // weight of the head's sink, which is one more score, for a value vector of zeros.
    __device__ __forceinline__ float total(int r, float sink) const {
        const float pair = sum[r] + __shfl_xor_sync(0xffffffffu, sum[r], 1);
        const float all = pair + __shfl_xor_sync(0xffffffffu, pair, 2);
        return SINKS && all > 0.0f ? all + exp2_fast(LOG2_E * sink - scaled[r]) : all;
    }
};
