// out = softmax(mask(cap(scale q k^T) + bias)) v on Hopper, as kernels/_attention.py defines it, for fp16 and bf16.
//
// A block works on GROUPS x 64 queries of one head, each of its first GROUPS warpgroups on 64. One more warp feeds them:
// it decides which tiles of keys matter, in which order, and copies them. Each stage of keys carries the number of its
// tile and what is to be masked in it, so that the warpgroups just take what comes until END. While the tensor cores
// multiply a tile's weights by its values, the next tile's softmax runs; and with PINGPONG the warpgroups issue their
// products in turns, so that one's softmax runs beside the other's products: 651 against 514 TFLOP/s on an H200 (two
// groups, head size 128, 8192 keys).
//
// Scores: with RAW, q k^T is only ever set to -inf, and scale goes into the exponent. Otherwise they are in natural
// units, because a mask of -3.4e38 times log2(e) would not be finite.
//
// Skipped tiles: attention_blocks.cu has found what a mask leaves of each tile. Where the masked score is finite, a row
// whose best score is less than 128 above it may still need them; then they follow after a first END.
#include "hopper.cuh"

using namespace hopper;

constexpr int ROWS = GROUPS * 64;
constexpr int K_STEPS = (SIZE + 15) / 16;
constexpr int VALUE_COLUMNS = (VALUE_SIZE + 15) / 16 * 16;
constexpr int K_PANELS = (SIZE + 63) / 64;
constexpr int V_PANELS = (VALUE_SIZE + 63) / 64;
constexpr int OWN_PANELS = K_PANELS > V_PANELS ? K_PANELS : V_PANELS;  // queries, and then the result
constexpr u32 PANEL = KEYS_TILE * 128;                                 // bytes of 64 columns of a tile
constexpr u32 OWN_PANEL = 64 * 128;
constexpr u32 OWN = OWN_PANELS * OWN_PANEL;
constexpr u32 K_STAGE = K_PANELS * PANEL;
constexpr u32 V_STAGE = V_PANELS * PANEL;

constexpr int CONSUMERS = GROUPS * 128;
constexpr bool REBALANCED = GROUPS > 1;  // registers go from the copying warpgroup to the others
constexpr int THREADS = CONSUMERS + (REBALANCED ? 128 : 32);

constexpr bool BOOLEAN = MASK == 1;   // bits made by attention_blocks.cu
constexpr bool ADDITIVE = MASK == 2;
constexpr int BIT_WORDS = (KEYS_TILE / 2 + 31) / 32;  // of a thread, for a tile
constexpr bool RETURNS = FLAGS && FINITE;             // skipped tiles may have to follow
constexpr int KINDS = 26;             // where the kinds of a tile begin, above its number
constexpr u32 END = (1u << KINDS) - 1;

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

struct Shape {
    int queries, keys, heads, repeats, causal;
};

struct Barriers {
    u64 queries, vote, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    u32 tile[STAGES];
    u32 wanted;
};

struct Place {
    int first, head, batch, key_head;
};

struct Ring {
    int stage = 0;
    u32 phase = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// Blocks in the order of their numbers: `together` heads at a time, whose keys and values fit into L2; of these the
// longest rows first, where a diagonal makes them differ.
__device__ __forceinline__ Place place_of(u32 block, const Shape& shape, int batches, int together) {
    const int tiles = (shape.queries + ROWS - 1) / ROWS;
    const int all = shape.heads * batches;
    const int chunk = block / (u32(together) * tiles);
    const int rest = block - chunk * together * tiles;
    const int width = min(together, all - chunk * together);
    const int row = rest / width, plane = chunk * together + rest % width;
    const int head = plane % shape.heads;
    return {(CAUSAL ? tiles - 1 - row : row) * ROWS, head, plane / shape.heads, head / shape.repeats};
}

// ---- which tiles, and in which order -----------------------------------------------------------------------------

struct Tiles {
    const unsigned char* flags;  // of the first 64 rows: 0 nothing counts, 1 some, 2 everything
    long long flags_step;        // to those of the next 64
    int groups;                  // with rows
    int first;

