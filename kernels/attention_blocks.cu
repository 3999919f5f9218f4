// What a mask leaves of each tile of 64 queries and KEYS_TILE keys, for attention_hopper.cu.
//
// flags: 0 nothing in the tile counts, 1 some, 2 all of it, unchanged. bits, of a boolean mask: which scores count, for
// each of a warpgroup's threads those that it holds in a product of 64 x KEYS_TILE, word by word. One block a tile;
// what lies beyond the last query or key has no say.
#include "attention_blocks.cuh"

constexpr bool BOOLEAN = MASK == 1;
constexpr int BIT_WORDS = (KEYS_TILE / 2 + 31) / 32;  // of a thread, as attention_hopper.cu has them
constexpr int ROW_WORDS = (KEYS_TILE + 31) / 32;      // of a row of the tile

extern "C" __global__ void __launch_bounds__(128)
attention_blocks(const MASK_T* mask, unsigned char* flags, u32* bits, int queries, int keys, int heads,
                 long long batch_stride, long long head_stride, long long query_stride) {
    const int key_tiles = (keys + KEYS_TILE - 1) / KEYS_TILE, row_tiles = (queries + 63) / 64;
    const long long tile = blockIdx.x;
    const int first_key = tile % key_tiles * KEYS_TILE, first_row = tile / key_tiles % row_tiles * 64;
    const int plane = tile / key_tiles / row_tiles, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const MASK_T* const from = mask + plane / heads * batch_stride + plane % heads * head_stride;

    __shared__ u32 rows[64][ROW_WORDS];
    bool none = true, all = true;
#pragma unroll 8
    for (int row = warp; row < 64; row += 4)
#pragma unroll
        for (int w = 0; w < ROW_WORDS; ++w) {
            const int q = first_row + row, k = first_key + w * 32 + lane;
            int found = 0;
            if (q < queries && k < keys && w * 32 + lane < KEYS_TILE) {
                found = mask_kind(load_mask(from + q * query_stride + k * MASK_KEY));
                none &= found == 0;
                all &= found == 2;
            }
            const u32 word = __ballot_sync(0xffffffffu, found);
            if (BOOLEAN && lane == 0) rows[row][w] = word;
        }
    none = __syncthreads_and(none);
    all = __syncthreads_and(all);
    if (threadIdx.x == 0) flags[tile] = none ? 0 : all ? 2 : 1;
    if (BOOLEAN) {
        u32 words[BIT_WORDS] = {};
#pragma unroll
        for (int i = 0; i < KEYS_TILE / 2; ++i) {  // row and column of the thread's score i
            const int row = warp * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + i % 2;
            const u32 word = rows[row][column / 32] >> (lane % 4 * 2);
            words[i / 32] |= (word >> column % 32 & 1) << i % 32;
        }
#pragma unroll
        for (int w = 0; w < BIT_WORDS; ++w) bits[(tile * BIT_WORDS + w) * 128 + threadIdx.x] = words[w];
    }
}
