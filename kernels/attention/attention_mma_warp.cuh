// A warp's share of a tile: the two matrix products, for each MATH_KIND, and the online softmax between them.
#pragma once

#include "attention_mma_products.cuh"

struct WarpState {
    float o[M_TILES][V_TILES][4];  // results, not yet divided by the sums
    float top[M_TILES][2], sum[M_TILES][2];
    u32 queries[Q_IN_REGISTERS ? M_TILES : 1][Q_IN_REGISTERS ? QK_STEPS : 1][4];
    int lane, group, quad, m, n;  // group: lane / 4, the lane's row of eight; quad: lane % 4, its pair of columns

    __device__ __forceinline__ WarpState() {
        lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
        m = threadIdx.x / 32 % WARPS_M, n = threadIdx.x / 32 / WARPS_M;
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) {
#pragma unroll
            for (int vt = 0; vt < V_TILES; ++vt) o[mt][vt][0] = o[mt][vt][1] = o[mt][vt][2] = o[mt][vt][3] = 0.0f;
            top[mt][0] = top[mt][1] = MINUS_INFINITY, sum[mt][0] = sum[mt][1] = 0.0f;
        }
    }

    // Starts the softmax of each row of block `at` with its head's sink, which is a score for a value vector of zeros.
    __device__ __forceinline__ void begin_with_sinks(const Problem& p, const WorkTile& at) {
        if constexpr (SINKS) {
            if (n > 0) return;  // only the first of the warps that share a row's keys adds the sink
#pragma unroll
            for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int head = at.kv * GQA_GROUP + (at.row + row(mt, half)) % GQA_GROUP;
                    float sink[1] = {0.0f};
                    if (p.sinks) unpack(load_cached<1>(p.sinks + head), sink);
                    top[mt][half] = sink[0] * LOG2_E, sum[mt][half] = quad == 0;
                }
        }
    }

    // Returns the row of the block that this lane has in accumulator `mt`: the upper row (`half` 0) or the lower (1).
    __device__ __forceinline__ int row(int mt, int half) const { return (m * M_TILES + mt) * 16 + half * 8 + group; }

    __device__ __forceinline__ void load_queries(u32 (&a)[4], u32 tile, int mt, int step) const {
        if constexpr (IS_QUANTIZED) {  // the order of elements within a product is that of score_sixteen
            const u32 from = tile + row(mt, 0) * Q_ROW + step * 32 + quad * 8;
            u32 upper[2], lower[2];
            load_shared<8>(from, upper), load_shared<8>(from + 8 * Q_ROW, lower);
            a[0] = upper[0], a[1] = lower[0], a[2] = upper[1], a[3] = lower[1];
        } else {
            load_matrices<false>(a, tile + ((m * M_TILES + mt) * 16 + lane % 16) * Q_ROW + step * 32 + lane / 16 * 16);
            round_operand(a);
        }
    }

    __device__ __forceinline__ void keep_queries(u32 tile) {
        if constexpr (Q_IN_REGISTERS && MATH_KIND != FP32) {
#pragma unroll
            for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
                for (int step = 0; step < QK_STEPS; ++step) load_queries(queries[mt][step], tile, mt, step);
        }
    }

    // Computes the scores of a tile. PART: only the first `live` groups of sixteen keys count; the other scores are 0.
    template <bool PART>
    __device__ __forceinline__ void scores(float (&s)[M_TILES][KEY_TILES][4], u32 q_tile, u32 k_tile, int live) const {
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
            for (int t = 0; t < KEY_TILES; ++t) s[mt][t][0] = s[mt][t][1] = s[mt][t][2] = s[mt][t][3] = 0.0f;
        if constexpr (MATH_KIND == FP32) {
            scores_by_ffma<PART>(s, q_tile, k_tile, live);
        } else {
            constexpr int STEP_BYTES = IS_QUANTIZED ? STEP : 32;
            const u32 from = k_tile + (IS_QUANTIZED
                                           ? (n * WARP_KEYS + group) * K_ROW + quad * 4
                                           : (n * WARP_KEYS + lane / 16 * 8 + lane % 8) * K_ROW + lane / 8 % 2 * 16);
            if constexpr (PART) {  // one branch for each sixteen keys, and none between their products
#pragma unroll
                for (int t = 0; t < KEY_TILES; t += 2) {
                    if (t / 2 >= live) break;
#pragma unroll
                    for (int step = 0; step < QK_STEPS; ++step) {
                        u32 a[M_TILES][4];
                        get_queries(a, q_tile, step);
                        score_sixteen(s, a, from + step * STEP_BYTES, t);
                    }
                }
            } else {
#pragma unroll
                for (int step = 0; step < QK_STEPS; ++step) {
                    u32 a[M_TILES][4];
                    get_queries(a, q_tile, step);
#pragma unroll
                    for (int t = 0; t < KEY_TILES; t += 2) score_sixteen(s, a, from + step * STEP_BYTES, t);
                }
            }
        }
    }

    __device__ __forceinline__ void get_queries(u32 (&a)[M_TILES][4], u32 q_tile, int step) const {
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) {
            if constexpr (Q_IN_REGISTERS) {
#pragma unroll
                for (int i = 0; i < 4; ++i) a[mt][i] = queries[mt][step][i];
            } else {
                load_queries(a[mt], q_tile, mt, step);
            }
        }
    }

    __device__ __forceinline__ void score_sixteen(float (&s)[M_TILES][KEY_TILES][4], const u32 (&a)[M_TILES][4],
                                                  u32 from, int t) const {
        u32 b[4];
#if QUANTIZED
        // The order of elements within a product is free: those that the lane supplies are four neighbours.
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 bytes;
            load_shared<4>(from + (t + i) * 8 * K_ROW, &bytes);
            b[2 * i] = pair<0, 1>(Paired(), bytes), b[2 * i + 1] = pair<2, 3>(Paired(), bytes);
        }
