// Writes the present caches of keys and values in one launch: the rows of the past caches, followed by the new rows.
//
// A block copies a chunk of the keys or of the values of one head: each of its THREADS threads loads ACCESSES vectors
// of ACCESS_BYTES bytes before it stores the first. Each element is read and written once. If a past cache and its
// present cache are the same memory, and a row has the same offset in both (`same_offsets`), only the new rows are
// written.
//
// Macros: T, the element type; HEAD_DIM and HEAD_DIM_V, the elements of a row of keys and of values; ACCESS_BYTES,
// which divides a row; THREADS and ACCESSES.
#include "types.cuh"

using i64 = long long;

constexpr int WIDTH = ACCESS_BYTES / sizeof(T);

template <int PER_ROW>
__device__ __forceinline__ void append(const T* past, const T* added, T* present, i64 past_row, i64 added_row,
                                       i64 present_row, int past_rows, int rows, bool in_place, int chunk) {
    Pack<T, WIDTH> read[ACCESSES];
    i64 targets[ACCESSES];
#pragma unroll
    for (int i = 0; i < ACCESSES; ++i) {
        const i64 access = ((i64)chunk * ACCESSES + i) * THREADS + threadIdx.x;
        const i64 row = access / PER_ROW, column = access % PER_ROW * WIDTH;
        targets[i] = row < rows && !(in_place && row < past_rows) ? row * present_row + column : -1;
        const T* from = row < past_rows ? past + row * past_row : added + (row - past_rows) * added_row;
        if (targets[i] >= 0) read[i] = load_once<WIDTH>(from + column);
    }
#pragma unroll
    for (int i = 0; i < ACCESSES; ++i)
        if (targets[i] >= 0)
            store_bytes<false, ACCESS_BYTES>(reinterpret_cast<char*>(present + targets[i]), read[i].words);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_append(const T* past_k, const T* past_v, const T* new_k, const T* new_v, T* present_k, T* present_v,
                     i64 past_k_batch, i64 past_k_head, i64 past_k_row, i64 past_v_batch, i64 past_v_head,
                     i64 past_v_row, i64 new_k_batch, i64 new_k_head, i64 new_k_row, i64 new_v_batch, i64 new_v_head,
                     i64 new_v_row, i64 k_batch, i64 k_head, i64 k_row, i64 v_batch, i64 v_head, i64 v_row, int heads,
                     int past, int rows, int same_offsets, int key_chunks, int value_chunks) {
    wait_for_predecessor();
    release_successor();
    const int chunks = key_chunks + value_chunks, chunk = blockIdx.x % chunks;
    const int batch = blockIdx.x / chunks / heads, head = blockIdx.x / chunks % heads;
    if (chunk < key_chunks)
        append<HEAD_DIM / WIDTH>(past_k + batch * past_k_batch + head * past_k_head,
                                 new_k + batch * new_k_batch + head * new_k_head,
                                 present_k + batch * k_batch + head * k_head, past_k_row, new_k_row, k_row, past, rows,
                                 same_offsets && past_k == present_k, chunk);
    else
        append<HEAD_DIM_V / WIDTH>(past_v + batch * past_v_batch + head * past_v_head,
                                   new_v + batch * new_v_batch + head * new_v_head,
                                   present_v + batch * v_batch + head * v_head, past_v_row, new_v_row, v_row, past,
                                   rows, same_offsets && past_v == present_v, chunk - key_chunks);
}
