// Attention by mma.sync in one launch: each block multiplies its tile of rows by all keys; see attention_mma.cuh.
//
// If WARPS_N > 1, warps of a block share the keys of each tile, and combine their results in shared memory. Such
// sharing is for short sequences, whose rows are too few to occupy the GPU otherwise.
//
// SECOND_PASS is for causal masks whose masked scores are finite. A block first skips the tiles beyond the diagonal. If
// a row has a score above SECOND_PASS_BELOW, its masked scores have no weight. If any row of the block has no such
// score, the block begins again with all tiles.
#include "attention_mma.cuh"
#include "attention_mma_shares.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    attention_mma(const __grid_constant__ Problem given PROGRAM_PARAMETERS) {
    wait_for_predecessor();
    release_successor();
    Problem problem = given;
    WorkTile at = work_tile(blockIdx.x, problem);
    WarpState warp;
    warp.begin_with_sinks(problem, at);
    attend(warp, Tiles{problem, at, at.begin / BLOCK_N, (at.end + BLOCK_N - 1) / BLOCK_N});
    if constexpr (SECOND_PASS) {
        if (__syncthreads_or(at.end < problem.keys && warp.needs_second_pass(problem.queries * GQA_GROUP - at.row))) {
            at.end = problem.keys, warp = WarpState();
            attend(warp, Tiles{problem, at, 0, (at.end + BLOCK_N - 1) / BLOCK_N});
        }
    }
    const Out result(problem, at, {PROGRAM_ARGUMENTS});
    if constexpr (WARPS_N == 1) {
        write_warp(warp, result);
    } else {
        const WarpResults results;
        results.store_warp(warp);
        write_combined(results, result);
    }
}