#else
        load_matrices<false>(b, from + t * 8 * K_ROW);
        round_operand(b);
#endif
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) {
            mma(T(), s[mt][t], a[mt], b[0], b[1]);
            mma(T(), s[mt][t + 1], a[mt], b[2], b[3]);
        }
    }

    template <bool PART>
    __device__ __forceinline__ void scores_by_ffma(float (&s)[M_TILES][KEY_TILES][4], u32 q_tile, u32 k_tile,
                                                   int live) const {
#pragma unroll 1
        for (int step = 0; step < QK_STEPS; ++step) {
            float4 a[M_TILES][2];
#pragma unroll
            for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    a[mt][half] = shared_float4(q_tile + row(mt, half) * Q_ROW + step * 16);
#pragma unroll
            for (int t = 0; t < KEY_TILES; ++t) {
                if (PART && t / 2 >= live) break;
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const float4 b = four_elements(k_tile + (n * WARP_KEYS + t * 8 + 2 * quad + c) * K_ROW, step * 4);
#pragma unroll
                    for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            float& to = s[mt][t][2 * half + c];
                            to = fmaf(a[mt][half].x, b.x, to), to = fmaf(a[mt][half].y, b.y, to);
                            to = fmaf(a[mt][half].z, b.z, to), to = fmaf(a[mt][half].w, b.w, to);
                        }
                }
            }
        }
    }

    // Adds the product p v of probabilities and values to o.
    template <bool PART>
    __device__ __forceinline__ void values(const float (&p)[M_TILES][KEY_TILES][4], u32 v_tile, int live) {
        const u32 tile = v_tile + n * WARP_KEYS * V_ROW;
        if constexpr (MATH_KIND == HALF) values_by_half<PART>(p, tile, live);
        else if constexpr (MATH_KIND == TF32) values_by_tf32<PART>(p, tile, live);
        else values_by_ffma<PART>(p, tile, live);
    }

    template <bool PART>
    __device__ __forceinline__ void values_by_half(const float (&p)[M_TILES][KEY_TILES][4], u32 tile, int live) {
        const u32 from = tile + (lane % 16) * V_ROW + lane / 16 * 16;
#pragma unroll
        for (int t = 0; t < KEY_TILES; t += 2) {
            if (PART && t / 2 >= live) break;
            u32 a[M_TILES][4];
#pragma unroll
            for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
                for (int i = 0; i < 4; ++i) a[mt][i] = narrow(T(), &p[mt][t + i / 2][i % 2 * 2]);
#pragma unroll
            for (int vt = 0; vt < V_TILES; vt += IS_QUANTIZED ? 4 : 2) {
                u32 b[4];
                load_matrices<true>(b, from + t * 8 * V_ROW + vt * 8 * KEY_ITEM);
#if QUANTIZED
                add_bytes<0>(a, vt, b);
                if (vt + 2 < V_TILES) add_bytes<2>(a, vt + 2, b);
#else
#pragma unroll
                for (int mt = 0; mt < M_TILES; ++mt) {
                    mma(T(), o[mt][vt], a[mt], b[0], b[1]);
                    mma(T(), o[mt][vt + 1], a[mt], b[2], b[3]);
                }
#endif
            }
        }
    }

