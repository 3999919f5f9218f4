// Products of two computed tensors of 8 bits, for each element of a batch and each head. Integers are multiplied by
// mma.sync m16n8k32; float8 numbers (e4m3) become pairs of fp16, which is exact, and are multiplied by m16n8k16.
//
//   y[m, n] = sum over k of (x[m, k] - x_zero) * (w[k, n] - w_zero), times x_scale * w_scale
//
// A block computes TILE_M x TILE_N of y. Its warps multiply stages of TILE_K bytes along k, which cp.async copies to
// shared memory STAGES - 1 stages ahead. mma reads both operands along k: a w of (k, n) is loaded to registers in blocks
// of 4 x 4 bytes, which are transposed on their way to shared memory. If there are zero points, a thread adds up a row
// of a stage, so that the sums of x and w, which the zero points multiply, cost no further reads of memory.
//
// The rows of w's fragments can have any order of y's columns: a lane gets eight neighbouring columns of y from four
// mmas, so that it stores eight bytes, and four lanes a sector of L2.
//
// Sizes and strides are arguments. Where all of them are multiples of an access, and the addresses too, copies have 16
// bytes (4 for a w of (k, n)); otherwise bytes are loaded one by one.
//
// Macros:
//   T            type of the scales and of y    X_T, W_T    s8 or u8, or both e4m3      FLOAT8    1: they are e4m3
//   TILE_N       128 or 64                      STAGES      stages of the ring
//   ORDER_NK     1: w is (n, k); 0: (k, n)      X_ZERO, W_ZERO    1: x (w) has a zero point
//   ALL_ALIGNED  1: y and the operands of the program begin at multiples of 16 bytes
#include "types.cuh"
#include "gemm_multiply.cuh"
#include "head_tensor.cuh"
#include "program.cuh"

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)

constexpr int TILE_M = 128, TILE_K = 64, THREADS = 256, WARPS_N = 2;
constexpr int MMA_M = 2, GROUPS = TILE_N / WARPS_N / 32;  // a warp's tiles of 16 rows, and of 32 columns
constexpr int W_ONES = 0x01010101;

// The offset of a row of a stage. Eight rows that ldmatrix reads at once, eight neighbours or four pairs of neighbours,
// lie in different banks.
__device__ __forceinline__ constexpr int row_at(int row) { return row * 80 + row / 8 * 32; }

constexpr int X_BYTES = row_at(TILE_M), STAGE = X_BYTES + row_at(TILE_N);

// The sizes, as an argument; batched.py writes the fields in this order.
struct Sizes {
    int m, n, k, heads, repeats, tiles_n;  // each head of w serves `repeats` heads of x
};

struct Scales {
    const T *x, *w;
    const X_T* x_zero;
    const W_T* w_zero;
};

#if FLOAT8
using Sum = float;
// pair_of divides numbers by this.
#if __CUDA_ARCH__ >= 890
constexpr float UNIT = 1.0f;
#else
constexpr float UNIT = 256.0f;
#endif

// Returns the float8 numbers of bytes FIRST and FIRST + 1 of a word, divided by UNIT, as a pair of fp16.
template <int FIRST>
__device__ __forceinline__ u32 pair_of(u32 bytes) {
#if __CUDA_ARCH__ >= 890
    u32 pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((unsigned short)(bytes >> 8 * FIRST)));
    return pair;
#else
    // The bits of a number are those of an fp16 whose exponent bias is 8 larger. NaN has 1 in all bits but the sign.
    const u32 high = __byte_perm(bytes, 0, FIRST ? 0x3424 : 0x1404);
    const u32 nan = ((high & 0x7f007f00u) + 0x01000100u) & 0x80008000u;
    return (high >> 1 & 0x3f803f80u) | (high & 0x80008000u) | (nan - (nan >> 6));
#endif
}

