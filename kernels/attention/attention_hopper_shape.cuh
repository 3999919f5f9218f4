// The constants and parameters of attention_hopper.cu, its shared memory and barriers, and the work of a block.
#pragma once
#include "attention_blocks.cuh"
#include "hopper.cuh"

using namespace hopper;

constexpr int BLOCK_M = WARPGROUPS * 64;
constexpr bool TF32 = sizeof(T) == 4;     // fp32 operands, which TMA rounds to TF32
constexpr int COLUMNS = 128 / sizeof(T);  // of a panel
constexpr int K_STEP = 32 / sizeof(T);    // elements along k that a wgmma multiplies
constexpr int K_STEPS = (HEAD_DIM + K_STEP - 1) / K_STEP;
constexpr int VALUE_COLUMNS = (HEAD_DIM_V + 15) / 16 * 16;
constexpr int SCORES = BLOCK_N / 2;         // scores per thread
constexpr int RESULTS = VALUE_COLUMNS / 2;  // elements of the result per thread
constexpr int K_PANELS = (HEAD_DIM + COLUMNS - 1) / COLUMNS;
constexpr int O_PANELS = (HEAD_DIM_V + COLUMNS - 1) / COLUMNS;
constexpr int QO_PANELS = K_PANELS > O_PANELS ? K_PANELS : O_PANELS;  // panels of the queries, and later of the result
// Panels of a tile of values. With TF32, values are transposed: the columns of a panel are keys.
constexpr int V_PANELS = TF32 ? BLOCK_N / COLUMNS : O_PANELS;
constexpr u32 K_PANEL = BLOCK_N * 128, V_PANEL = TF32 ? VALUE_COLUMNS * 128 : K_PANEL;  // bytes of a panel
constexpr u32 QO_PANEL = 64 * 128;
constexpr u32 QO_BYTES = QO_PANELS * QO_PANEL;
constexpr u32 K_STAGE = K_PANELS * K_PANEL;
constexpr u32 V_STAGE = V_PANELS * V_PANEL;
static_assert(BLOCK_N % COLUMNS == 0 || !TF32, "a tile of transposed values consists of whole panels");

// ---- parameters: structs whose fields hopper.py writes in this order ----------------------------------------------

struct Shape {
    int queries, keys, heads;
    int repeats;  // query heads per key head
    int batches;
    int causal;       // query i sees the keys up to i + causal
    int window;       // with WINDOW, the number of keys that a query sees, up to the diagonal
    int heads_in_l2;  // heads whose blocks begin together: see work_tile

    __device__ __forceinline__ int keys_of(int query) const { return CAUSAL ? min(keys, query + causal + 1) : keys; }

    // Returns the first tile of keys that any row of a block or warpgroup sees, whose first row is `first`.
    __device__ __forceinline__ int first_tile(int first) const {
        return WINDOW ? max(0, keys_of(first) - window) / BLOCK_N : 0;
    }

    // Returns the shape of one batch element: with LENGTHS, it has the first lengths[batch] + 1 of the keys.
    __device__ __forceinline__ Shape of_batch(const int* lengths, int batch) const {
        Shape own = *this;
        if constexpr (LENGTHS) {
            own.keys = max(0, min(keys - 1, lengths[batch]) + 1);
            own.causal = max(0, own.keys - queries);
        }
        return own;
    }
};

// Constants of the scores. All but `scale` are in the scores' units: natural units or, with SCALE_IN_EXPONENT, those of
// q k^T. The first two, which every mask element needs, are loaded together.
struct alignas(8) ScoreUnits {
    float unit;    // 1 natural unit, expressed in the scores' units
    float lowest;  // the lowest finite score
    float scale;
    // For the second pass: the score of masked keys or, with ADD_MASKED_SCORE, a number that is added to their scores.
    float masked;
    float second_pass_below;
};

// A mask or a bias. KEY, QUERY: whether its elements differ along keys and along queries. PAIRS: whether one access
// reads two neighbouring keys: 0 no, 1 yes, 2 if all strides and the number of keys are even.
template <class E, int KEY_STRIDE, bool QUERY_DIFFERS, int READS_PAIRS>
struct ScoreOperand : ScoreTensor<E> {
    using Element = E;
    static constexpr int KEY = KEY_STRIDE, PAIRS = READS_PAIRS;
    static constexpr bool QUERY = QUERY_DIFFERS;
};
using Mask = ScoreOperand<MASK_T, MASK_KEY, MASK_QUERY, MASK_PAIRS>;
using Bias = ScoreOperand<BIAS_T, BIAS_KEY, BIAS_QUERY, BIAS_PAIRS>;

