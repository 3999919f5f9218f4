// Combines the partial results that the splits of attention_decode.cu or attention_with_cache.cu wrote to scratch
// memory: per split, `block_rows` rows of HEAD_DIM_V floats, and the maximum and the sum of each row.
//
// One block computes each row of the result. Its threads divide the row's columns, and the splits, among them.
//
// Macros: a subset of the macros of attention_mma.cuh.
#include "attention_results.cuh"
#include "head_tensor.cuh"
#include "program.cuh"

constexpr int THREADS = 128, MAX_SPLITS = 64;
constexpr int OUT_VECTORS = HEAD_DIM_V / OUT_WIDTH;
constexpr int COLUMN_THREADS = OUT_VECTORS < THREADS ? OUT_VECTORS : THREADS;
constexpr int SPLIT_LANES = THREADS / COLUMN_THREADS;

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_combine(HeadTensor<OUT_T> out, Splits splits, int queries, int kv_heads,
                      int block_rows PROGRAM_PARAMETERS) {
    release_successor();
    wait_for_predecessor();
    __shared__ float2 split_totals[MAX_SPLITS];
    __shared__ float lanes[SPLIT_LANES][COLUMN_THREADS * OUT_WIDTH];
    const int rows = queries * GQA_GROUP, head = blockIdx.x / rows, row = blockIdx.x % rows;
    const i64 first = (i64)head * splits.count * block_rows + row;
    if (threadIdx.x < splits.count) split_totals[threadIdx.x] = splits.totals[first + threadIdx.x * block_rows];
    __syncthreads();
    float top = MINUS_INFINITY, sum = 0.0f;
    for (int split = 0; split < splits.count; ++split) top = fmaxf(top, split_totals[split].x);
    const float zero = top == MINUS_INFINITY ? 0.0f : top;
    for (int split = 0; split < splits.count; ++split)
        sum = fmaf(split_totals[split].y, exp2_fast(split_totals[split].x - zero), sum);
    const int batch = head / kv_heads, query_head = head % kv_heads * GQA_GROUP + row % GQA_GROUP;
    const int query = row / GQA_GROUP;
    OUT_T* const to = out.at(batch, query_head) + query * out.row;
    const int lane = threadIdx.x / COLUMN_THREADS, thread = threadIdx.x % COLUMN_THREADS;
    for (int column = thread * OUT_WIDTH; column < HEAD_DIM_V; column += COLUMN_THREADS * OUT_WIDTH) {
        float y[OUT_WIDTH] = {};
#pragma unroll 4
        for (int split = lane; split < splits.count && lane < SPLIT_LANES; split += SPLIT_LANES) {
            const float factor = exp2_fast(split_totals[split].x - zero);
#pragma unroll
            for (int e = 0; e < OUT_WIDTH; ++e)
                y[e] = fmaf(splits.partial[(first + split * block_rows) * HEAD_DIM_V + column + e], factor, y[e]);
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
        if constexpr (HAS_PROGRAM) {
            const Program program{PROGRAM_ARGUMENTS};
            apply_program(program, program.locate(batch, query_head, query), column, y);
        }
        if constexpr (STORES_Y) store<false, OUT_WIDTH>(to + column, y);
    }
}