// Elements along k can have any order. The four of a lane's word are its two pairs along the k of one mma.
__device__ __forceinline__ void multiply_bytes(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 first[4] = {pair_of<0>(a[0]), pair_of<0>(a[1]), pair_of<2>(a[0]), pair_of<2>(a[1])};
    const u32 second[4] = {pair_of<0>(a[2]), pair_of<0>(a[3]), pair_of<2>(a[2]), pair_of<2>(a[3])};
    multiply(f16(), c, first, pair_of<0>(b0), pair_of<2>(b0));
    multiply(f16(), c, second, pair_of<0>(b1), pair_of<2>(b1));
}
#else
using Sum = int;
constexpr float UNIT = 1.0f;

__device__ __forceinline__ void multiply_bytes(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." TEXT(X_T) "." TEXT(W_T) ".s32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}
#endif

// Returns whether all strides, the size of an access's axis and the address are multiples of `bytes`.
template <class E>
__device__ __forceinline__ bool is_wide(const HeadTensor<E>& of, int size, int bytes) {
    return (reinterpret_cast<u64>(of.data) | of.batch | of.head | of.row | size) % bytes == 0;
}

// Copies a part of a stage, COUNT rows of an operand whose rows lie along k, from row `first` of `rows` and column
// `column` of `columns` on; the rest becomes zeros.
template <int COUNT, class E>
__device__ __forceinline__ void copy_rows(char* memory, int to, const E* from, i64 pitch, int first, int rows,
                                          int column, int columns, bool wide) {
#pragma unroll
    for (int i = threadIdx.x; i < COUNT * TILE_K / 16; i += THREADS) {
        const int row = i / (TILE_K / 16), at = column + i % (TILE_K / 16) * 16;
        const int target = to + row_at(row) + i % (TILE_K / 16) * 16;
        const E* source = from + (first + row) * pitch + at;
        const bool inside = first + row < rows;
        if (wide) {
            const bool all = inside && at < columns;
            copy_async<16>(shared_address(memory) + target, reinterpret_cast<const char*>(all ? source : from),
                           all ? 16 : 0);
        } else {
            u32 words[4] = {};
            for (int j = 0; j < 16; ++j)
                if (inside && at + j < columns) words[j / 4] |= u32(u8(source[j])) << j % 4 * 8;
            store_chunk(shared_address(memory) + target, words);
        }
    }
}

// A thread's share of a stage of a w of (k, n): blocks of four rows and four columns.
struct Blocks {
    static constexpr int EACH = TILE_N * TILE_K / 16 / THREADS;
    u32 words[EACH][4];

    __device__ __forceinline__ void load(const W_T* from, i64 pitch, int k, int n, const Sizes& of, bool wide) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int index = i * THREADS + threadIdx.x, column = n + index / 16 * 4;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int row = k + index % 16 * 4 + j;
                const W_T* source = from + row * pitch + column;
                words[i][j] = 0;
                if (row >= of.k) continue;
                if (wide) {
                    if (column < of.n) words[i][j] = load_cached<4>(source).words[0];
                } else {
                    for (int byte = 0; byte < 4; ++byte)
                        if (column + byte < of.n) words[i][j] |= u32(u8(source[byte])) << byte * 8;
                }
            }
        }
    }
    // Stores the blocks transposed, so that four bytes along k are one word.
    __device__ __forceinline__ void store(char* memory, int to) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int index = i * THREADS + threadIdx.x, column = index / 16 * 4;
            const u32(&from)[4] = words[i];
            const u32 low[2] = {__byte_perm(from[0], from[1], 0x5140), __byte_perm(from[2], from[3], 0x5140)};
            const u32 high[2] = {__byte_perm(from[0], from[1], 0x7362), __byte_perm(from[2], from[3], 0x7362)};
            const u32 turned[4] = {__byte_perm(low[0], low[1], 0x5410), __byte_perm(low[0], low[1], 0x7632),
                                   __byte_perm(high[0], high[1], 0x5410), __byte_perm(high[0], high[1], 0x7632)};
#pragma unroll
            for (int j = 0; j < 4; ++j)
                *reinterpret_cast<u32*>(memory + to + row_at(column + j) + index % 16 * 4) = turned[j];
        }
    }
};

// The operands of a block, and the copies of their stages.
struct Operands {
    const X_T* x;
    const W_T* w;
    i64 x_pitch, w_pitch;
    int row, column;  // the first of the block
    bool x_wide, w_wide;
    const Sizes& of;
    Blocks blocks;

