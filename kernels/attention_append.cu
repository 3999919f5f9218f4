// present_key = past_key and k behind it, present_value = past_value and v behind it, for each head; one launch.
//
// Bytes: each element is read and written once. Where a past and its present are one memory, in which a row of the past
// has its place, only new rows are written.
//
// Constants: T; SIZE, VALUE_SIZE: elements of a row of keys and of values; ACCESS: bytes of an access, which divide
// a row; THREADS, EACH: of a block, accesses of a thread.
#include "types.cuh"

using i64 = long long;

constexpr int ELEMENTS = ACCESS / sizeof(T);

template <int PER_ROW>
__device__ __forceinline__ void append(const T* past, const T* fresh, T* present, i64 past_row, i64 fresh_row,
                                       i64 present_row, int old, int all, bool in_place, int chunk) {
    Pack<T, ELEMENTS> read[EACH];
    i64 places[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const i64 piece = ((i64)chunk * EACH + i) * THREADS + threadIdx.x;
        const i64 row = piece / PER_ROW, column = piece % PER_ROW * ELEMENTS;
        places[i] = row < all && !(in_place && row < old) ? row * present_row + column : -1;
        const T* from = row < old ? past + row * past_row : fresh + (row - old) * fresh_row;
        if (places[i] >= 0) read[i] = load_once<ELEMENTS>(from + column);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (places[i] >= 0) store_bytes<false, ACCESS>(reinterpret_cast<char*>(present + places[i]), read[i].words);
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_append(
    const T* past_k, const T* past_v, const T* new_k, const T* new_v, T* present_k, T* present_v, i64 past_k_batch,
    i64 past_k_head, i64 past_k_row, i64 past_v_batch, i64 past_v_head, i64 past_v_row, i64 new_k_batch,
    i64 new_k_head, i64 new_k_row, i64 new_v_batch, i64 new_v_head, i64 new_v_row, i64 k_batch, i64 k_head, i64 k_row,
    i64 v_batch, i64 v_head, i64 v_row, int heads, int past, int all, int same, int key_chunks, int value_chunks) {
    wait_for_predecessor();
    release_successor();
    const int chunks = key_chunks + value_chunks, chunk = blockIdx.x % chunks;
    const int batch = blockIdx.x / chunks / heads, head = blockIdx.x / chunks % heads;
    if (chunk < key_chunks)
        append<SIZE / ELEMENTS>(
            past_k + batch * past_k_batch + head * past_k_head, new_k + batch * new_k_batch + head * new_k_head,
            present_k + batch * k_batch + head * k_head, past_k_row, new_k_row, k_row, past, all,
            same && past_k == present_k, chunk);
    else
        append<VALUE_SIZE / ELEMENTS>(
            past_v + batch * past_v_batch + head * past_v_head, new_v + batch * new_v_batch + head * new_v_head,
            present_v + batch * v_batch + head * v_head, past_v_row, new_v_row, v_row, past, all,
            same && past_v == present_v, chunk - key_chunks);
}
