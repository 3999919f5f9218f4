// out = softmax(mask(cap(scale q k^T) + bias)) v for few queries and many keys, which are split over blocks.
//
// Keys and values are read once, whatever the number of query heads that share them: these are the rows of one tile.
#include "attention_decode.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) IN_CLUSTER
    attention_decode(ATTENTION_PARAMETERS, int splits, float* partial, float2* totals) {
    wait_for_predecessor();
    release_successor();
    const Problem problem{ATTENTION_ARGUMENTS};
    const int split = blockIdx.x % splits;
    const Place at = place_of(blockIdx.x / splits, problem);
    const int tiles = (at.end + BLOCK_K - 1) / BLOCK_K, each = (tiles + splits - 1) / splits;
    Warp warp;
    attend(warp, Tiles{problem, at, min(split * each, tiles), min((split + 1) * each, tiles)});
    write_rows(warp, Out(problem, at), split, partial, totals);
}

constexpr int COMBINE_THREADS = 128, MOST_SPLITS = 64;
constexpr int ABREAST = PIECES < COMBINE_THREADS ? PIECES : COMBINE_THREADS, LANES = COMBINE_THREADS / ABREAST;

// The results of all splits of a row become one; a block for each row, whose threads share columns and splits.
extern "C" __global__ void __launch_bounds__(COMBINE_THREADS) attention_combine(
    OUT_T* out, i64 out_batch, i64 out_head, i64 out_row, int queries, int kv_heads, int splits, const float* partial,
    const float2* totals) {
    wait_for_predecessor();
    release_successor();
    __shared__ float2 shares[MOST_SPLITS];
    __shared__ float lanes[LANES][ABREAST * OUT_ACCESS];
    const int rows = queries * GROUP, head = blockIdx.x / rows, row = blockIdx.x % rows;
    const i64 first = (i64)head * splits * ROWS + row;
    if (threadIdx.x < splits) shares[threadIdx.x] = totals[first + threadIdx.x * ROWS];
    __syncthreads();
    float top = NOTHING, sum = 0.0f;
    for (int split = 0; split < splits; ++split) top = fmaxf(top, shares[split].x);
    const float zero = top == NOTHING ? 0.0f : top;
    for (int split = 0; split < splits; ++split) sum = fmaf(shares[split].y, exp2_fast(shares[split].x - zero), sum);
    OUT_T* to = out + head / kv_heads * out_batch + (head % kv_heads * GROUP + row % GROUP) * out_head;
    to += row / GROUP * out_row;
    const int lane = threadIdx.x / ABREAST, place = threadIdx.x % ABREAST;
    for (int column = place * OUT_ACCESS; column < VALUE_SIZE; column += ABREAST * OUT_ACCESS) {
        float y[OUT_ACCESS] = {};
#pragma unroll 4
        for (int split = lane; split < splits && lane < LANES; split += LANES) {
            const float factor = exp2_fast(shares[split].x - zero);
#pragma unroll
            for (int e = 0; e < OUT_ACCESS; ++e)
                y[e] = fmaf(partial[(first + split * ROWS) * VALUE_SIZE + column + e], factor, y[e]);
        }
        if constexpr (LANES > 1) {
            if (lane < LANES)
#pragma unroll
                for (int e = 0; e < OUT_ACCESS; ++e) lanes[lane][place * OUT_ACCESS + e] = y[e];
            __syncthreads();
            for (int other = 1; other < LANES && lane == 0; ++other)
#pragma unroll
                for (int e = 0; e < OUT_ACCESS; ++e) y[e] += lanes[other][place * OUT_ACCESS + e];
        }
        if (lane > 0) continue;
#pragma unroll
        for (float& value : y) value = finished(value, sum);
        store<false, OUT_ACCESS>(to + column, y);
    }
}
