// Products of few rows of x in fp16 or bf16 with weights of 4 or 8 bits, by mma.sync, from sm_80 on.
//
//   y = x w^T + bias, where nbits.cuh says what w is; a gated product has a second weight
//
// The time is that of reading the weights once, so they go from memory to registers in accesses of 16 bytes, AHEAD
// windows of k in flight for each warp, and become numbers there.
//   1. WARPS warps divide k. In a window of k, four lanes share a row of w: each loads 16 bytes, EACH weights.
//   2. The weights are mma's left operand: 16 rows of w, and 16 of the window's k, so that tiles of 8 rows of x suffice.
//      The order of k within a window is free as long as both operands agree: a lane multiplies the weights that it
//      has loaded, so that no weight passes through shared memory.
//   3. A weight becomes a number of type T: its bits complete the mantissa of 1024 (fp16) or 128 (bf16), from which the
//      zero point is subtracted, exactly; the product with the scale rounds once.
//   4. The warps' sums meet in shared memory, and all threads run the epilogue (epilogue.cuh) by row.
// The columns of a second weight are further tiles of mma in the same windows, so that a gated product of 16 columns
// costs what a product of 32 does.
//
// Macros:
//   TILE_M   rows of x, a multiple of 8    TILE_N   columns of y, a multiple of 16
//   WARPS, AHEAD   as above
//   WIDTH    elements of an access to y, the residual and the column vectors; divides n and TILE_N
//   and those of nbits.cuh
#include "nbits.cuh"
#include "gemm_multiply.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int EACH = 128 / BITS;  // weights per access
constexpr int WINDOW = 4 * EACH;  // of k
constexpr int WINDOWS = (K + WINDOW - 1) / WINDOW;
constexpr int EACH_N = TILE_N / 16;  // mma tiles of one weight
constexpr int MMA_N = EACH_N * WEIGHTS, MMA_M = TILE_M / 8;
constexpr int SCALES = BLOCK_SIZE < EACH ? EACH / BLOCK_SIZE : 1;  // per access
constexpr int PITCH = MMA_N * 16 + 4;  // floats of a row of sums: stores of a warp fall into different banks
template <class A, class B> constexpr bool IS = false;
template <class A> constexpr bool IS<A, A> = true;
constexpr bool HALF = IS<T, f16>;
static_assert(BITS == 4 || BITS == 8, "see above");
static_assert(N % WIDTH == 0 && TILE_N % WIDTH == 0, "vectors end with a tile");
static_assert(K % 8 == 0 && W_ROW_BYTES % 16 == 0, "rows are whole accesses");
static_assert(AHEAD % 2 == 0, "two windows of x take turns");

// ---- pairs of numbers ----------------------------------------------------------------------------------------------

__device__ __forceinline__ unsigned select(unsigned a, unsigned b, unsigned selector) {
    return __byte_perm(a, b, selector);
}

__device__ __forceinline__ unsigned twice(unsigned bits) { return select(bits, bits, 0x1010); }

