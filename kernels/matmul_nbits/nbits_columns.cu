// Multiplies up to ROWS rows of x, of any dtype, by quantized weights that are stored as k x n. Sums are fp32.
//
//   y = x w + bias, where nbits.cuh defines w; a gated product has a second weight
//
// The kernel takes as long as reading the weights once. A word of w holds weights of EACH neighbouring columns, which
// one lane multiplies. A group of LANES neighbouring lanes reads a row of w together. The groups divide k among them in
// units of UNIT rows of w; the rows of a unit belong to one block of weights along k. The groups' sums are added up in
// shared memory, and all threads run the epilogue (epilogue.cuh) by row.
//
// Macros:
//   ROWS, LANES, WARPS   as above
//   WORD          bytes of an access to w: 4, or 1 if w is misaligned; divides the bytes of a row
//   X_VECTOR      elements of an access to x; divides k and 8
//   WIDTH         elements of an access to y, the residual and the column vectors; divides n and the block's columns
//   and those of nbits.cuh
#include "nbits.cuh"
#include "finish_rows.cuh"

constexpr int THREADS = 32 * WARPS, EACH = WORD * 8 / BITS, TILE_N = LANES * EACH;
constexpr int UNIT = BLOCK_SIZE < 32 ? BLOCK_SIZE : 32;  // rows of w in a unit, which is at most a block of k
constexpr int UNITS = (K + UNIT - 1) / UNIT, OWNERS = WARPS * (32 / LANES);
constexpr int STEP = 8;  // rows of w that a lane loads before it multiplies any
constexpr int SCALE_VECTOR = WORD == 1 || ONE_SCALE ? 1 : EACH < 16 / int(sizeof(T)) ? EACH : 16 / int(sizeof(T));
static_assert(ZEROS < 2, "DequantizeLinear has zero points of the weights' type");
static_assert(N % WIDTH == 0 && TILE_N % WIDTH == 0, "vectors end with a block's columns");
static_assert(UNIT % STEP == 0 && STEP % X_VECTOR == 0 && K % X_VECTOR == 0, "vectors of x end with steps and with k");

// Returns element `index` of a word minus the same element of a word of zero points, or minus ZERO. The last mantissa
// bit of the float 2^23 has the value 1. So its bits | q are the float 2^23 + q, and the difference of two such floats
// is exact.
__device__ __forceinline__ float difference(unsigned word, unsigned zeros, int index) {
    if constexpr (FLOAT8) return number(word >> (index * BITS) & QUANT_MASK);
    constexpr unsigned LEAD_OF_ONES = 0x4b000000u;  // 2^23
    const unsigned zero = ZEROS == 0 ? ZERO : zeros >> (index * BITS) & QUANT_MASK;
    return __uint_as_float(word >> (index * BITS) & QUANT_MASK | LEAD_OF_ONES) - __uint_as_float(zero | LEAD_OF_ONES);
}

// Adds a lane's part of the products to `sums`: `rows` rows of x times EACH columns of w, from `column` on.
__device__ __forceinline__ void add_units(float (&sums)[ROWS][EACH], const Quantized& quantized, int columns,
                                          const T* x, int rows, int column, int owner) {
    const int pitch = columns * BITS / 8;
    const unsigned char* from = quantized.w + column * BITS / 8;
#pragma unroll 1
    for (int unit = owner; unit < UNITS; unit += OWNERS) {
        const int block = unit * UNIT / BLOCK_SIZE;
        const long long at = (long long)block * columns + column;  // index of the first scale and zero point
        float scales[EACH], own[ROWS][EACH] = {};
        unsigned zeros = 0;
        if constexpr (ZEROS == 1)
            zeros = load_elements<WORD>(static_cast<const unsigned char*>(quantized.zeros) + at * BITS / 8);
#pragma unroll
        for (int i = 0; i < EACH; i += SCALE_VECTOR) {
            float some[SCALE_VECTOR];
            unpack(load_cached<SCALE_VECTOR, WEIGHTS_CONSTANT>(quantized.scale_at(at + i)), some);
#pragma unroll
            for (int j = 0; j < SCALE_VECTOR; ++j) scales[i + j] = some[j];
        }
#pragma unroll
        for (int first = unit * UNIT; first < unit * UNIT + UNIT; first += STEP) {
            if (first >= K) break;
            unsigned words[STEP];
#pragma unroll
            for (int i = 0; i < STEP; ++i)
                words[i] = load_elements<WORD>(from + (long long)min(first + i, K - 1) * pitch);
            wait_for_predecessor();
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                float values[STEP] = {};
#pragma unroll
                for (int v = 0; v < STEP; v += X_VECTOR) {
                    float some[X_VECTOR];
                    if (i >= rows || first + v >= K) continue;
                    unpack(load_cached<X_VECTOR>(x + (long long)i * K + first + v), some);
#pragma unroll
                    for (int j = 0; j < X_VECTOR; ++j) values[v + j] = some[j];
                }
#pragma unroll
                for (int k = 0; k < STEP; ++k)
#pragma unroll
                    for (int c = 0; c < EACH; ++c)
                        own[i][c] = fmaf(values[k], difference(words[k], zeros, c), own[i][c]);
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int c = 0; c < EACH; ++c) sums[i][c] = fmaf(own[i][c], scales[c], sums[i][c]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    nbits_columns(const T* x, const __grid_constant__ Products products, const T* residual, int m PROGRAM_PARAMETERS) {
    __shared__ __align__(16) float partial[WARPS][ROWS][WEIGHTS * TILE_N];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = blockIdx.y * ROWS, rows = min(m - row, ROWS);
    const Tile<TILE_N> tile(products, blockIdx.x);
    const ProductOperands& own = tile.own;
    const int first = tile.first, column = min(first + lane % LANES * EACH, tile.columns - EACH);
    release_successor();
    if constexpr (!WEIGHTS_CONSTANT) wait_for_predecessor();
#pragma unroll
    for (int weight = 0; weight < WEIGHTS; ++weight) {
        float sums[ROWS][EACH] = {};
        const Quantized& quantized = weight ? products.of[WEIGHTS - 1].quantized : own.quantized;
        add_units(sums, quantized, tile.columns, x + (long long)row * K, rows, column,
                  warp * (32 / LANES) + lane / LANES);
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int c = 0; c < EACH; ++c) {
#pragma unroll
                for (int offset = 16; offset >= LANES; offset /= 2)
                    sums[i][c] += __shfl_xor_sync(0xffffffffu, sums[i][c], offset);
                if (lane < LANES) partial[warp][i][weight * TILE_N + lane * EACH + c] = sums[i][c];
            }
    }
    wait_for_predecessor();
    __syncthreads();
    const Epilogue epilogue{own.bias,           products.of[WEIGHTS - 1].bias, nullptr, residual, own.y, 0.0f, 0.0f,
                            {PROGRAM_ARGUMENTS}};
    const auto sums_of = [&](int i, int j, float (&values)[WIDTH], float (&ups)[WIDTH]) {
#pragma unroll
        for (int v = 0; v < WIDTH; ++v) {
            values[v] = ups[v] = 0.0f;
#pragma unroll
            for (int other = 0; other < WARPS; ++other) {
                values[v] += partial[other][i][j + v];
                if constexpr (GATED) ups[v] += partial[other][i][TILE_N + j + v];
            }
        }
    };
    finish_rows<TILE_N, THREADS, ROWS>(epilogue, row, rows, first, tile.columns, sums_of);
}
