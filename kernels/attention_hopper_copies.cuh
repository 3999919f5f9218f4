// The copying warp of attention_hopper.cu: which tiles matter, in which order, and their way into shared memory.
#pragma once
#include "attention_blocks.cuh"
#include "attention_hopper_shape.cuh"

// What a mask leaves of a tile, as attention_blocks.cu has it: 2 bits for each warpgroup. The whole warp looks ahead.
struct Flags {
    const unsigned char* flags;  // of the first 64 rows
    int step;                    // to those of the next 64
    int groups, lane;            // with rows
    int first;                   // tile of lane 0; the others have those before it
    u32 found;

    __device__ __forceinline__ void ahead(int tile) {
        first = tile, found = 0;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
            if (g < groups && tile >= lane) found |= u32(flags[g * step + tile - lane]) << 2 * g;
    }
    __device__ __forceinline__ u32 kinds(int tile, u32 (&)[BIT_WORDS]) {
        if (first - tile == 32) ahead(tile);
        return __shfl_sync(0xffffffffu, found, first - tile);
    }
};

// The same from a mask that is the same for all queries, with its bits.
struct RowMask {
    const MASK_T* mask;
    int keys, lane;
    Pack<MASK_T, 1> next[BIT_WORDS];

    __device__ __forceinline__ void ahead(int tile) {  // a tile's elements are loaded while the one before is copied
#pragma unroll
        for (int w = 0; w < BIT_WORDS; ++w)
            next[w] = load_mask<1>(mask + max(0, min(tile * KEYS_TILE + w * 32 + lane, keys - 1)) * MASK_KEY);
    }
    __device__ __forceinline__ u32 kinds(int tile, u32 (&bits)[BIT_WORDS]) {
        bool none = true, all = true, plain = true;
#pragma unroll
        for (int w = 0; w < BIT_WORDS; ++w) {
            int found[1];
            mask_kinds(next[w], found);
            const bool inside = w * 32 + lane < KEYS_TILE && tile * KEYS_TILE + w * 32 + lane < keys;
            none &= !inside || found[0] == 0;
            all &= !inside || found[0] == 2;
            plain &= !inside || found[0] != 1;
            bits[w] = __ballot_sync(0xffffffffu, found[0]);
        }
        ahead(tile - 1);
        none = __all_sync(0xffffffffu, none);
        all = __all_sync(0xffffffffu, all);
        plain = __all_sync(0xffffffffu, plain);
        return (none ? 0 : all ? 2 : plain ? 3 : 1) * EACH_GROUP;
    }
};

// Of the block's rows on this side of the diagonal.
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
        if (MASK) barriers.tile[k_ring.stage] = info;
        if (ROW_MASK)
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

// Copies what counts of the first `tiles` tiles, and then, if a row wants it, all of `all`.
template <class Mask>
__device__ __forceinline__ void feed(Feed& feed, Mask& mask, int tiles, int all, bool leader) {
    u32 bits[BIT_WORDS] = {};
#pragma unroll 1
    for (int pass = 0; pass < 1 + RETURNS; ++pass) {
        if (pass == 1) tiles = all;
        if (MASK) mask.ahead(tiles - 1);
#pragma unroll 1
        for (int tile = tiles - 1; tile >= 0; --tile) {
            u32 kinds = 2 * EACH_GROUP;
            if (MASK) {
                kinds = mask.kinds(tile, bits);
                if (pass == 1) kinds = (BOOLEAN ? 3 : 1) * EACH_GROUP;
                if (kinds == 0 || !leader) continue;
            }
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