__device__ __forceinline__ unsigned fused(f16, unsigned a, unsigned b, unsigned c) {  // a * b + c
    unsigned d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
__device__ __forceinline__ unsigned fused(bf16, unsigned a, unsigned b, unsigned c) {
    unsigned d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

constexpr unsigned ONES = HALF ? 0x3c003c00u : 0x3f803f80u;
constexpr unsigned SIXTEENTHS = 0x2c002c00u;                 // 1 / 16 in fp16
constexpr unsigned MINUS_ZEROS = 0x80008000u;
constexpr unsigned LEAD = HALF ? 0x64006400u : 0x43004300u;  // 1024, or 128: the last bit of the mantissa counts ones

__device__ __forceinline__ unsigned pair_of(float value) {
    const float both[2] = {value, value};
    return narrow(T(), both);
}

// What turns the bits of a block's weights into numbers.
struct BlockScale {
    unsigned scale;   // twice
    unsigned offset;  // minus the zero point and what LEAD adds, twice
    unsigned high;    // minus the zero point and 64, twice: for weights that count sixteenths
    unsigned zero;    // minus the zero point, twice, where zero points have the type T
};

__device__ __forceinline__ BlockScale block_scale(unsigned scale, unsigned zero) {
    constexpr float BASE = HALF ? 1024.0f : 128.0f;
    if constexpr (ZEROS == 2)
        return {twice(scale), pair_of(-BASE), pair_of(-64.0f), twice(zero) ^ 0x80008000u};
    const float number = static_cast<float>(zero);
    if constexpr (BITS == 8 && !HALF) return {twice(scale), 0, 0, pair_of(-number)};  // which adds to integers
    return {twice(scale), pair_of(-BASE - number), pair_of(-64.0f - number), 0};
}

__device__ __forceinline__ unsigned scaled(unsigned number, const BlockScale& block) {
    if constexpr (ZEROS == 2) number = fused(T(), number, ONES, block.zero);
    return fused(T(), number, block.scale, MINUS_ZEROS);
}

// The numbers of a word of weights as pairs. Of 4 bits: (0, 4), (1, 5), (2, 6), (3, 7); of 8 bits: (0, 1), (2, 3).
__device__ __forceinline__ void numbers(unsigned word, const BlockScale& block, unsigned (&to)[16 / BITS]) {
    if constexpr (BITS == 8 && !HALF) {  // bf16 has 8 bits of mantissa, LEAD included
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float both[2], scales[2], zeros[2];
            widen(T(), block.scale, scales);
            widen(T(), block.zero, zeros);
#pragma unroll
            for (int j = 0; j < 2; ++j)
                both[j] = (static_cast<float>(word >> (16 * i + 8 * j) & 255u) + zeros[j]) * scales[j];
            to[i] = narrow(T(), both);
        }
    } else if constexpr (BITS == 8) {
        to[0] = scaled(fused(T(), select(word, LEAD, 0x5150), ONES, block.offset), block);
        to[1] = scaled(fused(T(), select(word, LEAD, 0x5352), ONES, block.offset), block);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool in_sixteenths = HALF && i % 2;
            const unsigned shifted = word >> (HALF ? i / 2 * 8 : i * 4);
            const unsigned bits = shifted & (in_sixteenths ? 0x00f000f0u : 0x000f000fu) | LEAD;
            to[i] = in_sixteenths ? fused(T(), bits, SIXTEENTHS, block.high) : fused(T(), bits, ONES, block.offset);
            to[i] = scaled(to[i], block);
        }
    }
}

// ---- a window of k -------------------------------------------------------------------------------------------------

// A lane's weights of a window: of MMA_N tiles of 16 columns, two rows of w each.
struct Weights {
    unsigned words[MMA_N][2][4];
    unsigned scales[MMA_N][2][SCALES], zeros[MMA_N][2][SCALES];

    __device__ __forceinline__ void load(const Quantized (&weights)[WEIGHTS], int column, int window) {
        const int part = threadIdx.x % 4, byte = window * 64 + part * 16;
        const bool inside = byte < W_ROW_BYTES;
#pragma unroll
        for (int n = 0; n < MMA_N; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Quantized& quantized = weights[n / EACH_N];
                const int own = min(column + n % EACH_N * 16 + half * 8, quantized.columns - 1);
                const char* from = reinterpret_cast<const char*>(quantized.row(own)) + (inside ? byte : 0);
                load_bytes<Use::ONCE, 16>(from, words[n][half]);
#pragma unroll
                for (int i = 0; i < SCALES; ++i) {
                    const int block = min((window * WINDOW + part * EACH) / BLOCK_SIZE + i, BLOCKS_K - 1);
                    scales[n][half][i] = quantized.scale_bits(own, block);
                    zeros[n][half][i] = ZEROS == 2 ? quantized.zero_bits(own, block) : quantized.zero(own, block);
                }
            }
    }
};

using Sums = float[MMA_N][MMA_M][4];

// A lane's elements of x for a window: EACH of one row in each tile of 8 rows. `x` points to the lane's row of the first
// tile, which has `rows` rows from there on; rows and columns beyond the last are zeros.
struct Rows {
    Pack<T, 8> packs[MMA_M][EACH / 8];

    __device__ __forceinline__ void load(const T* x, int rows, int window) {
        const int lane = threadIdx.x % 32, k = window * WINDOW + lane % 4 * EACH;
#pragma unroll
        for (int m = 0; m < MMA_M; ++m)
#pragma unroll
            for (int i = 0; i < EACH / 8; ++i) {
                packs[m][i] = {};
                if (lane / 4 + m * 8 < rows && k + i * 8 < K)
                    packs[m][i] = load_cached<8>(x + (long long)m * 8 * K + k + i * 8);
            }
    }
};

