// The operations on a warp's scores between the two products: softcap, bias, mask, causal limits, end of the keys.
#pragma once

#include "attention_mma_warp.cuh"
#if RELATIVE
#include "attention_mma_relative.cuh"
#endif

// ---- masks and biases --------------------------------------------------------------------------------------------

// Multiplies a number by log2(e). Finite numbers stay finite; an fp16 number cannot leave the range of fp32.
template <class M>
__device__ __forceinline__ float in_powers_of_two(M, float value) {
    return value == MINUS_INFINITY ? MINUS_INFINITY : fmaxf(value * LOG2_E, LOWEST);
}
__device__ __forceinline__ float in_powers_of_two(f16, float value) { return value * LOG2_E; }

__device__ __forceinline__ u32 load_byte(const void* from) {
    u32 value;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(value) : "l"(from));
    return value;
}

// The elements of a mask or a bias for a warp's scores, in the layout of an accumulator.
template <class M, bool BY_ROW>
struct ScoreElements {
    static constexpr int LINES = BY_ROW ? 2 * M_TILES : 1;
    const M* lines[LINES];
    Pack<M, 2> packs[LINES][KEY_TILES];

    __device__ __forceinline__ void set_row(int line, const M* from) {
        if (line < LINES) lines[line] = from;
    }

    static __device__ __forceinline__ u32 one(const M* from) {
        if constexpr (sizeof(M) == 1) return load_byte(from);
        else return load_cached<1>(from).words[0];
    }

    // Loads the elements for the warp's keys, from key `first` on. The mask or bias has `keys` keys, which are `step`
    // elements apart; elements of later keys are not loaded. `pairs`: one access can read two keys.
    __device__ __forceinline__ void fetch(int first, int keys, int step, bool pairs) {
        const int own = first + 2 * (threadIdx.x % 4);
        const bool whole = first + WARP_KEYS <= keys;
#pragma unroll
        for (int line = 0; line < LINES; ++line) {
            if (pairs && whole) {
#pragma unroll
                for (int n = 0; n < KEY_TILES; ++n) packs[line][n] = load_cached<2>(lines[line] + own + 8 * n);
            } else {
#pragma unroll
                for (int n = 0; n < KEY_TILES; ++n) {
                    u32 both[2] = {0, 0};
#pragma unroll
                    for (int c = 0; c < 2; ++c)
                        if (whole || own + 8 * n + c < keys) both[c] = one(lines[line] + (own + 8 * n + c) * step);
                    packs[line][n].words[0] = sizeof(M) == 4 ? both[0] : both[0] | both[1] << 8 * (sizeof(M) % 4);
                    if constexpr (sizeof(M) == 4) packs[line][n].words[1] = both[1];
                }
            }
        }
    }

    // Writes the elements of a mask or bias for two neighbouring keys of a row: a boolean as 0 or not 0, a number times
    // log2(e).
    __device__ __forceinline__ void get(int line, int n, float (&to)[2]) const {
        const Pack<M, 2>& pair = packs[BY_ROW ? line : 0][n];
        if constexpr (sizeof(M) == 1) {
            to[0] = __uint_as_float(pair.words[0] & 0xffu);
            to[1] = __uint_as_float(pair.words[0] & 0xff00u);
        } else {
            unpack(pair, to);
#pragma unroll
            for (float& value : to) value = in_powers_of_two(M(), value);
        }
    }
};

__device__ __forceinline__ float softcapped(float score, float cap) {  // cap * tanh(score); cap has the factor log2(e)
    return cap * (1.0f - 2.0f * reciprocal(exp2_fast(2.0f * LOG2_E * score) + 1.0f));
}

// Applies softcap, bias, mask and limits to the scores of a warp.
struct Scores {
    const Problem& p;
    // A row sees the keys before its limit. With ADD_MASKED_SCORE, `masked` is added to the scores of the other keys.
    int limits[M_TILES][2];
    int last;       // the limit of the warp's last row; 0 if the warp has no rows
    int unlimited;  // all rows of the block see the keys below this index, unless a WINDOW excludes keys
    int windowed;   // with WINDOW: the first key that is in the windows of all rows of the warp
#if MASK
    ScoreElements<MASK_T, MASK_BY_ROW> mask;
#endif
#if BIAS
    ScoreElements<BIAS_T, BIAS_BY_ROW> bias;
#endif
#if BIAS == 2
    float slopes[M_TILES][2];
#endif
#if RELATIVE
    RelativeScores relative;
    u32 relative_rows[2];
#endif

