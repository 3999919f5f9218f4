// out = softmax(mask(cap(scale q k^T) + bias)) v: one block for each tile of rows, see attention_mma.cuh.
//
// Where WARPS_N > 1 the warps of a block share the keys, and their results meet in shared memory: short sequences have
// too few rows to occupy the chip otherwise. With RETURNS a block leaves out the tiles behind the diagonal, and begins
// again with all if one of its rows has no score above WANTED.
#include "attention_mma.cuh"
#include "attention_mma_shares.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_mma(ATTENTION_PARAMETERS) {
    wait_for_predecessor();
    release_successor();
    const Problem problem{ATTENTION_ARGUMENTS};
    Place at = place_of(blockIdx.x, problem);
    Warp warp;
    attend(warp, Tiles{problem, at, 0, (at.end + BLOCK_K - 1) / BLOCK_K});
    if constexpr (RETURNS) {
        if (__syncthreads_or(at.end < problem.keys && warp.lacks(problem.queries * GROUP - at.row))) {
            at.end = problem.keys, warp = Warp();
            attend(warp, Tiles{problem, at, 0, (at.end + BLOCK_K - 1) / BLOCK_K});
        }
    }
    const Out result(problem, at);
    if constexpr (WARPS_N == 1) {
        write_warp(warp, result);
    } else {
        const Shares shares;
        shares.put(warp);
        write_shares(shares, result);
    }
}
