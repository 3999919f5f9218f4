// The producer warp of attention_hopper.cu: selects and orders the tiles that matter, and copies them to shared memory.
#pragma once
#include "attention_hopper_shape.cuh"

// The kinds of a mask's tiles, from the flags of attention_blocks.cu, 2 bits per warpgroup. 0: all keys are hidden; 1:
// the mask adds numbers; 2: no key is hidden; 3: some keys are hidden. The lanes of the warp load the flags of 32 tiles
// at once.
struct Flags {
    const unsigned char* flags;  // flags of the block's first 64 rows
    int step;                    // distance to the flags of the next 64 rows
    int groups, lane;            // number of warpgroups that have rows; index of this lane
    int first;                   // the tile of lane 0; the other lanes have the tiles before it
    u32 found;

    __device__ __forceinline__ void ahead(int tile) {
        first = tile, found = 0;
#pragma unroll
        for (int g = 0; g < WARPGROUPS; ++g)
            if (g < groups && tile >= lane) found |= u32(flags[g * step + tile - lane]) << 2 * g;
    }
    __device__ __forceinline__ u32 kinds(int tile, u32 (&)[BIT_WORDS]) {
        if (first - tile == 32) ahead(tile);
        return __shfl_sync(0xffffffffu, found, first - tile);
    }
};

// The kinds (see Flags) and bits of the tiles of a mask that is the same for all queries, found from its elements.
struct RowMask {
    const Mask::Element* mask;
    int keys, lane;
    Pack<Mask::Element, 1> next[BIT_WORDS];

    __device__ __forceinline__ void ahead(int tile) {  // loads the next tile's mask elements while a tile is copied
#pragma unroll
        for (int w = 0; w < BIT_WORDS; ++w)
            next[w] = load_mask<1>(mask + max(0, min(tile * BLOCK_N + w * 32 + lane, keys - 1)) * Mask::KEY);
    }
    __device__ __forceinline__ u32 kinds(int tile, u32 (&bits)[BIT_WORDS]) {
        bool none = true, all = true, boolean = true;
#pragma unroll
        for (int w = 0; w < BIT_WORDS; ++w) {
            int found[1];
            mask_kinds(next[w], found);
            const bool inside = w * 32 + lane < BLOCK_N && tile * BLOCK_N + w * 32 + lane < keys;
            none &= !inside || found[0] == 0;
            all &= !inside || found[0] == 2;
            boolean &= !inside || found[0] != 1;
            bits[w] = __ballot_sync(0xffffffffu, found[0]);
        }
        ahead(tile - 1);
        none = __all_sync(0xffffffffu, none);
        all = __all_sync(0xffffffffu, all);
        boolean = __all_sync(0xffffffffu, boolean);
        return (none ? 0 : all ? 2 : boolean ? 3 : 1) * EACH_GROUP;
    }
};

// Loads the bias of a tile's columns and stores it to shared memory. The bias is the slope of the head, in the units of
// the scores, times the elements.
struct ColumnBias {
    const Bias::Element* elements;
    float slope;
    int keys, lane;

    __device__ __forceinline__ void load(int tile, float (&values)[BIAS_WORDS]) const {
#pragma unroll
        for (int w = 0; w < BIAS_WORDS; ++w) {
            float one[1];
            unpack(load_cached<1>(elements + min(tile * BLOCK_N + w * 32 + lane, keys - 1)), one);
            values[w] = slope * one[0];
        }
    }
    __device__ __forceinline__ void store(float* to, const float (&values)[BIAS_WORDS]) const {
#pragma unroll
        for (int w = 0; w < BIAS_WORDS; ++w)
            if (w * 32 + lane < BLOCK_N) *const_cast<volatile float*>(to + w * 32 + lane) = values[w];
    }
};

// Returns the number of tiles of keys that the block's rows see: under a causal mask, those up to the diagonal.
__device__ __forceinline__ int tiles_of(const Shape& shape, int first) {
    const int keys = shape.keys_of(min(first + BLOCK_M, shape.queries) - 1);
    return keys <= 0 ? 0 : (keys + BLOCK_N - 1) / BLOCK_N;
}

struct Producer {
    const TensorMap &k, &v;
    const WorkTile& at;
    u32 buffers;
    Barriers& barriers;
    const ColumnBias& bias;
    int first_tile;
    Ring k_ring, v_ring;
    // The tile whose values are copied next. Its keys have been copied, because consumers multiply a tile's keys before
    // they multiply the values of the previous tile.
    int pending = -1;

    // Writes the bias of a tile's columns with all lanes. Each lane then arrives at the stage's barrier k_full: the
    // leader in copy_keys, the others in this function.
    __device__ __forceinline__ void write_bias(u32 tile, bool leader) {
        if constexpr (BIAS_FIRST) {
            float values[BIAS_WORDS];
            if (tile != END) bias.load(tile, values);
            barrier_wait(shared_address(barriers.k_empty + k_ring.stage), k_ring.phase ^ 1);
            if (tile != END) bias.store(barriers.bias[k_ring.stage], values);
            if (leader) return;
            barrier_arrive(shared_address(barriers.k_full + k_ring.stage));
            k_ring.advance();
        }
    }

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
                load(k, buffers + k_ring.stage * K_STAGE + panel * K_PANEL, full, panel * COLUMNS,
                     (info & END) * BLOCK_N, at.key_head, at.batch);
        }
        k_ring.advance();
    }
    __device__ __forceinline__ void copy_values() {
        if (pending < 0) return;
        const u32 full = shared_address(barriers.v_full + v_ring.stage);
        barrier_wait(shared_address(barriers.v_empty + v_ring.stage), v_ring.phase ^ 1);
        barrier_arrive_expect(full, V_STAGE);
        const int key = pending * BLOCK_N;
        for (int panel = 0; panel < V_PANELS; ++panel)
            load(v, buffers + STAGES * K_STAGE + v_ring.stage * V_STAGE + panel * V_PANEL, full,
                 panel * COLUMNS + (TF32 ? key : 0), TF32 ? 0 : key, at.key_head, at.batch);
        v_ring.advance();
        pending = -1;
    }
};

// Copies those of the first `tiles` tiles that the mask does not hide entirely. If a row then needs a second pass,
// copies all of the first `all` tiles. `leader`: whether this lane issues the copies.
template <class Mask>
__device__ __forceinline__ void produce(Producer& producer, Mask& mask, int tiles, int all, bool leader) {
    u32 bits[BIT_WORDS] = {};
#pragma unroll 1
    for (int pass = 0; pass < 1 + SECOND_PASS; ++pass) {
        if (pass == 1) tiles = all;
        if (MASK) mask.ahead(tiles - 1);
#pragma unroll 1
        for (int tile = tiles - 1; tile >= producer.first_tile; --tile) {
            u32 kinds = 2 * EACH_GROUP;
            if (MASK) {
                kinds = mask.kinds(tile, bits);
                if (pass == 1) kinds = (BOOLEAN ? 3 : 1) * EACH_GROUP;
                if (kinds == 0) continue;
            }
            producer.write_bias(tile, leader);
            if (!leader) continue;
            producer.copy_keys(tile | kinds << KINDS, bits);
            producer.copy_values();
            producer.pending = tile;
        }
        producer.write_bias(END, leader);
        if (leader) {
            producer.copy_values();
            producer.copy_keys(END, bits);
        }
        if (!SECOND_PASS || pass == 1) break;
        barrier_wait(shared_address(&producer.barriers.vote), 0);
        if (!reread(producer.barriers.second_pass)) break;
    }
}
