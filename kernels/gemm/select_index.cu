// Ends the ArgMax or ArgMin of the rows of a product: merges the accumulators that the product's kernel stored for the
// parts of a row (see finish_rows.cuh), and stores each row's index. A block merges one row.
//
// Macros:
//   SELECTED   the type of the accumulators: an Extreme of extreme.cuh
#include "types.cuh"
#include "region.cuh"

constexpr int BLOCK = 512;  // threads, as in selection.py
constexpr int AT_ONCE = 8;  // accumulators that a thread loads before it merges any

extern "C" __global__ void __launch_bounds__(BLOCK) select_index(const SELECTED* parts, long long* y, int count) {
    __shared__ u64 memory[BLOCK / 32];
    static_assert(sizeof(SELECTED) == sizeof(u64), "memory holds an accumulator of each warp");
    release_successor();
    wait_for_predecessor();
    parts += (long long)blockIdx.x * count;
    SELECTED found;
    for (int first = threadIdx.x; first < count; first += AT_ONCE * BLOCK) {
        SELECTED loaded[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (first + i * BLOCK < count) loaded[i] = parts[first + i * BLOCK];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) found.merge(loaded[i]);
    }
    merge_block<SELECTED, BLOCK>(found, memory);
    if (threadIdx.x == 0) y[blockIdx.x] = found.at;
}
