// Transposes the values of an attention in TF32, which attention_hopper.cu reads along the keys.
//
//   out: for each batch element and key head, HEAD_DIM_V rows of all keys, whose number is rounded up to a multiple of 8
//
// Of each eight keys, 0, 2, 4, 6 come before 1, 3, 5, 7, as the weights of attention_hopper_scores.cuh do. Keys after
// the last one are 0. A block transposes TILE keys of TILE columns through shared memory. Rows of shared memory are
// padded so that the lanes of a warp, which read 16 groups of keys in two columns, meet each bank once.
//
// Macros: HEAD_DIM_V   elements of a head
#include "head_tensor.cuh"
#include "types.cuh"

constexpr int TILE = 64, THREADS = 256, VECTORS = TILE * TILE / 4 / THREADS;  // 16-byte accesses of a thread

// Returns the index of an element in the padded tile.
__device__ __forceinline__ int place(int key, int column) { return key * (TILE + 2) + key / 8 * 20 + column; }

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_values(const __grid_constant__ HeadTensor<const f32> v, f32* out, int keys, int heads) {
    __shared__ u32 shared[TILE * (TILE + 2) + TILE / 8 * 20];
    wait_for_predecessor();
    release_successor();
    const int padded = (keys + 7) / 8 * 8, tiles = (keys + TILE - 1) / TILE, plane = blockIdx.x / tiles;
    const int first_key = blockIdx.x % tiles * TILE, first_column = blockIdx.y * TILE;
    const f32* const from = v.at(plane / heads, plane % heads) + first_column;
    Pack<f32, 4> packs[VECTORS] = {};
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int at = i * THREADS + threadIdx.x, key = first_key + at / 16, column = at % 16 * 4;
        if (key < keys && first_column + column < HEAD_DIM_V) packs[i] = load_once<4>(from + key * v.row + column);
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int at = i * THREADS + threadIdx.x;
#pragma unroll
        for (int e = 0; e < 4; ++e) shared[place(at / 16, at % 16 * 4 + e)] = packs[i].words[e];
    }
    __syncthreads();
    f32* const to = out + ((long long)plane * HEAD_DIM_V + first_column) * padded + first_key;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int at = i * THREADS + threadIdx.x, column = at / 16, four = at % 16 * 4;
        if (first_key + four >= padded || first_column + column >= HEAD_DIM_V) continue;
#pragma unroll
        for (int e = 0; e < 4; ++e) packs[i].words[e] = shared[place(four / 8 * 8 + four / 4 % 2 + 2 * e, column)];
        store_pack<false>(to + (long long)column * padded + four, packs[i]);
    }
}