    // 2 bits for each warpgroup; 0 where the tile is skipped.
    __device__ __forceinline__ u32 kinds(int tile) const {
        u32 found = 0;
#pragma unroll 1
        for (int g = 0; g < groups; ++g) found |= u32(flags[g * flags_step + tile]) << 2 * g;
        return found;
    }
};

__device__ __forceinline__ int tiles_of(const Shape& shape, int first) {
    int keys = shape.keys;
    if (CAUSAL) keys = min(keys, min(first + ROWS, shape.queries) + shape.causal);
    return keys <= 0 ? 0 : (keys + KEYS_TILE - 1) / KEYS_TILE;
}

// Calls `load(tile, kinds)` for every tile that matters; `skipped`: for those that seemed not to.
template <class Load>
__device__ __forceinline__ void each_tile(const Shape& shape, const Tiles& tiles, bool skipped, const Load& load) {
#pragma unroll 1
    for (int tile = tiles_of(shape, tiles.first) - 1; tile >= 0; --tile) {
        u32 kinds = 0x15;
        if (FLAGS) {
            const u32 found = tiles.kinds(tile);
            if ((found == 0) != skipped) continue;
            if (!skipped) kinds = found;
        }
        load(tile, kinds);
    }
}

// One thread: copies what matters, keys a tile ahead of values, as the products want them.
__device__ __forceinline__ void feed(const TensorMap& k, const TensorMap& v, const Shape& shape, const Place& at,
                                     const Tiles& tiles, u32 buffers, Barriers& barriers) {
    Ring k_ring, v_ring;
    int pending = -1;  // the tile whose values are to follow
    const auto copy_values = [&] {
        if (pending < 0) return;
        const u32 full = shared_address(barriers.v_full + v_ring.stage);
        barrier_wait(shared_address(barriers.v_empty + v_ring.stage), v_ring.phase ^ 1);
        barrier_arrive_expect(full, V_STAGE);
        for (int panel = 0; panel < V_PANELS; ++panel)
            load(v, buffers + STAGES * K_STAGE + v_ring.stage * V_STAGE + panel * PANEL, full, panel * 64,
                 pending * KEYS_TILE, at.key_head, at.batch);
        v_ring.advance();
        pending = -1;
    };
    const auto copy = [&](int tile, u32 kinds) {
        const u32 full = shared_address(barriers.k_full + k_ring.stage);
        barrier_wait(shared_address(barriers.k_empty + k_ring.stage), k_ring.phase ^ 1);
        barriers.tile[k_ring.stage] = tile | kinds << KINDS;
        barrier_arrive_expect(full, K_STAGE);
        for (int panel = 0; panel < K_PANELS; ++panel)
            load(k, buffers + k_ring.stage * K_STAGE + panel * PANEL, full, panel * 64, tile * KEYS_TILE, at.key_head,
                 at.batch);
        k_ring.advance();
        copy_values();
        pending = tile;
    };
#pragma unroll 1
    for (int pass = 0; pass < 1 + RETURNS; ++pass) {
        each_tile(shape, tiles, pass == 1, copy);
        copy_values();
        barrier_wait(shared_address(barriers.k_empty + k_ring.stage), k_ring.phase ^ 1);
        barriers.tile[k_ring.stage] = END;
        barrier_arrive(shared_address(barriers.k_full + k_ring.stage));
        k_ring.advance();
        if (!RETURNS || pass == 1) break;
        barrier_wait(shared_address(&barriers.vote), 0);
        if (!*const_cast<volatile u32*>(&barriers.wanted)) break;
    }
}

// ---- scores ------------------------------------------------------------------------------------------------------

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

