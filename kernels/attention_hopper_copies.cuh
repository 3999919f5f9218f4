// The copying warp of attention_hopper.cu: which tiles matter, in which order, and their way into shared memory.
#pragma once
#include "attention_blocks.cuh"
#include "attention_hopper_shape.cuh"

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
