// Attention of few queries over many keys, which several blocks share.
//
//   out = softmax(mask(softcap(scale q k^T) + bias)) v
//
// A block takes the rows of one key head (every query of every query head that shares it: one tile of rows) and one of
// `splits` slices of the keys, so that keys and values are read once. It runs the loop of attention_mma.cuh. The
// results of the splits, each with its own maximum and sum, are combined in one of two ways: in a cluster through
// distributed shared memory (attention_decode.cuh), or through scratch memory by a second kernel, attention_combine.
//
// Macros: those of attention_mma.cuh, and CLUSTER, the blocks of a cluster.
#include "attention_decode.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) IN_CLUSTER
    attention_decode(ATTENTION_PARAMETERS, int splits, float* partial, float2* totals) {
    wait_for_predecessor();
    release_successor();
    const Problem problem{ATTENTION_ARGUMENTS};
    const int split = blockIdx.x % splits;
    const WorkTile at = work_tile(blockIdx.x / splits, problem);
    const int tiles = (at.end + BLOCK_N - 1) / BLOCK_N, each = (tiles + splits - 1) / splits;
    WarpState warp;
    attend(warp, Tiles{problem, at, min(split * each, tiles), min((split + 1) * each, tiles)});
    write_rows(warp, Out(problem, at), split, partial, totals);
}

constexpr int COMBINE_THREADS = 128, MAX_SPLITS = 64;
constexpr int COLUMN_THREADS = OUT_VECTORS < COMBINE_THREADS ? OUT_VECTORS : COMBINE_THREADS;
constexpr int SPLIT_LANES = COMBINE_THREADS / COLUMN_THREADS;

// Combines the results of all splits of a row. There is a block for each row; its threads divide columns and splits.
extern "C" __global__ void __launch_bounds__(COMBINE_THREADS) attention_combine(
    OUT_T* out, i64 out_batch, i64 out_head, i64 out_row, int queries, int kv_heads, int splits, const float* partial,
    const float2* totals) {
    wait_for_predecessor();
    release_successor();
    __shared__ float2 split_totals[MAX_SPLITS];
    __shared__ float lanes[SPLIT_LANES][COLUMN_THREADS * OUT_WIDTH];
    const int rows = queries * GQA_GROUP, head = blockIdx.x / rows, row = blockIdx.x % rows;
    const i64 first = (i64)head * splits * BLOCK_M + row;
    if (threadIdx.x < splits) split_totals[threadIdx.x] = totals[first + threadIdx.x * BLOCK_M];
    __syncthreads();
    float top = MINUS_INFINITY, sum = 0.0f;
    for (int split = 0; split < splits; ++split) top = fmaxf(top, split_totals[split].x);
    const float zero = top == MINUS_INFINITY ? 0.0f : top;
    for (int split = 0; split < splits; ++split)
        sum = fmaf(split_totals[split].y, exp2_fast(split_totals[split].x - zero), sum);
    OUT_T* to = out + head / kv_heads * out_batch + (head % kv_heads * GQA_GROUP + row % GQA_GROUP) * out_head;
    to += row / GQA_GROUP * out_row;
    const int lane = threadIdx.x / COLUMN_THREADS, thread = threadIdx.x % COLUMN_THREADS;
    for (int column = thread * OUT_WIDTH; column < HEAD_DIM_V; column += COLUMN_THREADS * OUT_WIDTH) {
        float y[OUT_WIDTH] = {};
#pragma unroll 4
        for (int split = lane; split < splits && lane < SPLIT_LANES; split += SPLIT_LANES) {
            const float factor = exp2_fast(split_totals[split].x - zero);
#pragma unroll
            for (int e = 0; e < OUT_WIDTH; ++e)
                y[e] = fmaf(partial[(first + split * BLOCK_M) * HEAD_DIM_V + column + e], factor, y[e]);
        }
        if constexpr (SPLIT_LANES > 1) {
            if (lane < SPLIT_LANES)
#pragma unroll
                for (int e = 0; e < OUT_WIDTH; ++e) lanes[lane][thread * OUT_WIDTH + e] = y[e];
            __syncthreads();
            for (int other = 1; other < SPLIT_LANES && lane == 0; ++other)
#pragma unroll
                for (int e = 0; e < OUT_WIDTH; ++e) y[e] += lanes[other][thread * OUT_WIDTH + e];
        }
        if (lane > 0) continue;
#pragma unroll
        for (float& value : y) value = normalized(value, sum);
        store<false, OUT_WIDTH>(to + column, y);
    }
}
