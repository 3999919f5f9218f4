// out = softmax(mask(cap(scale q k^T) + bias)) v on Hopper, as kernels/_attention.py defines it, for fp16 and bf16.
//
// A block works on GROUPS x 64 queries of one head, each of its first GROUPS warpgroups on 64. One more warp feeds
// them: it decides which tiles of keys matter, and copies them, the last one first. Under a mask each stage of keys
// carries the number of its tile and what is to be masked in it, so that the warpgroups just take what comes until END;
// without one no tile is left out, and they count. While the tensor cores multiply a tile's weights by its values, the
// next tile's softmax runs; and with PINGPONG the warpgroups issue their products in turns, so that one's softmax runs
// beside the other's products: 651 against 514 TFLOP/s on an H200 (two groups, head size 128, 8192 keys).
//
// Scores: with RAW they are in units of q k^T, and scale goes into the exponent: what a mask adds is divided by it.
// Otherwise, with a bias or a cap, they are in natural units.
//
// Masks: attention_blocks.cu has found what a mask leaves of each tile; what a mask that is the same for all queries
// leaves, the copying warp finds itself. Tiles of which nothing is left are skipped; a mask's elements are read only
// where they change scores that count. Where what a mask leaves out is finite, a row without a score above `wanted`
// may need it nevertheless: then the whole block begins again, with all tiles, also, if ADDED, behind the diagonal.
#include "attention_hopper_copies.cuh"
#include "attention_hopper_scores.cuh"

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

