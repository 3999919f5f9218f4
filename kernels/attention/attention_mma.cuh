// Flash attention by mma.sync: softmax online over tiles of keys (Dao 2023, arXiv:2307.08691), scores and sums in fp32.
//
// Rows. A row is one query of one head. The GQA_GROUP query heads that share keys and values have their rows together
// (row r is query r / GQA_GROUP of head r % GQA_GROUP), so that a tile of keys is loaded once for all of them. A block
// has WARPS_M * M_TILES * 16 rows; a warp has M_TILES * 16 of them, and one WARPS_N-th of the keys of every tile.
//
// One step of the loop, which all threads run for a tile of BLOCK_N keys and values:
//   1. Wait for the tile's copies (cp.async), and for all warps to have read the tile before it; start the copies of
//      the tile STAGES - 1 ahead (attention_mma_tiles.cuh).
//   2. Scores s = q k^T by mma (attention_mma_warp.cuh); the elements of mask and bias are loaded meanwhile.
//   3. Softcap, bias, mask, causal limits (attention_mma_scores.cuh).
//   4. Online softmax, then o += p v, with p in the registers in which step 2 left the scores.
// Scores are multiplied by log2(e), so that probabilities are powers of two.
//
// Macros (compile-time constants; lengths and strides are arguments):
//   T, OUT_T                       element types of q, k and v, and of the result
//   HEAD_DIM, HEAD_DIM_V           elements of a head of q and k, and of v
//   GQA_GROUP                      query heads that share a key head
//   MATH_KIND                      HALF: m16n8k16 of fp16 or bf16; TF32: m16n8k8; FP32: FFMA, for exactness and sm_75
//   M_TILES, WARPS_M, WARPS_N, BLOCK_N, STAGES    as above
//   MIN_BLOCKS                     blocks that must fit on a multiprocessor
//   Q_IN_REGISTERS                 1: queries stay in registers
//   ACCESS_BYTES                   bytes of an access to q, k and v: 16 unless rows or addresses are less aligned
//   OUT_WIDTH                      elements of an access to the result
//   MASK                           kind of mask (an enum in attention_mma_tiles.cuh)
//   BIAS                           1: there is a bias; 2: the bias of a head is its slope, of type SLOPE_T, times the
//                                  elements
//   MASK_T, BIAS_T                 element types
//   MASK_BY_ROW, BIAS_BY_ROW       1: the rows of a block read different elements
//   MASK_PAIRS, BIAS_PAIRS         1: one access can read two keys; the macro can be an expression of the Problem `p`
//   CAUSAL                         1: a query sees no key after its diagonal
//   SOFTCAP                        1: scores are capped softly (softcapped())
//   ADD_MASKED_SCORE               1: the masked score is added to scores instead of replacing them
//   LENGTHS                        1: each batch element has a length of its own
//   WINDOW                         1: a query sees only the last `window` keys of those up to the diagonal
//   SINKS                          1: each row has one more score, its head's sink (SINK_T), for values of zeros
//   ZERO_MASKED_ROWS               1: result rows for which no key counts are 0; 0: they are NaN
//   SECOND_PASS, SECOND_PASS_BELOW see attention_mma.cu
//   RELATIVE                       1: scores of relative positions are added (attention_mma_relative.cuh), whose indices
//                                  are of type INDEX_T; if not defined, none are
//   QUANTIZED                      1, 2: keys and values are bytes (quantized_cache.cuh); if not defined, they are T
//   SCALE_IN_EXPONENT              1: scores are scaled when they are exponentiated; the scale must then be positive,
//                                  and only -inf can replace a score
#pragma once

#include "attention_mma_scores.cuh"

// Whether there is separate code, without branches, for tiles in which each group of sixteen keys is visible to some
// row. For FP32 products of large heads, registers do not suffice for this code.
constexpr bool HAS_WHOLE_TILE_CODE = MATH_KIND != FP32 || PV_SIZE <= 128;

template <bool PART>
__device__ __forceinline__ void take_tile(WarpState& warp, Scores& scores, u32 q_tile, u32 k_tile, int tile, int live) {
    float s[M_TILES][KEY_TILES][4];
    scores.fetch(tile, warp);
    warp.scores<PART>(s, q_tile, k_tile, live);
    scores.finish(s, tile, warp);
    warp.softmax(s, scores.p.scale);
    warp.values<PART>(s, k_tile + K_BYTES, live);
}

// Runs the loop over `tiles` (a Tiles, or a class with the same members) for the rows of a block; shared memory is free
// afterwards.
template <class Source>
__device__ __forceinline__ void attend(WarpState& warp, const Source& tiles) {
    const u32 q_tile = shared_base(), stages = q_tile + Q_BYTES;
    if constexpr (HEAD_DIM < QK_SIZE) {
        clear_columns<Q_ROW>(q_tile, BLOCK_M, HEAD_DIM, QK_SIZE);
        if constexpr (!IS_QUANTIZED) {  // all bytes of a quantized cache are finite, and are multiplied by these zeros
#pragma unroll
            for (int stage = 0; stage < STAGES; ++stage)
                clear_columns<K_ROW>(stages + stage * STAGE, BLOCK_N, HEAD_DIM, QK_SIZE);
        }
    }
    tiles.load_queries(q_tile);
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) tiles.load(tiles.begin + stage);
    tiles.prepare_queries(q_tile);
    Scores scores(tiles.p, tiles.at, warp);
#if RELATIVE
    scores.relative.begin(tiles.begin);
#endif
#pragma unroll 1
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
        wait_copies<STAGES - 2>();
        __syncthreads();  // afterwards the tile has arrived, and all warps have read the previous tile
        if (Q_IN_REGISTERS && tile == tiles.begin) warp.keep_queries(q_tile);
        tiles.load(tile + STAGES - 1);
        tiles.landed(tile);
#if RELATIVE
        scores.relative.compute(tile, warp, q_tile, tiles.stage(tile));
#endif
        const int live = scores.live(tile, warp);
        if (HAS_WHOLE_TILE_CODE && live >= SIXTEENS)
            take_tile<false>(warp, scores, q_tile, tiles.stage(tile), tile, live);
        else if (live > 0) take_tile<true>(warp, scores, q_tile, tiles.stage(tile), tile, live);
    }
    warp.finish(tiles.p.scale);
    wait_copies<0>();
    __syncthreads();
}
