// out = softmax(mask(cap(scale q k^T) + bias)) v on Hopper, as kernels/_attention.py defines it, for fp16 and bf16.
//
// A block works on GROUPS x 64 queries of one head, each of its first GROUPS warpgroups on 64. One more warp feeds
// them: it decides which tiles of keys matter, in which order, and copies them. Each stage of keys carries the number
// of its tile and what is to be masked in it, so that the warpgroups just take what comes until END. While the tensor
// cores multiply a tile's weights by its values, the next tile's softmax runs; and with PINGPONG the warpgroups issue
// their products in turns, so that one's softmax runs beside the other's products: 651 against 514 TFLOP/s on an H200
// (two groups, head size 128, 8192 keys).
//
// Scores: with RAW, q k^T is only ever set to -inf, and scale goes into the exponent. Otherwise they are in natural
// units, because a mask of -3.4e38 times log2(e) would not be finite.
//
// Skipped tiles: attention_blocks.cu has found what a mask leaves of each tile; what a mask that is the same for all
// queries leaves, the copying warp finds itself. Where the masked score is finite, a row whose best score is less than
// 128 above it may still need what was skipped; then it follows after a first END.
#include "attention_hopper.cuh"

using namespace hopper;

constexpr int ROWS = GROUPS * 64;
constexpr int K_STEPS = (SIZE + 15) / 16;
constexpr int VALUE_COLUMNS = (VALUE_SIZE + 15) / 16 * 16;
constexpr int RESULTS = VALUE_COLUMNS / 2;  // of a thread
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

constexpr bool BOOLEAN = MASK == 1;
constexpr bool ADDITIVE = MASK == 2;
constexpr bool ROW_MASK = MASK && !MASK_QUERY;  // the same for all queries
constexpr int BIT_WORDS = ((ROW_MASK ? KEYS_TILE : SCORES) + 31) / 32;  // a row's, or a thread's
constexpr bool RETURNS = MASK && FINITE;                                // skipped tiles may have to follow
constexpr int KINDS = 26;  // where the kinds of a tile begin, above its number
constexpr u32 END = (1u << KINDS) - 1;

struct Shape {
    int queries, keys, heads, repeats, causal;
};

struct Place {
    int first, head, batch, key_head;
};

struct Barriers {
    u64 queries, vote, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    u32 tile[STAGES], bits[STAGES][ROW_MASK && BOOLEAN ? BIT_WORDS : 1];  // of a stage of keys
    u32 wanted;
};

struct Ring {
    int stage = 0;
    u32 phase = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

__device__ __forceinline__ u32 reread(const u32& place) { return *const_cast<const volatile u32*>(&place); }

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

// ---- the copying warp --------------------------------------------------------------------------------------------

// What a mask leaves of a tile: 2 bits for each warpgroup, 0 nothing, 1 something, 2 everything.
struct Flags {
    const unsigned char* flags;  // of the first 64 rows
    long long step;              // to those of the next 64
    int groups;                  // with rows

    __device__ __forceinline__ void ahead(int) {}
    __device__ __forceinline__ u32 kinds(int tile, u32*) const {
        u32 found = 0;
#pragma unroll 1
        for (int g = 0; g < groups; ++g) found |= u32(flags[g * step + tile]) << 2 * g;
        return found;
    }
};

// The same from the mask itself, by a whole warp, with the bits of a boolean mask.
struct RowMask {
    const MASK_T* mask;
    int keys, lane;
    Pack<MASK_T, 1> next[BIT_WORDS];

    __device__ __forceinline__ void ahead(int tile) {  // a tile's elements are loaded while the one before is copied
#pragma unroll
        for (int w = 0; w < BIT_WORDS; ++w)
            next[w] = load_mask(mask + max(0, min(tile * KEYS_TILE + w * 32 + lane, keys - 1)) * MASK_KEY);
    }
    __device__ __forceinline__ u32 kinds(int tile, u32 (&bits)[BIT_WORDS]) {
        bool none = true, all = true;
#pragma unroll
        for (int w = 0; w < BIT_WORDS; ++w) {
            const int found = mask_kind(next[w]);
            const bool inside = w * 32 + lane < KEYS_TILE && tile * KEYS_TILE + w * 32 + lane < keys;
            none &= !inside || found == 0;
            all &= !inside || found == 2;
            bits[w] = __ballot_sync(0xffffffffu, found);
        }
        ahead(tile - 1);
        none = __all_sync(0xffffffffu, none);
        all = __all_sync(0xffffffffu, all);
        return none ? 0 : all ? 0x2a : 0x15;
    }
};

__device__ __forceinline__ int tiles_of(const Shape& shape, int first) {
    int keys = shape.keys;
    if (CAUSAL) keys = min(keys, min(first + ROWS, shape.queries) + shape.causal);
    return keys <= 0 ? 0 : (keys + KEYS_TILE - 1) / KEYS_TILE;
}

struct Feed {
    const TensorMap &k, &v;
    const Place& at;
    u32 buffers;
    Barriers& barriers;
    Ring k_ring, v_ring;
    int pending = -1;  // the tile whose values are to follow: keys go a tile ahead, as the products want them