#if QUANTIZED
    // Adds the product with sixteen keys and sixteen columns of values. Words FIRST and FIRST + 1 have two keys each,
    // and of each key two neighbouring columns: o[mt][vt] gets the even columns, and o[mt][vt + 1] the odd ones.
    template <int FIRST>
    __device__ __forceinline__ void add_bytes(const u32 (&a)[M_TILES][4], int vt, const u32 (&b)[4]) {
        const u32 even[2] = {pair<0, 2>(Paired(), b[FIRST]), pair<0, 2>(Paired(), b[FIRST + 1])};
        const u32 odd[2] = {pair<1, 3>(Paired(), b[FIRST]), pair<1, 3>(Paired(), b[FIRST + 1])};
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) {
            mma(T(), o[mt][vt], a[mt], even[0], even[1]);
            mma(T(), o[mt][vt + 1], a[mt], odd[0], odd[1]);
        }
    }

    // Multiplies the results by the scales of the head's values, after the last tile.
    __device__ __forceinline__ void scale_values(const f32* scales) {
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
            for (int vt = 0; vt < V_TILES; ++vt)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float *const x = &o[mt][vt][2 * half], factors[2] = {};
                    if (MATH_KIND == HALF && vt % 2 == 0) {  // this lane has columns 0, 2 and 1, 3 of four
                        const float first = o[mt][vt + 1][2 * half];
                        o[mt][vt + 1][2 * half] = x[1], x[1] = first;
                    }
                    if (column(vt) < HEAD_DIM_V) load_scales(scales, column(vt), factors);
                    x[0] *= factors[0] * NUMBER_UNIT, x[1] *= factors[1] * NUMBER_UNIT;
                }
    }
