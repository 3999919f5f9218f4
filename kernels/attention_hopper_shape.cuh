// Names of what attention_hopper.cu is compiled with, and where a block works: for its other files.
#pragma once
#include "hopper.cuh"

using namespace hopper;

constexpr int ROWS = GROUPS * 64;
constexpr int K_STEPS = (SIZE + 15) / 16;
constexpr int VALUE_COLUMNS = (VALUE_SIZE + 15) / 16 * 16;
constexpr int SCORES = KEYS_TILE / 2;       // of a thread
constexpr int RESULTS = VALUE_COLUMNS / 2;  // of a thread
constexpr int K_PANELS = (SIZE + 63) / 64;
constexpr int V_PANELS = (VALUE_SIZE + 63) / 64;
constexpr int OWN_PANELS = K_PANELS > V_PANELS ? K_PANELS : V_PANELS;  // queries, and then the result
constexpr u32 PANEL = KEYS_TILE * 128;                                 // bytes of 64 columns of a tile
constexpr u32 OWN_PANEL = 64 * 128;
constexpr u32 OWN = OWN_PANELS * OWN_PANEL;
constexpr u32 K_STAGE = K_PANELS * PANEL;
constexpr u32 V_STAGE = V_PANELS * PANEL;

constexpr bool BOOLEAN = MASK == 1;
constexpr bool ADDITIVE = MASK == 2;
constexpr bool ROW_MASK = MASK && !MASK_QUERY;          // the same for all queries
constexpr bool UNEVEN = CAUSAL || (MASK && MASK_QUERY);  // later rows are expected to see more keys

constexpr int CONSUMERS = GROUPS * 128;
constexpr bool REBALANCED = GROUPS > 1 && BLOCKS == 1;  // registers go from the copying warpgroup to the others
// Taken and given: together what the block begins with, an equal share for each thread.
constexpr int OWN_REGISTERS = GROUPS == 2 ? (ROW_MASK ? 224 : 232) : GROUPS == 3 ? 160 : 112;
constexpr int COPY_REGISTERS = GROUPS == 2 ? (ROW_MASK ? 56 : 40) : 32;
constexpr int THREADS = CONSUMERS + (REBALANCED ? 128 : 32);
static_assert(!REBALANCED || GROUPS * OWN_REGISTERS + COPY_REGISTERS == 65536 / THREADS / 8 * 8 * (GROUPS + 1),
              "nobody waits for registers that there are not");

constexpr int BIT_WORDS = ((ROW_MASK ? KEYS_TILE : SCORES) + 31) / 32;  // a row's, or a thread's
constexpr bool RETURNS = FINITE;          // what was left out may count after all
constexpr int KINDS = 24;                 // where a tile's kinds begin, above its number: 2 bits for each warpgroup
constexpr u32 EACH_GROUP = 0x55;
constexpr u32 END = (1u << KINDS) - 1;

struct Shape {
    int queries, keys, heads, repeats, causal;
};

struct Place {
    int first, head, batch, key_head;
};

struct Barriers {
    u64 queries, vote, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    u32 tile[STAGES], bits[STAGES][ROW_MASK ? BIT_WORDS : 1];  // of a stage of keys
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
// longest rows first, where a diagonal or a mask makes them differ.
__device__ __forceinline__ Place place_of(u32 block, const Shape& shape, int batches, int together) {
    const int tiles = (shape.queries + ROWS - 1) / ROWS;
    const int all = shape.heads * batches;
    const int chunk = block / (u32(together) * tiles);
    const int rest = block - chunk * together * tiles;
    const int width = min(together, all - chunk * together);
    const int row = rest / width, plane = chunk * together + rest % width;
    const int head = plane % shape.heads;
    return {(UNEVEN ? tiles - 1 - row : row) * ROWS, head, plane / shape.heads, head / shape.repeats};
}