// The first `tiles` tiles, or what comes of them. Registers of products under way stay as they are until wgmma_wait.
//
// One thread's wait for a product tells that its keys are read, and k_taken says so. What came with the keys each warp
// reads for itself, and each says that it has: the last one with k_taken, the others at once. A warp's last thread does
// that, because racecheck remembers it alone of those that read a word, and sees no order through __syncwarp.
__device__ __forceinline__ void work(Terms& terms, Softmax& softmax, float (&o)[RESULTS], float exponent, int tiles,
                                     u32 own, u32 k_buffers, u32 v_buffers, Barriers& barriers, Ring& k_ring,
                                     Ring& v_ring) {
    const auto next_tile = [&]() -> u32 {
        barrier_wait(shared_address(barriers.k_full + k_ring.stage), k_ring.phase);
        if (!MASK) return --tiles < 0 ? END : tiles;
        const u32 info = reread(barriers.tile[k_ring.stage]);
        terms.read_row(barriers.bits[k_ring.stage]);
        __syncwarp();
        const bool tells = threadIdx.x % 32 == 31 && threadIdx.x % 128 < 96;
        if (tells) barrier_arrive(shared_address(barriers.k_empty + k_ring.stage));
        return info;
    };
    const auto k_taken = [&] {
        if (threadIdx.x % 128 == 127) barrier_arrive(shared_address(barriers.k_empty + k_ring.stage));
        k_ring.advance();
    };
    const auto add_values = [&](const u32 (&p)[KEYS_TILE / 16][4]) {
        barrier_wait(shared_address(barriers.v_full + v_ring.stage), v_ring.phase);
        multiply_values(o, p, v_buffers + v_ring.stage * V_STAGE);
    };
    const auto v_taken = [&] {
        if (threadIdx.x % 128 == 127) barrier_arrive(shared_address(barriers.v_empty + v_ring.stage));
        v_ring.advance();
    };

    u32 info = next_tile();
    if (info == END) return k_taken();
    float s[SCORES], factor[2];
    u32 p[KEYS_TILE / 16][4];
    wgmma_fence();
    multiply_keys(s, own, k_buffers + k_ring.stage * K_STAGE);
    terms.prepare(info);
    wgmma_wait<0>();
    settle(s);
    k_taken();
    terms.apply(s, info);
    softmax.take(s, exponent, factor);
    pack_weights(s, p);
    if (PINGPONG && terms.group == GROUPS - 1) named_barrier_arrive(1, 256);
    info = next_tile();
    while (info != END) {
        if (PINGPONG) named_barrier(1 + terms.group, 256);
        settle(o);
        wgmma_fence();
        multiply_keys(s, own, k_buffers + k_ring.stage * K_STAGE);
        add_values(p);
        if (PINGPONG) named_barrier_arrive(1 + (terms.group + 1) % GROUPS, 256);
        terms.prepare(info);
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
        info = next_tile();
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
        barrier_init(shared_address(barriers.k_empty + stage), GROUPS * (MASK ? 4 : 1));
        barrier_init(shared_address(barriers.v_empty + stage), GROUPS);
    }
    barriers.wanted = 0;
    barrier_init_fence();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
attention_hopper(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                 const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap out, int queries, int keys,
                 int heads, int repeats, int batches, int causal, int together, float scale, float cap,
                 float masked_score, float unit, float lowest, float wanted, const MASK_T* mask, long long mask_batch,
                 long long mask_head, long long mask_query, const BIAS_T* bias, long long bias_batch,
                 long long bias_head, long long bias_query,
                 const unsigned char* flags, const u32* bits, int flags_batch, int flags_head) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 own = shared_address(shared);
    const u32 k_buffers = own + GROUPS * OWN, v_buffers = k_buffers + STAGES * K_STAGE;
    Barriers& barriers = *reinterpret_cast<Barriers*>(shared + GROUPS * OWN + STAGES * (K_STAGE + V_STAGE));
    if (threadIdx.x == 0) init(barriers);
    __syncthreads();
    wait_for_predecessor();
    release_successor();

    const Shape shape = {queries, keys, heads, repeats, causal};
    const Place at = place_of(blockIdx.x, shape, batches, together);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int key_tiles = (keys + KEYS_TILE - 1) / KEYS_TILE, row_tiles = (queries + 63) / 64;
    const int tiles = tiles_of(shape, at.first), all = ADDED ? key_tiles : tiles;
    const int plane = (at.batch * flags_batch + at.head * flags_head) * row_tiles;
    const long long mask_plane = at.batch * mask_batch + at.head * mask_head;

    if (warp >= CONSUMERS / 32) {
        if constexpr (REBALANCED) give_registers<COPY_REGISTERS>();
        if (warp > CONSUMERS / 32 || (lane && !MASK)) return;
        if (lane == 0) {
            const u32 barrier = shared_address(&barriers.queries);
            barrier_arrive_expect(barrier, GROUPS * K_PANELS * OWN_PANEL);
            for (int i = 0; i < GROUPS * K_PANELS; ++i)
                load(q, own + i / K_PANELS * OWN + i % K_PANELS * OWN_PANEL, barrier, i % K_PANELS * 64,
                     at.first + i / K_PANELS * 64, at.head, at.batch);
        }
        Feed copies = {k, v, at, k_buffers, barriers};
        if constexpr (ROW_MASK) {
            RowMask rows = {mask + mask_plane, keys, lane};
            feed(copies, rows, tiles, all, lane == 0);
        } else {
            const int row_tile = at.first / 64;
            const unsigned char* const from = flags + (long long)(plane + row_tile) * key_tiles;
            Flags found = {from, key_tiles, min(GROUPS, row_tiles - row_tile), lane};
            feed(copies, found, tiles, all, lane == 0);
        }
        return;
    }

    if constexpr (REBALANCED) take_registers<OWN_REGISTERS>();
    const int group = warp / 4, first = at.first + group * 64, row = first + warp % 4 * 16 + lane / 4;
    const u32 own_queries = own + group * OWN;
    Terms terms;
    terms.group = group, terms.column = lane % 4 * 2, terms.keys = keys;
    terms.unlimited = CAUSAL ? min(keys, first + causal + 1) : keys;
    terms.scale = scale, terms.cap = cap, terms.cap_reciprocal = 1.0f / cap;
    terms.masked = minus_infinity(), terms.unit = unit, terms.lowest = lowest;
#pragma unroll
    for (int r = 0; r < 2; ++r) terms.limit[r] = CAUSAL ? min(keys, row + 8 * r + causal + 1) : keys;
    const int near = min(row, queries - 1), next = min(row + 8, queries - 1) - near;  // rows that masks have
    terms.mask = mask + mask_plane + near * mask_query, terms.next_mask = next * int(mask_query);
    terms.bias = bias + at.batch * bias_batch + at.head * bias_head + near * bias_query;
    terms.next_bias = next * int(bias_query);
    terms.bits_from = bits, terms.own_tiles = (plane + min(first / 64, row_tiles - 1)) * key_tiles;

    Ring k_ring, v_ring;
    Softmax softmax;
    float o[RESULTS];
    const float exponent = RAW ? scale * LOG2_E : 1.0f;
    barrier_wait(shared_address(&barriers.queries), 0);
#pragma unroll 1
    for (int pass = 0; pass < 1 + RETURNS; ++pass) {
        softmax = Softmax();
#pragma unroll
        for (int i = 0; i < RESULTS; ++i) o[i] = 0.0f;
        work(terms, softmax, o, exponent, pass == 0 ? tiles : all, own_queries, k_buffers, v_buffers, barriers, k_ring,
             v_ring);
        if (!RETURNS || pass == 1) break;
        bool found = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) found |= row + 8 * r < queries && softmax.top[r] <= wanted;
        if (__any_sync(0xffffffffu, found) && lane == 0) *const_cast<volatile u32*>(&barriers.wanted) = 1;
        if (lane == 0) barrier_arrive(shared_address(&barriers.vote));
        barrier_wait(shared_address(&barriers.vote), 0);
        if (!reread(barriers.wanted)) break;
        terms.masked = masked_score;
    }
    write(out, at, own_queries, group, queries, o, softmax);
}