    __device__ __forceinline__ void copy_keys(u32 info, const u32 (&bits)[BIT_WORDS]) {
        const u32 full = shared_address(barriers.k_full + k_ring.stage);
        barrier_wait(shared_address(barriers.k_empty + k_ring.stage), k_ring.phase ^ 1);
        barriers.tile[k_ring.stage] = info;
        if (ROW_MASK && BOOLEAN)
            for (int w = 0; w < BIT_WORDS; ++w) barriers.bits[k_ring.stage][w] = bits[w];
        if (info == END) {
            barrier_arrive(full);
        } else {
            barrier_arrive_expect(full, K_STAGE);
            for (int panel = 0; panel < K_PANELS; ++panel)
                load(k, buffers + k_ring.stage * K_STAGE + panel * PANEL, full, panel * 64, (info & END) * KEYS_TILE,
                     at.key_head, at.batch);
        }
        k_ring.advance();
    }
    __device__ __forceinline__ void copy_values() {
        if (pending < 0) return;
        const u32 full = shared_address(barriers.v_full + v_ring.stage);
        barrier_wait(shared_address(barriers.v_empty + v_ring.stage), v_ring.phase ^ 1);
        barrier_arrive_expect(full, V_STAGE);
        for (int panel = 0; panel < V_PANELS; ++panel)
            load(v, buffers + STAGES * K_STAGE + v_ring.stage * V_STAGE + panel * PANEL, full, panel * 64,
                 pending * KEYS_TILE, at.key_head, at.batch);
        v_ring.advance();
        pending = -1;
    }
};

// Copies all that matters, and then, if a row wants it, what seemed not to.
template <class Mask>
__device__ __forceinline__ void feed(Feed& feed, Mask& mask, int tiles, bool leader) {
    u32 bits[BIT_WORDS] = {};
#pragma unroll 1
    for (int pass = 0; pass < 1 + RETURNS; ++pass) {
        mask.ahead(tiles - 1);
#pragma unroll 1
        for (int tile = tiles - 1; tile >= 0; --tile) {
            u32 kinds = 0x15;
            if (MASK) {
                const u32 found = mask.kinds(tile, bits);
                if ((found == 0) != (pass == 1)) continue;
                if (pass == 0) kinds = found;
            }
            if (!leader) continue;
            feed.copy_keys(tile | kinds << KINDS, bits);
            feed.copy_values();
            feed.pending = tile;
        }
        if (leader) {
            feed.copy_values();
            feed.copy_keys(END, bits);
        }
        if (!RETURNS || pass == 1) break;
        barrier_wait(shared_address(&feed.barriers.vote), 0);
        if (!reread(feed.barriers.wanted)) break;
    }
}

// ---- a warpgroup -------------------------------------------------------------------------------------------------

__device__ __forceinline__ void multiply_keys(float (&s)[SCORES], u32 queries, u32 keys) {
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step)
        wgmma<false>(T(), s, matrix_descriptor<128>(queries + step / 4 * OWN_PANEL + step % 4 * 32, 0, 1024),
                     matrix_descriptor<128>(keys + step / 4 * PANEL + step % 4 * 32, 0, 1024), step != 0);
    wgmma_commit();
}

__device__ __forceinline__ void multiply_values(float (&o)[RESULTS], const u32 (&p)[KEYS_TILE / 16][4], u32 values) {
#pragma unroll
    for (int step = 0; step < KEYS_TILE / 16; ++step)
        wgmma<true>(T(), o, p[step], matrix_descriptor<128>(values + step * 16 * 128, PANEL, 1024), true);
    wgmma_commit();
}

__device__ __forceinline__ void pack_weights(const float (&s)[SCORES], u32 (&p)[KEYS_TILE / 16][4]) {
#pragma unroll
    for (int i = 0; i < SCORES / 2; ++i) p[i / 4][i % 4] = narrow(T(), s + 2 * i);
}

