// The numbers that correct sums of integers for a zero point of x: see gemm_hopper_integers.cuh.
//
// w is (columns, TAPS, k) of s8. zeros[0, column] = x_zero * (the sum of the column), and if EDGES is 1,
// zeros[1 + t, column] = x_zero * (the sum over tap t). A warp computes a column. Rows of k are multiples of 16 bytes.
//
// Macros: TAPS, EDGES; COLUMNS: warps of a block; OPERAND: s8 or u8, the type of x_zero.
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(32 * COLUMNS)
    quantized_zeros(const s8* w, const OPERAND* x_zero, int* zeros, int columns, int k) {
    release_successor();  // the product loads its first weights meanwhile
    const int column = blockIdx.x * COLUMNS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (column >= columns) return;
    const uint4* from = reinterpret_cast<const uint4*>(w + size_t(column) * TAPS * k);
    int all = 0, of_taps[EDGES ? TAPS : 1] = {};
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap) {
        int sum = 0;
        for (int i = lane; i < k / 16; i += 32) {
            const uint4 words = from[size_t(tap) * (k / 16) + i];
            sum = __dp4a(int(words.x), 0x01010101, sum);
            sum = __dp4a(int(words.y), 0x01010101, sum);
            sum = __dp4a(int(words.z), 0x01010101, sum);
            sum = __dp4a(int(words.w), 0x01010101, sum);
        }
#pragma unroll
        for (int half = 16; half > 0; half /= 2) sum += __shfl_xor_sync(0xffffffff, sum, half);
        all += sum;
        if (EDGES) of_taps[EDGES ? tap : 0] = sum;
    }
    wait_for_predecessor();  // which may write x_zero, and may still read `zeros`
    if (lane != 0) return;
    const int zero = *x_zero;
    zeros[column] = zero * all;
    if (EDGES)
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) zeros[(1 + tap) * columns + column] = zero * of_taps[EDGES ? tap : 0];
}
