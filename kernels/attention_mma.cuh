// Flash attention with mma.sync: softmax online over tiles of keys (Dao 2023, arXiv:2307.08691); scores, sums in fp32.
//
// A row is one query of one head. The GROUP query heads that share keys and values have their rows together, row
// r being query r / GROUP of head r % GROUP, so that a tile of keys is loaded once for all of them. A block has
// WARPS_M * MT * 16 rows; a warp has MT * 16 of them and one WARPS_N-th of the keys of every tile. Scores are in
// units of log2(e), so that probabilities are powers of two.
//
// The host says (all compile-time; lengths and strides are arguments):
//   T, OUT_T                       element types of q, k and v, and of the result
//   SIZE, VALUE_SIZE, GROUP        elements of a head of q and k, and of v; query heads that share a key head
//   PRODUCT                        HALF: m16n8k16 of fp16 or bf16; TF32: m16n8k8; FP32: FFMA, for exactness and sm_75
//   MT, WARPS_M, WARPS_N, BLOCK_K, STAGES, MIN_BLOCKS   tiling
//   Q_KEPT                         queries stay in registers
//   ACCESS                         bytes of an access to q, k and v: 16 unless rows or addresses are less aligned
//   OUT_ACCESS                     elements of an access to the result
//   MASK, MASK_T, MASK_ROWS, MASK_PAIRS   kind; storage; whether rows differ; whether two keys are one access
//   BIAS, BIAS_T, BIAS_ROWS, BIAS_PAIRS   likewise
//   CAUSAL, ADDED, SOFTCAP, ZERO_ROWS   as in _attention.py
//   RETURNS, WANTED                tiles behind the diagonal are left out unless a row has no score above WANTED
//   RAW                            scores are scaled where they are exponentiated: the scale is positive, and nothing
//                                  but -inf takes the place of a score
#pragma once

#include "attention_mma_scores.cuh"

// Whether whole tiles have code of their own; the exact products of large heads have no registers for it.
constexpr bool UNDIVIDED = PRODUCT != FP32 || PV_SIZE <= 128;

template <bool PART>
__device__ __forceinline__ void take_tile(Warp& warp, Scores& scores, u32 q_tile, u32 k_tile, int tile, int live) {
    float s[MT][KEY_TILES][4];
    scores.fetch(tile, warp);
    warp.scores<PART>(s, q_tile, k_tile, live);
    scores.finish(s, tile, warp);
    warp.softmax(s, scores.p.scale);
    warp.values<PART>(s, k_tile + K_BYTES, live);
}

// All keys of `tiles`, which are Tiles or come as these do, for the rows of a block; shared memory is free afterwards.
template <class Source>
__device__ __forceinline__ void attend(Warp& warp, const Source& tiles) {
    const u32 q_tile = shared_base(), stages = q_tile + Q_BYTES;
    if constexpr (SIZE < QK_SIZE) {
        clear_columns<K_ROW>(q_tile, ROWS, SIZE, QK_SIZE);
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage)
            clear_columns<K_ROW>(stages + stage * STAGE, BLOCK_K, SIZE, QK_SIZE);
    }
    tiles.load_queries(q_tile);
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) tiles.load(tiles.begin + stage);
    Scores scores(tiles.p, tiles.at, warp);
#pragma unroll 1
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
        wait_copies<STAGES - 2>();
        __syncthreads();  // this tile is there, and nobody reads the one before it
        if (Q_KEPT && tile == tiles.begin) warp.keep_queries(q_tile);
        tiles.load(tile + STAGES - 1);
        tiles.landed(tile);
        const int live = scores.live(tile, warp);
        if (UNDIVIDED && live >= SIXTEENS)
            take_tile<false>(warp, scores, q_tile, tiles.stage(tile), tile, live);
        else if (live > 0)
            take_tile<true>(warp, scores, q_tile, tiles.stage(tile), tile, live);
    }
    warp.finish(tiles.p.scale);
    wait_copies<0>();
    __syncthreads();
}
