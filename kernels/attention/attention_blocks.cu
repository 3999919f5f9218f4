// Classifies the tiles of a mask, of 64 queries and BLOCK_N keys each, so that attention_hopper.cu can skip tiles.
//
// One block of 128 threads reads one tile of the mask, with WIDTH elements per access, and writes
//   flags  one byte: 0, no score of the tile counts; 1, some scores change; 2, all scores stay as they are; 3, each
//          score stays or does not count
//   bits   for tiles of kind 3, and for all tiles of a boolean mask: which scores count. The bits are in the layout of
//          a wgmma accumulator of 64 x BLOCK_N, so that each thread of a consumer warpgroup loads its scores' bits
// Mask elements beyond the last query or key are ignored.
//
// Macros:
//   BLOCK_N, WIDTH  see above
//   WIDTH_DIVIDES   1: WIDTH divides the strides and the number of keys; 0: elements are read one by one. The macro can
//                   be an expression of the kernel's arguments
//   MASK            1 boolean, 2 additive
//   INVERTED        1: false elements of a boolean mask count, instead of true ones
//   NEGLIGIBLE      attention_hopper.cu treats elements of an additive mask up to this number as -inf in its first pass
//   MASK_T          the element type of the mask
//   MASK_KEY        the mask's stride from key to key, 0 or 1
#include "attention_blocks.cuh"

constexpr bool BOOLEAN = MASK == 1;
constexpr int BIT_WORDS = (BLOCK_N / 2 + 31) / 32;  // words of mask bits per thread, as in attention_hopper.cu
constexpr u32 ONE = sizeof(MASK_T) == 4 ? ~0u : (1u << 8 * sizeof(MASK_T)) - 1;  // the bits of one element in a word
constexpr int PITCH = BLOCK_N + 16;  // bytes between rows, so that eight rows are in different banks

// Stores a byte for each score: 1 if it counts, else 0.
template <int N>
__device__ __forceinline__ void put(unsigned char* to, const int (&kinds)[N]) {
    u32 words[(N + 3) / 4] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) words[i / 4] |= u32(kinds[i] != 0) << i % 4 * 8;
    if constexpr (N == 1) *to = words[0];
    else if constexpr (N == 2) *reinterpret_cast<unsigned short*>(to) = words[0];
    else
#pragma unroll
        for (int w = 0; w < N / 4; ++w) reinterpret_cast<u32*>(to)[w] = words[w];
}

// Which statements hold for all mask elements that a thread has read so far. none: no score counts; all: all scores
// stay as they are; plain: each score stays or does not count.
struct Left {
    bool none = true, all = true, plain = true;

    __device__ __forceinline__ void take(bool inside, int kind) {
        none &= !inside || kind == 0;
        all &= !inside || kind == 2;
        plain &= !inside || kind != 1;
    }
};

// Reads the tile at `first_row` and `first_key`, with N elements per access, and stores which of its scores count.
template <int N>
__device__ __forceinline__ Left read_tile(const MASK_T* from, long long query_stride, int first_row, int queries,
                                          int first_key, int keys, unsigned char* counts) {
    constexpr int LANES = BLOCK_N / N;                                       // threads per row
    constexpr int ACCESSES = 64 * LANES / 128;                               // accesses per thread
    constexpr int BATCH = ACCESSES <= 16 ? ACCESSES : ACCESSES % 8 ? 4 : 8;  // accesses in flight
    static_assert(64 * LANES % 128 == 0 && ACCESSES % BATCH == 0, "each thread has as many accesses, in whole batches");
    Left left;
#pragma unroll 1
    for (int batch = 0; batch < ACCESSES; batch += BATCH) {
        Pack<MASK_T, N> elements[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int access = (batch + i) * 128 + threadIdx.x;
            const int q = min(first_row + access / LANES, queries - 1);
            const int k = first_key + access % LANES * N;
            elements[i] = load_mask<N>(from + q * query_stride + (k < keys ? k : 0) * MASK_KEY);
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int access = (batch + i) * 128 + threadIdx.x, row = access / LANES, column = access % LANES * N;
            const bool inside = first_row + row < queries && first_key + column < keys;
            int kinds[N], one[1];
            if (equal(elements[i])) {  // in masks of models, most vectors have equal elements
                mask_kinds(Pack<MASK_T, 1>{{elements[i].words[0] & ONE}}, one);
                left.take(inside, one[0]);
#pragma unroll
                for (int& kind : kinds) kind = one[0];
            } else {
                mask_kinds(elements[i], kinds);
#pragma unroll
                for (int kind : kinds) left.take(inside, kind);
            }
            put(counts + row * PITCH + column, kinds);
        }
    }
    return left;
}

extern "C" __global__ void __launch_bounds__(128, 4)
    attention_blocks(ScoreTensor<MASK_T> mask, unsigned char* flags, u32* bits, int queries, int keys, int heads) {
    const int key_tiles = (keys + BLOCK_N - 1) / BLOCK_N, row_tiles = (queries + 63) / 64;
    const int tile = blockIdx.x, plane = tile / key_tiles / row_tiles;
    const int first_key = tile % key_tiles * BLOCK_N, first_row = tile / key_tiles % row_tiles * 64;
    const MASK_T* const from = mask.plane(plane / heads, plane % heads);

    wait_for_predecessor();
    release_successor();
    __shared__ alignas(16) unsigned char counts[64 * PITCH];
    Left left;
    if (WIDTH_DIVIDES) left = read_tile<WIDTH>(from, mask.query, first_row, queries, first_key, keys, counts);
    else left = read_tile<1>(from, mask.query, first_row, queries, first_key, keys, counts);
    const bool none = __syncthreads_and(left.none);
    const bool all = __syncthreads_and(left.all);
    const bool plain = __syncthreads_and(left.plain);
    const int kind = none ? 0 : all ? 2 : plain ? 3 : 1;
    if (threadIdx.x == 0) flags[tile] = kind;
    if (BOOLEAN || kind == 3) {
        const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
        u32 words[BIT_WORDS] = {};
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; i += 2) {  // the thread's scores i and i + 1 are neighbours
            const int at = (row + i / 2 % 2 * 8) * PITCH + column + i / 4 * 8;
            const u32 both = *reinterpret_cast<const unsigned short*>(counts + at);
            words[i / 32] |= ((both | both >> 7) & 3) << i % 32;
        }
#pragma unroll
        for (int w = 0; w < BIT_WORDS; ++w) bits[((long long)tile * BIT_WORDS + w) * 128 + threadIdx.x] = words[w];
    }
}