    __device__ __forceinline__ void begin(char* memory, int tile, int tiles) {
        if (tile < tiles) {
            const int to = tile % STAGES * STAGE, k = tile * TILE_K;
            copy_rows<TILE_M>(memory, to, x, x_pitch, row, of.m, k, of.k, x_wide);
            if constexpr (ORDER_NK) copy_rows<TILE_N>(memory, to + X_BYTES, w, w_pitch, column, of.n, k, of.k, w_wide);
            else blocks.load(w, w_pitch, k, column, of, w_wide);
        }
        commit_copies();
    }
    __device__ __forceinline__ void end(char* memory, int tile, int tiles) const {
        if (!ORDER_NK && tile < tiles) blocks.store(memory, tile % STAGES * STAGE + X_BYTES);
    }
};

// Returns the sum of the TILE_K bytes of a row of a stage; E says whether they are signed.
template <class E>
__device__ __forceinline__ int sum_of_row(const char* row) {
    constexpr bool SIGNED = E(-1) < E(0);
    int sum = 0;
#pragma unroll
    for (int i = 0; i < TILE_K / 4; ++i) {
        const u32 word = reinterpret_cast<const u32*>(row)[i];
        sum = __dp4a(int(SIGNED ? word : word ^ 0x80808080u), W_ONES, sum);
    }
    return SIGNED ? sum : sum + 128 * TILE_K;
}

struct Accumulators {
    Sum at[MMA_M][GROUPS][4][4];

    // Adds the products of a stage.
    __device__ __forceinline__ void add(u32 stage) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int row = warp / WARPS_N * MMA_M * 16, column = warp % WARPS_N * GROUPS * 32;
        const int pair = lane % 8 / 2 * 8 + lane % 2;  // the column of y for a row of a fragment of w
#pragma unroll
        for (int step = 0; step < TILE_K / 32; ++step) {
            u32 x[MMA_M][4];
#pragma unroll
            for (int i = 0; i < MMA_M; ++i)
                load_matrices<false>(x[i], stage + row_at(row + i * 16 + lane % 16) + step * 32 + lane / 16 * 16);
#pragma unroll
            for (int group = 0; group < GROUPS; ++group)
#pragma unroll
                for (int j = 0; j < 4; j += 2) {
                    u32 w[4];
                    load_matrices<false>(w, stage + X_BYTES + row_at(column + group * 32 + pair + 2 * (j + lane / 16)) +
                                                step * 32 + lane / 8 % 2 * 16);
#pragma unroll
                    for (int i = 0; i < MMA_M; ++i) {
                        multiply_bytes(at[i][group][j], x[i], w[0], w[1]);
                        multiply_bytes(at[i][group][j + 1], x[i], w[2], w[3]);
                    }
                }
        }
    }
};

// Applies the program to eight neighbouring columns of a row, and stores them; `left` of them lie in y.
template <bool ALIGNED>
__device__ __forceinline__ void finish(const Program& program, const Program::OfRow& of_row, const program::Located& to,
                                       T* y, int column, float (&values)[8], int left) {
    Program::OfColumns<8> of_columns;
    Program::OfElements<8> of_elements;
    program.template load<ALIGNED>(of_columns, to.column + column, left);
    program.template load<ALIGNED>(of_elements, to.row, to.column + column, to.at + column, left);
    const float residual[8] = {};
    program.template apply<ALIGNED>(values, residual, of_row, of_columns, of_elements, to.at + column, left);
    if constexpr (STORES_Y) {
        if (ALIGNED) {
            store<false>(y + column, values);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float one[1] = {values[i]};
                if (i < left) store<false>(y + column + i, one);
            }
        }
    }
}

// Converts a thread's sums to numbers and stores them. `of_rows` has, for each row of x and then of w in the tile, its sum
// times the zero point of the other operand; `zeros` is the product of both zero points, times k.
__device__ __forceinline__ void store_results(const Accumulators& sums, const int* of_rows, int zeros, float factor,
                                              const HeadTensor<T>& y, const Program& program, int batch, int head,
                                              int row, int column, const Sizes& of) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first_row = warp / WARPS_N * MMA_M * 16 + lane / 4;
    const int first_column = warp % WARPS_N * GROUPS * 32 + lane % 4 * 8;
    const bool aligned = ALL_ALIGNED && (y.batch | y.head | y.row | of.n) % 8 == 0;