__device__ __forceinline__ void rescale(float (&o)[RESULTS], const float (&factor)[2]) {
    if (LAZY && !__any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < RESULTS; ++i) o[i] *= factor[i / 2 % 2];
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

    // Loads, ahead of the products, what the tile's scores will need.
    __device__ __forceinline__ void prepare(u32 info, const u32* row_bits) {
        const int tile = info & END, first = tile * KEYS_TILE + column;
        if constexpr (BIAS) added_bias.load(bias, bias_rows, first, keys);
        if (!masked(info)) return;
        if constexpr (ADDITIVE) added_mask.load(mask, mask_rows, first, keys);
        if constexpr (BOOLEAN) {
#pragma unroll
            for (int w = 0; w < BIT_WORDS; ++w)
                bits[w] = ROW_MASK ? reread(row_bits[w]) >> column
                                   : __ldg(own_bits + ((long long)tile * BIT_WORDS + w) * 128);
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

// The rows over their sums, through shared memory; TMA cuts off what lies beyond the last row and column.
__device__ __forceinline__ void write(const TensorMap& out, const Place& at, u32 own, int group, int queries,
                                      const float (&o)[RESULTS], Softmax& softmax) {
    const int lane = threadIdx.x % 32, line = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float sum = softmax.total(r);
        const float factor = sum == 0.0f ? (ZERO_ROWS ? 0.0f : __int_as_float(0x7fc00000)) : __frcp_rn(sum);
#pragma unroll
        for (int j = 0; j < VALUE_COLUMNS / 8; ++j) {
            const float both[2] = {o[4 * j + 2 * r] * factor, o[4 * j + 2 * r + 1] * factor};
            const u32 to = own + j / 8 * OWN_PANEL + (line + 8 * r) * 128 + (j % 8 ^ line % 8) * 16 + lane % 4 * 4;
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(narrow(T(), both)) : "memory");
        }
    }
    store_fence();
    named_barrier(8 + group, 128);
    if (threadIdx.x % 128 == 0 && at.first + group * 64 < queries) {
        for (int panel = 0; panel < V_PANELS; ++panel)
            store(out, own + panel * OWN_PANEL, panel * 64, at.first + group * 64, at.head, at.batch);
        store_commit();
        store_wait_read<0>();
    }
}

__device__ __forceinline__ void work(Terms& terms, Softmax& softmax, float (&o)[RESULTS], float exponent, u32 own,
                                     u32 k_buffers, u32 v_buffers, Barriers& barriers, Ring& k_ring, Ring& v_ring) {
    const auto next_tile = [&] {
        barrier_wait(shared_address(barriers.k_full + k_ring.stage), k_ring.phase);
        return reread(barriers.tile[k_ring.stage]);
    };
    const auto k_taken = [&] {
        if (threadIdx.x % 128 == 0) barrier_arrive(shared_address(barriers.k_empty + k_ring.stage));
        k_ring.advance();
    };
    const auto add_values = [&](const u32 (&p)[KEYS_TILE / 16][4]) {
        barrier_wait(shared_address(barriers.v_full + v_ring.stage), v_ring.phase);
        multiply_values(o, p, v_buffers + v_ring.stage * V_STAGE);
    };
    const auto v_taken = [&] {
        if (threadIdx.x % 128 == 0) barrier_arrive(shared_address(barriers.v_empty + v_ring.stage));
        v_ring.advance();
    };

    u32 info = next_tile();
    if (info == END) return k_taken();
    float s[SCORES], factor[2];
    u32 p[KEYS_TILE / 16][4];
    wgmma_fence();
    multiply_keys(s, own, k_buffers + k_ring.stage * K_STAGE);
    terms.prepare(info, barriers.bits[k_ring.stage]);
    wgmma_wait<0>();
    settle(s);
    k_taken();
    terms.apply(s, info);
    softmax.take(s, exponent, factor);
    pack_weights(s, p);
    if (RETURNS) rescale(o, factor);
    if (PINGPONG && terms.group == GROUPS - 1) named_barrier_arrive(1, 256);
    for (;;) {
        info = next_tile();
        if (info == END) break;
        if (PINGPONG) named_barrier(1 + terms.group, 256);
        settle(o);
        wgmma_fence();
        multiply_keys(s, own, k_buffers + k_ring.stage * K_STAGE);
        add_values(p);
        if (PINGPONG) named_barrier_arrive(1 + (terms.group + 1) % GROUPS, 256);
        terms.prepare(info, barriers.bits[k_ring.stage]);
        wgmma_wait<1>();
        settle(s);
        k_taken();
        terms.apply(s, info);
        softmax.take(s, exponent, factor);
        wgmma_wait<0>();
        settle(o);
        v_taken();
        pack_weights(s, p);
        rescale(o, factor);
    }
    k_taken();
    if (PINGPONG && terms.group == 0) named_barrier(1, 256);
    settle(o);
    wgmma_fence();
    add_values(p);
    wgmma_wait<0>();
    settle(o);
    v_taken();
}

// ---- the kernel --------------------------------------------------------------------------------------------------

__device__ __forceinline__ void init(Barriers& barriers) {
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

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
attention_hopper(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                 const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap out, int queries, int keys,
                 int heads, int repeats, int batches, int causal, int together, float scale, float cap,
                 float masked_score, const char* mask, long long mask_batch, long long mask_head, long long mask_query,
                 const char* bias, long long bias_batch, long long bias_head, long long bias_query,
                 const unsigned char* flags, const u32* bits, int flags_batch, int flags_head) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 own = shared_address(shared);
    const u32 k_buffers = own + GROUPS * OWN, v_buffers = k_buffers + STAGES * K_STAGE;
    Barriers& barriers = *reinterpret_cast<Barriers*>(shared + GROUPS * OWN + STAGES * (K_STAGE + V_STAGE));
    if (threadIdx.x == 0) init(barriers);
    __syncthreads();

    const Shape shape = {queries, keys, heads, repeats, causal};
    const Place at = place_of(blockIdx.x, shape, batches, together);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int key_tiles = (keys + KEYS_TILE - 1) / KEYS_TILE, row_tiles = (queries + 63) / 64;
    const long long plane = ((long long)at.batch * flags_batch + at.head * flags_head) * row_tiles;
    const long long mask_plane = at.batch * mask_batch + at.head * mask_head;

    if (warp >= CONSUMERS / 32) {
        if constexpr (REBALANCED) give_registers<GROUPS == 2 ? 40 : 32>();
        if (warp > CONSUMERS / 32 || (lane && !ROW_MASK)) return;
        if (lane == 0) {
            const u32 barrier = shared_address(&barriers.queries);
            barrier_arrive_expect(barrier, GROUPS * K_PANELS * OWN_PANEL);
            for (int i = 0; i < GROUPS * K_PANELS; ++i)
                load(q, own + i / K_PANELS * OWN + i % K_PANELS * OWN_PANEL, barrier, i % K_PANELS * 64,
                     at.first + i / K_PANELS * 64, at.head, at.batch);
        }
        Feed copies = {k, v, at, k_buffers, barriers};
        const int tiles = tiles_of(shape, at.first);
        if constexpr (ROW_MASK) {
            RowMask rows = {reinterpret_cast<const MASK_T*>(mask) + mask_plane, keys, lane};
            feed(copies, rows, tiles, lane == 0);
        } else {
            const int row_tile = at.first / 64;
            Flags found = {flags + (plane + row_tile) * key_tiles, key_tiles, min(GROUPS, row_tiles - row_tile)};
            feed(copies, found, tiles, true);
        }
        return;
    }

    if constexpr (REBALANCED) take_registers<GROUPS == 2 ? 232 : 160>();
    const int group = warp / 4, first = at.first + group * 64, row = first + warp % 4 * 16 + lane / 4;
    const u32 own_queries = own + group * OWN;
    Terms terms;
    terms.group = group, terms.column = lane % 4 * 2, terms.keys = keys;
    terms.unlimited = CAUSAL ? min(keys, first + causal + 1) : keys;
    terms.scale = scale, terms.cap = cap, terms.cap_reciprocal = 1.0f / cap, terms.masked_score = masked_score;
    terms.mask = mask, terms.bias = bias;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int near = min(row + 8 * r, queries - 1);  // the last with a mask
        terms.limit[r] = CAUSAL ? min(keys, row + 8 * r + causal + 1) : keys;
        terms.mask_rows[r] = mask_plane + near * mask_query;
        terms.bias_rows[r] = at.batch * bias_batch + at.head * bias_head + near * bias_query;
    }
    terms.own_bits = bits + threadIdx.x % 128 + (plane + min(first / 64, row_tiles - 1)) * key_tiles * BIT_WORDS * 128;

    Ring k_ring, v_ring;
    Softmax softmax;
    float o[RESULTS];
#pragma unroll
    for (int i = 0; i < RESULTS; ++i) o[i] = 0.0f;
    const float exponent = RAW ? scale * LOG2_E : 1.0f;
    barrier_wait(shared_address(&barriers.queries), 0);
#pragma unroll 1
    for (int pass = 0; pass < 1 + RETURNS; ++pass) {
        work(terms, softmax, o, exponent, own_queries, k_buffers, v_buffers, barriers, k_ring, v_ring);
        if (!RETURNS || pass == 1) break;
        bool wanted = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) wanted |= row + 8 * r < queries && softmax.top[r] <= masked_score + 128.0f;
        if (__any_sync(0xffffffffu, wanted) && lane == 0) *const_cast<volatile u32*>(&barriers.wanted) = 1;
        if (lane == 0) barrier_arrive(shared_address(&barriers.vote));
        barrier_wait(shared_address(&barriers.vote), 0);
        if (!reread(barriers.wanted)) break;
    }
    write(out, at, own_queries, group, queries, o, softmax);
}