    __device__ __forceinline__ Scores(const Problem& problem, const WorkTile& at, const WarpState& warp)
        : p(problem)
#if RELATIVE
          ,
          relative(problem, at), relative_rows{relative.row_of(warp, 0), relative.row_of(warp, 1)}
#endif
    {
        unlimited = ADD_MASKED_SCORE ? p.keys : last_key(at.row / GQA_GROUP, p.keys, p.causal);
        const int rows = p.queries * GQA_GROUP, first_row = at.row + warp.m * M_TILES * 16;
        const int last_query = (min(first_row + M_TILES * 16, rows) - 1) / GQA_GROUP;
        last = first_row >= rows ? 0 : ADD_MASKED_SCORE ? at.end : last_key(last_query, p.keys, p.causal);
        windowed = first_key(last_query, p);
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = min(at.row + warp.row(mt, half), p.queries * GQA_GROUP - 1), query = row / GQA_GROUP;
                [[maybe_unused]] const int head = at.kv * GQA_GROUP + row % GQA_GROUP;
                limits[mt][half] = seen_keys(query, p.keys, p.causal);
#if MASK
                mask.set_row(2 * mt + half, p.mask.plane(at.batch, head) + query * p.mask.query);
#endif
#if BIAS
                bias.set_row(2 * mt + half, p.bias.plane(at.batch, head) + query * p.bias.query);
#endif
#if BIAS == 2
                float slope[1];
                unpack(load_cached<1>(p.slopes + head), slope);
                slopes[mt][half] = slope[0];
#endif
            }
    }

    // Returns how many of the warp's groups of sixteen keys in a tile are visible to at least one of its rows.
    __device__ __forceinline__ int live(int tile, const WarpState& warp) const {
        return (last - (tile * BLOCK_N + warp.n * WARP_KEYS) + 15) >> 4;
    }

    // Starts the loads of mask and bias; the product of queries and keys hides their latency.
    __device__ __forceinline__ void fetch(int tile, const WarpState& warp) {
        [[maybe_unused]] const int first = tile * BLOCK_N + warp.n * WARP_KEYS;
#if MASK
        mask.fetch(first, p.keys, p.mask_key, MASK_PAIRS);
#endif
#if BIAS
        bias.fetch(first, p.keys, p.bias_key, BIAS_PAIRS);
#endif
    }

    __device__ __forceinline__ void finish(float (&s)[M_TILES][KEY_TILES][4], int tile, const WarpState& warp) const {
        const int own = tile * BLOCK_N + warp.n * WARP_KEYS + 2 * warp.quad;
        const bool limited = (tile + 1) * BLOCK_N > unlimited || (WINDOW && tile * BLOCK_N < windowed);
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int t = 0; t < KEY_TILES; ++t) {
                    float* x = &s[mt][t][2 * half];
                    one(x, mt, half, t, limits[mt][half] - own - 8 * t);
                    if (limited) {
#pragma unroll
                        for (int c = 0; c < 2; ++c) {
                            const int key = own + 8 * t + c;
                            if (key >= (ADD_MASKED_SCORE ? p.keys : limits[mt][half])) x[c] = MINUS_INFINITY;
                            if (WINDOW && key < limits[mt][half] - p.window) x[c] = MINUS_INFINITY;
                        }
                    }
                }
    }

    // Applies scale, softcap, bias and mask to two neighbouring scores x of a row. The row sees `seen` keys, counted
    // from the key of x[0].
    __device__ __forceinline__ void one(float* x, int mt, int half, int t, [[maybe_unused]] int seen) const {
        if (!SCALE_IN_EXPONENT) x[0] *= p.scale, x[1] *= p.scale;
#if RELATIVE
        const float2 relative_scores = shared_float2(relative_rows[half] + 32 * t);
        x[0] += relative_scores.x, x[1] += relative_scores.y;
#endif
#if SOFTCAP
        x[0] = softcapped(x[0], p.cap), x[1] = softcapped(x[1], p.cap);
#endif
#if BIAS
        float added[2];
        bias.get(2 * mt + half, t, added);
#if BIAS == 2
        x[0] = fmaf(slopes[mt][half], added[0], x[0]), x[1] = fmaf(slopes[mt][half], added[1], x[1]);
#else
        x[0] += added[0], x[1] += added[1];
#endif
#endif
#if ADD_MASKED_SCORE
        float keep[2] = {1.0f, 1.0f};
#if MASK
        mask.get(2 * mt + half, t, keep);
#endif
#pragma unroll
        for (int c = 0; c < 2; ++c)
            if (__float_as_uint(keep[c]) == 0 || c >= seen) x[c] += p.masked;
#elif MASK
        float keep[2];
        mask.get(2 * mt + half, t, keep);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            if constexpr (MASK == ADDITIVE) x[c] += keep[c];
            else x[c] = (__float_as_uint(keep[c]) != 0) == (MASK == BOOLEAN) ? x[c] : p.masked;
        }
#endif
    }
};