#pragma unroll
    for (int i = 0; i < 2 * MMA_M; ++i) {
        const int at = first_row + i * 8;
        if (row + at >= of.m) continue;
        const auto located = program.locate(batch, head, row + at);
        Program::OfRow row_operands;
        program.load(row_operands, located.row, true);
        T* to = y.at(batch, head) + (row + at) * y.row;
        const int of_this_row = zeros - (W_ZERO ? of_rows[at] : 0);
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            const int within = first_column + group * 32, left = of.n - column - within;
            if (left <= 0) continue;
            float values[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                Sum sum = sums.at[i / 2][group][j / 2][i % 2 * 2 + j % 2];
                if constexpr (X_ZERO || W_ZERO) sum += of_this_row - (X_ZERO ? of_rows[TILE_M + within + j] : 0);
                values[j] = float(sum) * factor;
            }
            if (aligned) finish<true>(program, row_operands, located, to, column + within, values, 8);
            else finish<false>(program, row_operands, located, to, column + within, values, min(left, 8));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    quantized_matmul(const __grid_constant__ HeadTensor<const X_T> x, const __grid_constant__ HeadTensor<const W_T> w,
                     const __grid_constant__ HeadTensor<T> y, const __grid_constant__ Scales scales,
                     const __grid_constant__ Sizes of PROGRAM_PARAMETERS) {
    extern __shared__ __align__(128) char ring[];
    wait_for_predecessor();
    release_successor();
    const int batch = blockIdx.y / of.heads, head = blockIdx.y - batch * of.heads;
    const int row = blockIdx.x / of.tiles_n * TILE_M, column = blockIdx.x % of.tiles_n * TILE_N;
    const int tiles = (of.k + TILE_K - 1) / TILE_K;
    Operands operands{x.at(batch, head),
                      w.at(batch, head / of.repeats),
                      x.row,
                      w.row,
                      row,
                      column,
                      is_wide(x, of.k, 16),
                      ORDER_NK ? is_wide(w, of.k, 16) : is_wide(w, of.n, 4),
                      of,
                      {}};
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) operands.begin(ring, i, tiles), operands.end(ring, i, tiles);
    Accumulators sums = {};
    int of_row = 0;  // the sum of row threadIdx.x of x, or of row threadIdx.x - TILE_M of w
    const bool sums_x = threadIdx.x < TILE_M, sums_w = !sums_x && threadIdx.x < TILE_M + TILE_N;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        wait_for_groups<STAGES - 2>();
        __syncthreads();
        operands.begin(ring, tile + STAGES - 1, tiles);
        const int stage = tile % STAGES * STAGE;
        if (W_ZERO && sums_x) of_row += sum_of_row<X_T>(ring + stage + row_at(threadIdx.x));
        if (X_ZERO && sums_w) of_row += sum_of_row<W_T>(ring + stage + X_BYTES + row_at(threadIdx.x - TILE_M));
        sums.add(shared_address(ring) + stage);
        operands.end(ring, tile + STAGES - 1, tiles);
    }
    wait_for_groups<0>();
    __syncthreads();
    const int x_zero = X_ZERO ? int(*scales.x_zero) : 0, w_zero = W_ZERO ? int(*scales.w_zero) : 0;
    int* of_rows = reinterpret_cast<int*>(ring);
    if (X_ZERO || W_ZERO) {
        if (threadIdx.x < TILE_M + TILE_N) of_rows[threadIdx.x] = of_row * (sums_x ? w_zero : x_zero);
        __syncthreads();
    }
    float scale[2][1];
    unpack(load_cached<1>(scales.x), scale[0]);
    unpack(load_cached<1>(scales.w), scale[1]);
    const float factor = scale[0][0] * scale[1][0] * (UNIT * UNIT);
    const int zeros = of.k * x_zero * w_zero;
    store_results(sums, of_rows, zeros, factor, y, {PROGRAM_ARGUMENTS}, batch, head, row, column, of);
}
