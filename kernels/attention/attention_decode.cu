// Attention of few queries over many keys, which several blocks share.
//
//   out = softmax(mask(softcap(scale q k^T) + bias)) v
//
// A block processes one of `splits` slices of the keys of one key head for all rows that read these keys: every query
// of every query head that shares the key head. The rows are a single tile, so keys and values are read once. The block
// runs the loop of attention_mma.cuh. Each split has its own maximum and sum. The results of the splits are combined in
// one of two ways: in a cluster, through distributed shared memory (attention_decode.cuh); or through scratch memory,
// by a second kernel, attention_combine.cu.
//
// Macros: those of attention_mma.cuh, and CLUSTER, the blocks of a cluster; 0: the launch sets their number, at most 8.
#include "attention_decode.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) IN_CLUSTER
    attention_decode(const __grid_constant__ Problem given, Splits splits PROGRAM_PARAMETERS) {
    release_successor();
    wait_for_predecessor();
    Problem problem = given;
    const int split = blockIdx.x % splits.count;
    const WorkTile at = work_tile(blockIdx.x / splits.count, problem);
    const int first = at.begin / BLOCK_N, tiles = (at.end + BLOCK_N - 1) / BLOCK_N - first;
    const int each = (tiles + splits.count - 1) / splits.count;
    WarpState warp;
    if (split == 0) warp.begin_with_sinks(problem, at);
    attend(warp, Tiles{problem, at, first + min(split * each, tiles), first + min((split + 1) * each, tiles)});
    write_rows(warp, Out(problem, at, {PROGRAM_ARGUMENTS}), split, splits);
}
