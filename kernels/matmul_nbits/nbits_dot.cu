// Products of up to ROWS rows of x with quantized weights as dot products in fp32, for every dtype, size and alignment.
//
//   y = x w^T + bias, where nbits.cuh defines w; a gated product has a second weight
//
// A warp computes one column of y: its lanes read words of the column's weights in turn, and add up their sums by
// shuffles. So a block computes WARPS columns of ROWS rows. All its threads run the epilogue (epilogue.cuh).
//
// Macros:
//   ROWS, WARPS   as above
//   WORD          bytes of an access to w: 4, or 1 if rows of w are misaligned
//   X_VECTOR      elements of an access to x; divides k and the elements of a word
//   WIDTH         elements of an access to y, the residual and the column vectors; divides n and WARPS
//   and those of nbits.cuh
#include "nbits.cuh"
#include "finish_rows.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int EACH = WORD * 8 / BITS;  // weights per word
static_assert(N % WIDTH == 0 && WARPS % WIDTH == 0, "vectors end with a block's columns");
static_assert(EACH % X_VECTOR == 0 && K % X_VECTOR == 0, "vectors of x end with a word's weights and with k");
static_assert(W_ROW_BYTES % WORD == 0, "rows are whole words");

// Adds a lane's part of the products of `rows` rows of x with the weights of one column to `own`.
__device__ __forceinline__ void add_products(float (&own)[ROWS], const Quantized& quantized, const T* x, int rows,
                                             int column) {
    const unsigned char* weights = quantized.row(column);
#pragma unroll 2
    for (int at = threadIdx.x % 32 * WORD; at < W_ROW_BYTES; at += 32 * WORD) {
        const unsigned word = load_elements<WORD>(weights + at);
        const int k = at * (8 / BITS), block = k / BLOCK_SIZE;
        const float scale = quantized.scale(column, block), zero = quantized.zero_value(column, block);
        wait_for_predecessor();
#pragma unroll
        for (int v = 0; v < EACH; v += X_VECTOR) {
            if (k + v >= K) break;
            float values[X_VECTOR];
#pragma unroll
            for (int i = 0; i < X_VECTOR; ++i)
                values[i] = (number(word >> ((v + i) * BITS) & QUANT_MASK) - zero) * scale;
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                if (i >= rows) break;
                float operands[X_VECTOR];
                unpack(load_cached<X_VECTOR>(x + (long long)i * K + k + v), operands);
#pragma unroll
                for (int j = 0; j < X_VECTOR; ++j) own[i] = fmaf(operands[j], values[j], own[i]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    nbits_dot(const T* x, const __grid_constant__ Products products, const T* residual, int m PROGRAM_PARAMETERS) {
    __shared__ __align__(16) float sums[ROWS][WEIGHTS][WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = blockIdx.y * ROWS, rows = min(m - row, ROWS);
    const Tile<WARPS> tile(products, blockIdx.x);
    const ProductOperands& own = tile.own;
    const int first = tile.first, columns = tile.columns, column = min(first + warp, columns - 1);
    release_successor();
    if constexpr (!WEIGHTS_CONSTANT) wait_for_predecessor();
#pragma unroll
    for (int weight = 0; weight < WEIGHTS; ++weight) {
        float added[ROWS] = {};
        const Quantized& quantized = weight ? products.of[WEIGHTS - 1].quantized : own.quantized;
        add_products(added, quantized, x + (long long)row * K, rows, column);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
#pragma unroll
            for (int offset = 16; offset > 0; offset /= 2) added[i] += __shfl_xor_sync(0xffffffffu, added[i], offset);
            if (lane == 0) sums[i][weight][warp] = added[i];
        }
    }
    wait_for_predecessor();
    __syncthreads();
    const Epilogue epilogue{own.bias,           products.of[WEIGHTS - 1].bias, nullptr, residual, own.y, 0.0f, 0.0f,
                            {PROGRAM_ARGUMENTS}};
    const auto sums_of = [&](int i, int j, float (&values)[WIDTH], float (&ups)[WIDTH]) {
#pragma unroll
        for (int v = 0; v < WIDTH; ++v) {
            values[v] = sums[i][0][j + v];
            if constexpr (GATED) ups[v] = sums[i][WEIGHTS - 1][j + v];
        }
    };
    finish_rows<WARPS, THREADS, ROWS>(epilogue, row, rows, first, columns, sums_of);
}