    __device__ __forceinline__ void add(float (&s)[KEYS_TILE / 2]) const {
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
    __device__ __forceinline__ void take(float (&s)[KEYS_TILE / 2], float scale, float (&factor)[2]) {
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
};

// ---- the kernel --------------------------------------------------------------------------------------------------

__device__ __forceinline__ void multiply_keys(float (&s)[KEYS_TILE / 2], u32 queries, u32 keys) {
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step)
        wgmma<false>(T(), s, matrix_descriptor<128>(queries + step / 4 * OWN_PANEL + step % 4 * 32, 0, 1024),
                     matrix_descriptor<128>(keys + step / 4 * PANEL + step % 4 * 32, 0, 1024), step != 0);
    wgmma_commit();
}

__device__ __forceinline__ void multiply_values(float (&o)[VALUE_COLUMNS / 2], const u32 (&p)[KEYS_TILE / 16][4],
                                                u32 values) {
#pragma unroll
    for (int step = 0; step < KEYS_TILE / 16; ++step)
        wgmma<true>(T(), o, p[step], matrix_descriptor<128>(values + step * 16 * 128, PANEL, 1024), true);
    wgmma_commit();
}

__device__ __forceinline__ void pack_weights(const float (&s)[KEYS_TILE / 2], u32 (&p)[KEYS_TILE / 16][4]) {
#pragma unroll
    for (int i = 0; i < KEYS_TILE / 4; ++i) p[i / 4][i % 4] = narrow(T(), s + 2 * i);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
attention_hopper(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                 const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap out, int queries, int keys,
                 int heads, int repeats, int batches, int causal, int together, float scale, float cap,
                 float masked_score, const char* mask, long long mask_batch, long long mask_head, long long mask_query,
                 const char* bias, long long bias_batch, long long bias_head, long long bias_query,
                 const unsigned char* flags, const u32* bits, int flags_batch, int flags_head, int flags_row) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 own = shared_address(shared);
    const u32 k_buffers = own + GROUPS * OWN, v_buffers = k_buffers + STAGES * K_STAGE;
    Barriers& barriers = *reinterpret_cast<Barriers*>(shared + GROUPS * OWN + STAGES * (K_STAGE + V_STAGE));

    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        barrier_init(shared_address(&barriers.queries), 1);
        barrier_init(shared_address(&barriers.vote), GROUPS * 4);
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(shared_address(barriers.k_full + stage), 1);
            barrier_init(shared_address(barriers.v_full + stage), 1);
            barrier_init(shared_address(barriers.k_empty + stage), GROUPS);
            barrier_init(shared_address(barriers.v_empty + stage), GROUPS);
        }
        barriers.wanted = 0;
        barrier_init_fence();
    }
    __syncthreads();

    const Shape shape = {queries, keys, heads, repeats, causal};
    const Place at = place_of(blockIdx.x, shape, batches, together);
    const int key_tiles = (keys + KEYS_TILE - 1) / KEYS_TILE;
    const int row_tiles = flags_row ? (queries + 63) / 64 : 1;
    const long long plane = (long long)at.batch * flags_batch + at.head * flags_head;
    const long long first_flag = (plane * row_tiles + at.first / 64 * flags_row) * key_tiles;

    if (warp >= CONSUMERS / 32) {
        if constexpr (REBALANCED) give_registers<GROUPS == 2 ? 40 : 32>();
        const Tiles tiles = {flags + first_flag, (long long)flags_row * key_tiles,
                             min(GROUPS, (queries - at.first + 63) / 64), at.first};
        if (warp == CONSUMERS / 32 && lane == 0) {
            const u32 barrier = shared_address(&barriers.queries);
            barrier_arrive_expect(barrier, GROUPS * K_PANELS * OWN_PANEL);
            for (int i = 0; i < GROUPS * K_PANELS; ++i)
                load(q, own + i / K_PANELS * OWN + i % K_PANELS * OWN_PANEL, barrier, i % K_PANELS * 64,
                         at.first + i / K_PANELS * 64, at.head, at.batch);
            feed(k, v, shape, at, tiles, k_buffers, barriers);
        }
    } else {
        if constexpr (REBALANCED) take_registers<GROUPS == 2 ? 232 : 160>();
        const int group = warp / 4;
        const int first = at.first + group * 64;
        const int row = first + warp % 4 * 16 + lane / 4;
        const u32 own_queries = own + group * OWN;
        const float exponent = RAW ? scale * LOG2_E : 1.0f;
        const float cap_reciprocal = 1.0f / cap;
        const int limit[2] = {CAUSAL ? min(keys, row + causal + 1) : keys, CAUSAL ? min(keys, row + causal + 9) : keys};
        const int unlimited = CAUSAL ? min(keys, first + causal + 1) : keys;  // every row sees that many keys
        const int near[2] = {min(row, queries - 1), min(row + 8, queries - 1)};  // rows with masks
        long long mask_rows[2], bias_rows[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            mask_rows[r] = at.batch * mask_batch + at.head * mask_head + near[r] * mask_query;
            bias_rows[r] = at.batch * bias_batch + at.head * bias_head + near[r] * bias_query;
        }
        const u32* own_bits = bits + threadIdx.x % 128 +
                              (first_flag + (long long)group * flags_row * key_tiles) * BIT_WORDS * 128;

        Fragment<MASK_T, MASK_KEY, MASK_QUERY, MASK_PAIRS> added_mask;
        Fragment<BIAS_T, BIAS_KEY, BIAS_QUERY, BIAS_PAIRS> added_bias;
        u32 counts[BIT_WORDS];
        const auto masked = [&](u32 info) { return MASK && (info >> (KINDS + 2 * group) & 3) != 2; };
        const auto prepare = [&](u32 info) {  // loads what the tile's scores will need
            const int tile = info & END;
            const int column = tile * KEYS_TILE + lane % 4 * 2;
            if constexpr (BIAS) added_bias.load(bias, bias_rows, column, keys);
            if (masked(info)) {
                if constexpr (ADDITIVE) added_mask.load(mask, mask_rows, column, keys);
                if constexpr (BOOLEAN) {
#pragma unroll
                    for (int w = 0; w < BIT_WORDS; ++w)
                        counts[w] = __ldg(own_bits + ((long long)tile * BIT_WORDS + w) * 128);
                }
            }
        };
        const auto adjust = [&](float (&s)[KEYS_TILE / 2], u32 info) {
            const int tile = info & END;
            if constexpr (!RAW) {
#pragma unroll
                for (int i = 0; i < KEYS_TILE / 2; ++i) {
                    s[i] *= scale;
                    if (SOFTCAP) s[i] = capped(s[i], cap, cap_reciprocal);
                }
                if constexpr (BIAS) added_bias.add(s);
            }
            if (masked(info)) {
                if constexpr (ADDITIVE) added_mask.add(s);
                if constexpr (BOOLEAN) {
                    const float instead = RAW ? minus_infinity() : masked_score;
#pragma unroll
                    for (int i = 0; i < KEYS_TILE / 2; ++i)
                        if (!(counts[i / 32] >> i % 32 & 1)) s[i] = instead;
                }
            }
            if ((tile + 1) * KEYS_TILE > unlimited) {
                const int column = tile * KEYS_TILE + lane % 4 * 2;
#pragma unroll
                for (int i = 0; i < KEYS_TILE / 2; ++i)
                    if (column + i / 4 * 8 + i % 2 >= limit[i / 2 % 2]) s[i] = minus_infinity();
            }
        };

        Ring k_ring, v_ring;
        Softmax softmax;
        float o[VALUE_COLUMNS / 2];
#pragma unroll
        for (int i = 0; i < VALUE_COLUMNS / 2; ++i) o[i] = 0.0f;
        const auto k_taken = [&] {
            if (threadIdx.x % 128 == 0) barrier_arrive(shared_address(barriers.k_empty + k_ring.stage));
            k_ring.advance();
        };
        const auto v_taken = [&] {
            if (threadIdx.x % 128 == 0) barrier_arrive(shared_address(barriers.v_empty + v_ring.stage));
            v_ring.advance();
        };
        const auto next_tile = [&]() -> u32 {
            barrier_wait(shared_address(barriers.k_full + k_ring.stage), k_ring.phase);
            return *const_cast<volatile u32*>(barriers.tile + k_ring.stage);
        };
        barrier_wait(shared_address(&barriers.queries), 0);

#pragma unroll 1
        for (int pass = 0; pass < 1 + RETURNS; ++pass) {
            u32 info = next_tile();
            if (info == END) {
                k_taken();
            } else {
                float s[KEYS_TILE / 2];
                float factor[2];
                u32 p[KEYS_TILE / 16][4];
                wgmma_fence();
                multiply_keys(s, own_queries, k_buffers + k_ring.stage * K_STAGE);
                prepare(info);
                wgmma_wait<0>();
                settle(s);
                k_taken();
                adjust(s, info);
                softmax.take(s, exponent, factor);
                pack_weights(s, p);
                if (RETURNS) {
#pragma unroll
                    for (int i = 0; i < VALUE_COLUMNS / 2; ++i) o[i] *= factor[i / 2 % 2];
                }
                if (PINGPONG && group == GROUPS - 1) named_barrier_arrive(1, 256);
                for (;;) {
                    info = next_tile();
                    if (info == END) break;
                    if (PINGPONG) named_barrier(1 + group, 256);
                    settle(o);
                    wgmma_fence();
                    multiply_keys(s, own_queries, k_buffers + k_ring.stage * K_STAGE);
                    barrier_wait(shared_address(barriers.v_full + v_ring.stage), v_ring.phase);
                    multiply_values(o, p, v_buffers + v_ring.stage * V_STAGE);
                    if (PINGPONG) named_barrier_arrive(1 + (group + 1) % GROUPS, 256);
                    prepare(info);
                    wgmma_wait<1>();
                    settle(s);
                    k_taken();
                    adjust(s, info);
                    softmax.take(s, exponent, factor);
                    wgmma_wait<0>();
                    settle(o);
                    v_taken();
                    pack_weights(s, p);
                    if (!LAZY || __any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
                        for (int i = 0; i < VALUE_COLUMNS / 2; ++i) o[i] *= factor[i / 2 % 2];
                    }
                }
                k_taken();
                if (PINGPONG && group == 0) named_barrier(1, 256);
                barrier_wait(shared_address(barriers.v_full + v_ring.stage), v_ring.phase);
                settle(o);
                wgmma_fence();
                multiply_values(o, p, v_buffers + v_ring.stage * V_STAGE);
                wgmma_wait<0>();
                settle(o);
                v_taken();
            }
            if (RETURNS && pass == 0) {
                bool wanted = false;
#pragma unroll
                for (int r = 0; r < 2; ++r) wanted |= row + 8 * r < queries && softmax.top[r] <= masked_score + 128.0f;
                wanted = __any_sync(0xffffffffu, wanted);
                if (lane == 0) {
                    if (wanted) *const_cast<volatile u32*>(&barriers.wanted) = 1;
                    barrier_arrive(shared_address(&barriers.vote));
                }
                barrier_wait(shared_address(&barriers.vote), 0);
                if (!*const_cast<volatile u32*>(&barriers.wanted)) break;
            }
        }

#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float& sum = softmax.sum[r];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            const float factor = sum == 0.0f ? (ZERO_ROWS ? 0.0f : __int_as_float(0x7fc00000)) : __frcp_rn(sum);
#pragma unroll
            for (int j = 0; j < VALUE_COLUMNS / 8; ++j) {
                const float both[2] = {o[4 * j + 2 * r] * factor, o[4 * j + 2 * r + 1] * factor};
                const int line = warp % 4 * 16 + lane / 4 + 8 * r;
                const u32 to = own_queries + j / 8 * OWN_PANEL + line * 128 + ((j % 8 ^ line % 8) * 16) + lane % 4 * 4;
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(narrow(T(), both)) : "memory");
            }
        }
        store_fence();
        named_barrier(8 + group, 128);
        if (threadIdx.x % 128 == 0 && first < queries) {
            for (int panel = 0; panel < V_PANELS; ++panel)
                store(out, own_queries + panel * OWN_PANEL, panel * 64, first, at.head, at.batch);
            store_commit();
            store_wait_read<0>();
        }
    }
}