__device__ __forceinline__ void multiply_window(Sums& sums, const Weights& weights, const Rows& rows) {
    constexpr int STEP = 32 / BITS;  // weights per word
#pragma unroll
    for (int at = 0; at < 4; ++at) {
        const int of_block = at * STEP / BLOCK_SIZE % SCALES, eight = at * STEP / 8, first = at * STEP % 8 / 2;
#pragma unroll
        for (int n = 0; n < MMA_N; ++n) {
            unsigned pairs[2][16 / BITS];
#pragma unroll
            for (int half = 0; half < 2; ++half)
                numbers(weights.words[n][half][at] ^ SIGNS,
                        block_scale(weights.scales[n][half][of_block], weights.zeros[n][half][of_block]), pairs[half]);
#pragma unroll
            for (int i = 0; i < 16 / BITS; i += 2) {
                const unsigned a[4] = {pairs[0][i], pairs[1][i], pairs[0][i + 1], pairs[1][i + 1]};
#pragma unroll
                for (int m = 0; m < MMA_M; ++m) {
                    const auto& q = rows.packs[m][eight].words;
                    if constexpr (BITS == 8) multiply(T(), sums[n][m], a, q[first], q[first + 1]);
                    else
                        multiply(T(), sums[n][m], a, select(q[i / 2], q[i / 2 + 2], 0x5410),
                                 select(q[i / 2], q[i / 2 + 2], 0x7632));
                }
            }
        }
    }
}

// Multiplies windows `from` to `to`. Weights are AHEAD windows ahead; rows of x, which other blocks read as well, one
// window ahead while registers hold two.
__device__ __forceinline__ void multiply_windows(Sums& sums, const Quantized (&weights)[WEIGHTS], const T* x, int rows,
                                                 int column, int from, int to) {
    constexpr int BUFFERS = MMA_M == 1 ? 2 : 1;
    Weights ahead[AHEAD];
    Rows next[BUFFERS];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
        if (from + i < to) ahead[i].load(weights, column, from + i);
    wait_for_predecessor();
    if (BUFFERS == 2 && from < to) next[0].load(x, rows, from);
#pragma unroll 1
    for (int window = from; window < to; window += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int loaded = window + i + BUFFERS - 1;
            if (loaded < to) next[(i + 1) % BUFFERS].load(x, rows, loaded);
            if (window + i < to) multiply_window(sums, ahead[i], next[i % BUFFERS]);
            if (window + i + AHEAD < to) ahead[i].load(weights, column, window + i + AHEAD);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    nbits_mma(const T* x, ALL_PARAMETERS, const T* residual, int m PROGRAM_PARAMETERS) {
    __shared__ __align__(16) float partial[WARPS][TILE_M][PITCH];
    const ProductOperands products[] = {ALL_PRODUCTS};
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = blockIdx.y * TILE_M, rows = min(m - row, TILE_M);
    int tile = blockIdx.x;
    const ProductOperands own = select_product(products, find_product<TILE_N>(products, tile));
    const int first = tile * TILE_N, columns = own.quantized.columns;
#if GATED
    const Quantized weights[] = {own.quantized, products[1].quantized};
#else
    const Quantized weights[] = {own.quantized};
#endif
    release_successor();
    if constexpr (!WEIGHTS_CONSTANT) wait_for_predecessor();
    Sums sums = {};
    multiply_windows(sums, weights, x + (long long)(row + lane / 4) * K, rows, first + lane / 4,
                     WINDOWS * warp / WARPS, WINDOWS * (warp + 1) / WARPS);
#pragma unroll
    for (int n = 0; n < MMA_N; ++n)
#pragma unroll
        for (int i = 0; i < MMA_M * 4; ++i)
            partial[warp][i / 4 * 8 + lane % 4 * 2 + i % 2][n * 16 + lane / 4 + i % 4 / 2 * 8] = sums[n][i / 4][i % 4];
    __syncthreads();
    const Epilogue epilogue{own.bias, products[WEIGHTS - 1].bias, nullptr, residual, own.y, 0.0f, 0.0f,
                            {PROGRAM_ARGUMENTS}};
    constexpr int VECTORS = TILE_N / WIDTH;
    for (int at = threadIdx.x; at < rows * VECTORS; at += THREADS) {
        const int i = at / VECTORS, j = at % VECTORS * WIDTH;
        if (first + j >= columns) continue;
        float values[WIDTH] = {}, ups[WIDTH] = {};
#pragma unroll
        for (int v = 0; v < WIDTH; ++v)
#pragma unroll
            for (int other = 0; other < WARPS; ++other) {
                values[v] += partial[other][i][j + v];
                if constexpr (GATED) ups[v] += partial[other][i][TILE_N + j + v];
            }
        epilogue.finish(values, ups, (long long)(row + i), first + j, columns);
    }
}