// The output of attention_blocks.cu for a mask that differs along queries.
struct MaskTiles {
    const unsigned char* flags;
    const u32* bits;
    int batch, head;  // strides in planes; a plane is all tiles of a head. 0 along an axis that broadcasts
};

// ---- constants that follow from the macros ------------------------------------------------------------------------

constexpr bool BOOLEAN = MASK == 1;
constexpr bool ADDITIVE = MASK == 2;
constexpr bool ROW_MASK = MASK && !Mask::QUERY;                 // the mask is the same for all queries
constexpr bool TILES_DIFFER = CAUSAL || (MASK && Mask::QUERY);  // later rows probably see more keys than earlier rows

// The producer writes the columns' biases to shared memory, and the tensor cores add the products to these biases.
constexpr bool BIAS_FIRST = BIAS == 2 && SCALE_IN_EXPONENT && Bias::KEY && !Bias::QUERY;

// The threads of a block and their registers.
struct BlockThreads {
    int consumers, all;
    bool reallocate;                             // the producer's warpgroup gives registers to the consumers
    int consumer_registers, producer_registers;  // registers per thread after reallocation

    // Returns whether the threads have exactly as many registers after reallocation as the block begins with: an equal
    // share of the multiprocessor's registers for each thread.
    constexpr bool have_registers() const {
        return !reallocate || consumers * consumer_registers + 128 * producer_registers == 65536 / all / 8 * 8 * all;
    }
};
constexpr BlockThreads block_threads(int warpgroups, bool reallocate, bool row_mask) {
    const int consumers = warpgroups * 128, all = consumers + (reallocate ? 128 : 32);
    if (warpgroups == 2) return {consumers, all, reallocate, row_mask ? 224 : 232, row_mask ? 56 : 40};
    return {consumers, all, reallocate, warpgroups == 3 ? 160 : 112, 32};
}
constexpr BlockThreads BLOCK = block_threads(WARPGROUPS, WARPGROUPS > 1 && BLOCKS_PER_SM == 1, ROW_MASK);
static_assert(BLOCK.have_registers(), "no thread waits for registers that do not exist");

// Words of mask bits: of a tile if ROW_MASK, else of a thread.
constexpr int BIT_WORDS = ((ROW_MASK ? BLOCK_N : SCORES) + 31) / 32;
constexpr int BIAS_WORDS = (BLOCK_N + 31) / 32;  // number of columns of a tile whose bias a lane of the producer loads
// A stage's info is one word: the number of its tile in the bits below bit KINDS, and from this bit on 2 bits for each
// warpgroup, the kind of the tile for the warpgroup's rows.
constexpr int KINDS = 24;
constexpr u32 EACH_GROUP = 0x55;
constexpr u32 END = (1u << KINDS) - 1;

struct WorkTile { int first, head, batch, key_head; };

struct Barriers {
    u64 queries, vote, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    u32 tile[STAGES], bits[STAGES][ROW_MASK ? BIT_WORDS : 1];                  // per stage: info (see KINDS), mask bits
    u32 second_pass;                                                           // 1: a warpgroup voted for a second pass
    alignas(8) float bias[BIAS_FIRST ? STAGES : 1][BIAS_FIRST ? BLOCK_N : 2];  // one per column, in the scores' units
};

struct Ring {
    int stage = 0;
    u32 phase = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

__device__ __forceinline__ u32 reread(const u32& word) { return *const_cast<const volatile u32*>(&word); }

// Returns the work of a block. Blocks start in the order of their indices: `heads_in_l2` heads at a time, whose keys
// and values fit into L2. Among the blocks of these heads, those with the most keys start first, if a diagonal or a
// mask makes their numbers of keys differ.
__device__ __forceinline__ WorkTile work_tile(u32 block, const Shape& shape) {
    const int tiles = (shape.queries + BLOCK_M - 1) / BLOCK_M;
    const int all = shape.heads * shape.batches;
    const int chunk = block / (u32(shape.heads_in_l2) * tiles);
    const int rest = block - chunk * shape.heads_in_l2 * tiles;
    const int width = min(shape.heads_in_l2, all - chunk * shape.heads_in_l2);
    const int row = rest / width, plane = chunk * shape.heads_in_l2 + rest % width;
    const int head = plane % shape.heads;
    return {(TILES_DIFFER ? tiles - 1 - row : row) * BLOCK_M, head, plane / shape.heads, head / shape.repeats};
}