#endif

    // Returns the first of the two columns of the result that this lane has in o[mt][vt].
    __device__ __forceinline__ int column(int vt) const {
        return IS_QUANTIZED && MATH_KIND == HALF ? vt / 2 * 16 + 4 * quad + vt % 2 * 2 : 8 * vt + 2 * quad;
    }

    // The order of keys within a product is free, so columns 2 quad and 2 quad + 1 of the accumulator serve as the
    // operand's columns quad and quad + 4, which this lane must supply.
    template <bool PART>
    __device__ __forceinline__ void values_by_tf32(const float (&p)[M_TILES][KEY_TILES][4], u32 tile, int live) {
        const u32 from = tile + 2 * quad * V_ROW + group * 4;
#pragma unroll
        for (int t = 0; t < KEY_TILES; ++t) {
            if (PART && t / 2 >= live) break;
            u32 a[M_TILES][4];
#pragma unroll
            for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
                for (int i = 0; i < 4; ++i) a[mt][i] = rounded_tf32(__float_as_uint(p[mt][t][i % 2 * 2 + i / 2]));
#pragma unroll
            for (int vt = 0; vt < V_TILES; ++vt) {
                const u32 b0 = rounded_tf32(__float_as_uint(shared_float(from + t * 8 * V_ROW + vt * 32)));
                const u32 b1 = rounded_tf32(__float_as_uint(shared_float(from + (t * 8 + 1) * V_ROW + vt * 32)));
#pragma unroll
                for (int mt = 0; mt < M_TILES; ++mt) mma(f32(), o[mt][vt], a[mt], b0, b1);
            }
        }
    }

    template <bool PART>
    __device__ __forceinline__ void values_by_ffma(const float (&p)[M_TILES][KEY_TILES][4], u32 tile, int live) {
#pragma unroll
        for (int t = 0; t < KEY_TILES; ++t) {
            if (PART && t / 2 >= live) break;
#pragma unroll 1
            for (int from = 0; from < 4; ++from) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float a[M_TILES][2];
#pragma unroll
                    for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
                        for (int half = 0; half < 2; ++half)
                            a[mt][half] = __shfl_sync(0xffffffffu, p[mt][t][2 * half + c], lane / 4 * 4 + from);
#pragma unroll
                    for (int vt = 0; vt < V_TILES; ++vt) {
                        if (vt % 8 == 0) __syncwarp();  // otherwise the compiler hoists all loads, and they spill
                        const float2 b = two_elements(tile + (t * 8 + 2 * from + c) * V_ROW, vt * 8 + 2 * quad);
#pragma unroll
                        for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
                            for (int half = 0; half < 2; ++half) {
                                o[mt][vt][2 * half] = fmaf(a[mt][half], b.x, o[mt][vt][2 * half]);
                                o[mt][vt][2 * half + 1] = fmaf(a[mt][half], b.y, o[mt][vt][2 * half + 1]);
                            }
                    }
                }
            }
        }
    }

    // Replaces scores by probabilities, not yet divided by their sum, and rescales sums and o to the new maximum.
    __device__ __forceinline__ void softmax(float (&s)[M_TILES][KEY_TILES][4], float scale) {
        float factors[M_TILES][2];
        bool same = true;
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                factors[mt][half] = row_softmax(s[mt], mt, half, scale);
                same = same && factors[mt][half] == 1.0f;
            }
        if (__all_sync(0xffffffffu, same)) return;  // after the first tiles, maxima seldom change
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
            for (int vt = 0; vt < V_TILES; ++vt)
#pragma unroll
                for (int i = 0; i < 4; ++i) o[mt][vt][i] *= factors[mt][i / 2];
    }

    // Replaces a row's scores `s` of a tile by weights. The weights in the row's sums `o` of earlier tiles are relative
    // to an earlier maximum; returns the factor that adapts these sums. With SCALE_IN_EXPONENT, scores and maxima are
    // not yet multiplied by the scale, which is positive.
    __device__ __forceinline__ float row_softmax(float (&s)[KEY_TILES][4], int mt, int half, float scale) {
        float best[2] = {top[mt][half], s[0][2 * half]}, total[2] = {0.0f, 0.0f};
#pragma unroll
        for (int t = 0; t < KEY_TILES; ++t) best[t % 2] = fmaxf(best[t % 2], fmaxf(s[t][2 * half], s[t][2 * half + 1]));
        float most = fmaxf(best[0], best[1]);
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        // Subtract 0 instead of -inf, because -inf - -inf would be NaN.
        const float zero = most == MINUS_INFINITY ? 0.0f : SCALE_IN_EXPONENT ? most * scale : most;
        const float factor = exp2_fast(SCALE_IN_EXPONENT ? fmaf(top[mt][half], scale, -zero) : top[mt][half] - zero);
#pragma unroll
        for (int t = 0; t < KEY_TILES; ++t)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& p = s[t][2 * half + c];
                p = exp2_fast(SCALE_IN_EXPONENT ? fmaf(p, scale, -zero) : p - zero);
                total[c] += p;
            }
        top[mt][half] = most;
        sum[mt][half] = fmaf(sum[mt][half], factor, total[0] + total[1]);
        return factor;
    }

    // Returns whether one of this lane's rows has no score above SECOND_PASS_BELOW; the block has `rows` rows.
    __device__ __forceinline__ bool needs_second_pass(int rows) const {
        bool found = false;
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                found |= row(mt, half) < rows && top[mt][half] <= float(SECOND_PASS_BELOW);
        return found;
    }

    __device__ __forceinline__ void finish(float scale) {
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (SCALE_IN_EXPONENT) top[mt][half] *= scale;
                sum[mt][half] += __shfl_xor_sync(0xffffffffu, sum[mt][half], 1);
                sum[mt][half] += __shfl_xor_sync(0xffffffffu, sum[mt][half], 2);
            }
    }
};
