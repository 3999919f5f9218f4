// Writes the sums of weights that gemm_hopper_eight_bits.cuh multiplies by the zero point of x.
//
// w is (columns, TAPS, k) of s8, and sums is (EDGE_ROWS, columns): row Edges::row() has the sums over the taps inside
// x. A product of matrices has one tap and one row. A warp computes a column. Rows of k are multiples of 16 bytes.
//
// Macros: COLUMNS: warps of a block; WEIGHTS_CONSTANT: 1 if no kernel writes w, else 0; those of conv_edges.cuh
#include "conv_edges.cuh"

extern "C" __global__ void __launch_bounds__(32 * COLUMNS) quantized_sums(const s8* w, int* sums, int columns, int k) {
    __shared__ int taps_of_warps[COLUMNS][TAPS];
    release_successor();  // the product's kernel loads its first weights meanwhile
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = blockIdx.x * COLUMNS + warp;
    int* of_taps = taps_of_warps[warp];
    if constexpr (!WEIGHTS_CONSTANT) wait_for_predecessor();
    for (int tap = 0; column < columns && tap < TAPS; ++tap) {
        const uint4* from = reinterpret_cast<const uint4*>(w + (size_t(column) * TAPS + tap) * k);
        int sum = 0;
        for (int i = lane; i < k / 16; i += 32) {
            const uint4 words = from[i];
            sum = __dp4a(int(words.x), 0x01010101, sum);
            sum = __dp4a(int(words.y), 0x01010101, sum);
            sum = __dp4a(int(words.z), 0x01010101, sum);
            sum = __dp4a(int(words.w), 0x01010101, sum);
        }
#pragma unroll
        for (int half = 16; half > 0; half /= 2) sum += __shfl_xor_sync(0xffffffff, sum, half);
        if (lane == 0) of_taps[tap] = sum;
    }
    __syncthreads();
    wait_for_predecessor();  // the previous kernel can still be reading `sums`
    for (int row = lane; column < columns && row < EDGE_ROWS; row += 32)
        sums[size_t(row) * columns + column] = sum_of_row(of_taps, row);
}
