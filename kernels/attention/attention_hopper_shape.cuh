// The constants of attention_hopper.cu, its shared memory and barriers, and the work of a block.
#pragma once
#include "hopper.cuh"

using namespace hopper;

constexpr int BLOCK_M = WARPGROUPS * 64;
constexpr int K_STEPS = (HEAD_DIM + 15) / 16;
constexpr int VALUE_COLUMNS = (HEAD_DIM_V + 15) / 16 * 16;
constexpr int SCORES = BLOCK_N / 2;         // of a thread
constexpr int RESULTS = VALUE_COLUMNS / 2;  // of a thread
constexpr int K_PANELS = (HEAD_DIM + 63) / 64;
constexpr int V_PANELS = (HEAD_DIM_V + 63) / 64;
constexpr int QO_PANELS = K_PANELS > V_PANELS ? K_PANELS : V_PANELS;  // of the queries, and later of the result
constexpr u32 PANEL = BLOCK_N * 128;  // bytes of 64 columns of a tile of keys or values
constexpr u32 QO_PANEL = 64 * 128;
constexpr u32 QO_BYTES = QO_PANELS * QO_PANEL;
constexpr u32 K_STAGE = K_PANELS * PANEL;
constexpr u32 V_STAGE = V_PANELS * PANEL;

constexpr bool BOOLEAN = MASK == 1;
constexpr bool ADDITIVE = MASK == 2;
constexpr bool ROW_MASK = MASK && !MASK_QUERY;                 // the same for all queries
constexpr bool TILES_DIFFER = CAUSAL || (MASK && MASK_QUERY);  // later rows are expected to see more keys

// The tensor cores add the products to the biases of the columns, which the producer writes beside the keys.
constexpr bool BIAS_FIRST = BIAS == 2 && SCALE_IN_EXPONENT && BIAS_KEY && !BIAS_QUERY;

constexpr int CONSUMERS = WARPGROUPS * 128;
// Whether the producer's warpgroup gives registers to the consumers.
constexpr bool REALLOCATES_REGISTERS = WARPGROUPS > 1 && BLOCKS_PER_SM == 1;
// Registers of a thread afterwards; all of them together are what the block begins with, an equal share for each
// thread.
constexpr int CONSUMER_REGISTERS = WARPGROUPS == 2 ? (ROW_MASK ? 224 : 232) : WARPGROUPS == 3 ? 160 : 112;
constexpr int PRODUCER_REGISTERS = WARPGROUPS == 2 ? (ROW_MASK ? 56 : 40) : 32;
constexpr int THREADS = CONSUMERS + (REALLOCATES_REGISTERS ? 128 : 32);
static_assert(!REALLOCATES_REGISTERS || WARPGROUPS * CONSUMER_REGISTERS + PRODUCER_REGISTERS ==
                                            65536 / THREADS / 8 * 8 * (WARPGROUPS + 1),
              "no thread waits for registers that do not exist");

constexpr int BIT_WORDS = ((ROW_MASK ? BLOCK_N : SCORES) + 31) / 32;  // a row's, or a thread's
constexpr int BIAS_WORDS = (BLOCK_N + 31) / 32;  // of a lane of the producer
constexpr int KINDS = 24;  // the bit of a stage's info at which the tile's kinds begin, 2 bits for each warpgroup
constexpr u32 EACH_GROUP = 0x55;
constexpr u32 END = (1u << KINDS) - 1;

struct Shape {
    int queries, keys, heads, repeats, causal;
};

struct WorkTile {
    int first, head, batch, key_head;
};

struct Barriers {
    u64 queries, vote, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    u32 tile[STAGES], bits[STAGES][ROW_MASK ? BIT_WORDS : 1];  // info and mask bits of a stage of keys
    u32 second_pass;  // 1: a warpgroup has voted for it
    alignas(8) float bias[BIAS_FIRST ? STAGES : 1][BIAS_FIRST ? BLOCK_N : 2];  // of the columns, in the scores' units
};

struct Ring {
    int stage = 0;
    u32 phase = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

__device__ __forceinline__ u32 reread(const u32& word) { return *const_cast<const volatile u32*>(&word); }

// The work of a block. Blocks begin in the order of their indices: `heads_in_l2` heads at a time, whose keys and values
// fit into L2; of these the rows with most keys first, if a diagonal or a mask makes them differ.
__device__ __forceinline__ WorkTile work_tile(u32 block, const Shape& shape, int batches, int heads_in_l2) {
    const int tiles = (shape.queries + BLOCK_M - 1) / BLOCK_M;
    const int all = shape.heads * batches;
    const int chunk = block / (u32(heads_in_l2) * tiles);
    const int rest = block - chunk * heads_in_l2 * tiles;
    const int width = min(heads_in_l2, all - chunk * heads_in_l2);
    const int row = rest / width, plane = chunk * heads_in_l2 + rest % width;
    const int head = plane % shape.heads;
    return {(TILES_DIFFER ? tiles - 1 - row : row) * BLOCK_M, head, plane / shape.heads, head / shape.repeats};
}
