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
#include "attention_cache.cuh"

constexpr int WIDTH = ACCESS_BYTES / sizeof(T);

template <int PER_ROW>
__device__ __forceinline__ void append(const Cache& cache, int rows, int chunk) {
    Pack<T, WIDTH> read[ACCESSES];
    i64 targets[ACCESSES];
#pragma unroll
    for (int i = 0; i < ACCESSES; ++i) {
        const i64 access = ((i64)chunk * ACCESSES + i) * THREADS + threadIdx.x;
        const i64 row = access / PER_ROW, column = access % PER_ROW * WIDTH;
        targets[i] = row < rows && !(cache.in_place && row < cache.rows) ? row * cache.present_row + column : -1;
        const T* from = row < cache.rows ? cache.past + row * cache.past_row
                                         : cache.added + (row - cache.rows) * cache.added_row;
        if (targets[i] >= 0) read[i] = load_once<WIDTH>(from + column);
    }
#pragma unroll
    for (int i = 0; i < ACCESSES; ++i)
        if (targets[i] >= 0)
            store_bytes<false, ACCESS_BYTES>(reinterpret_cast<char*>(cache.present + targets[i]), read[i].words);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_append(CacheRows keys, CacheRows values, HeadTensor<T> present_k, HeadTensor<T> present_v, int heads,
                     int past, int rows, int same_offsets, int key_chunks, int value_chunks) {
    wait_for_predecessor();
    release_successor();
    const int chunks = key_chunks + value_chunks, chunk = blockIdx.x % chunks;
    const int batch = blockIdx.x / chunks / heads, head = blockIdx.x / chunks % heads;
    if (chunk < key_chunks) {
        const bool in_place = same_offsets && keys.past.data == present_k.data;
        append<HEAD_DIM / WIDTH>({keys, present_k, batch, head, past, in_place}, rows, chunk);
    } else {
        const bool in_place = same_offsets && values.past.data == present_v.data;
        append<HEAD_DIM_V / WIDTH>({values, present_v, batch, head, past, in_place}, rows, chunk - key_chunks);
    }
}
