// Writes quantized weights as numbers of type T, in the order in which they are stored, for products of many rows.
//
// A thread writes WIDTH neighbouring elements of a row. Each weight is read once, and each number is written once.
//
// Macros:
//   COLUMNS_FIRST   1: the weight is stored as k x n, with scales and zero points of BLOCKS_K x n; 0: as n x k
//   WIDTH   elements of an access to the result; divides the elements of a row, and BLOCK_SIZE if rows run along k
//   WORD    bytes of an access to w: 4 if WIDTH * BITS is a multiple of 32 and w is aligned, else 1
//   and those of nbits.cuh; ROW_BITS takes the place of W_ROW_BYTES, because a row can end within a byte
#define W_ROW_BYTES 0
#include "nbits.cuh"

constexpr int THREADS = 256, WORD_BITS = 8 * WORD;
constexpr int ROWS = COLUMNS_FIRST ? K : N, COLUMNS = COLUMNS_FIRST ? N : K, VECTORS = COLUMNS / WIDTH;
constexpr int WORDS = (WIDTH * BITS + WORD_BITS - 1) / WORD_BITS;
static_assert(COLUMNS % WIDTH == 0 && (COLUMNS_FIRST || BLOCK_SIZE % WIDTH == 0), "vectors end with rows and blocks");

extern "C" __global__ void __launch_bounds__(THREADS)
    nbits_dequantize(const unsigned char* w, const T* scales, const void* zeros, T* result) {
    const long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
    release_successor();
    if constexpr (!WEIGHTS_CONSTANT) wait_for_predecessor();
    if (at >= (long long)ROWS * VECTORS) return;
    const int row = static_cast<int>(at / VECTORS), column = static_cast<int>(at % VECTORS) * WIDTH;
    const Quantized quantized{w, scales, zeros};
    const long long first = (long long)row * ROW_BITS + (long long)column * BITS;
    const int bit = WIDTH * BITS < 8 ? static_cast<int>(first % 8) : 0;  // position of the first weight in its byte
    const unsigned char* from = w + first / 8;
    unsigned words[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; ++i)
        words[i] = WORD == 4 ? load_part(reinterpret_cast<const unsigned*>(from) + i) : load_part(from + i);
    float values[WIDTH], scale, zero;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
        if (COLUMNS_FIRST || i == 0) {
            // Scales of k x n weights are (BLOCKS_K, n). They are read here as a single row of BLOCKS_K * n blocks.
            const int block = COLUMNS_FIRST ? row / BLOCK_SIZE * N + column + i : column / BLOCK_SIZE;
            scale = quantized.scale(COLUMNS_FIRST ? 0 : row, block);
            zero = quantized.zero_value(COLUMNS_FIRST ? 0 : row, block);
        }
        const unsigned q = words[i * BITS / WORD_BITS] >> (bit + i * BITS % WORD_BITS) & QUANT_MASK;
        values[i] = (number(q ^ SIGN) - zero) * scale;
    }
    wait_for_predecessor();  // the previous kernel can still read the scratch memory that the store overwrites
    store<false>(result + (long long)row * COLUMNS + column, values);
}
