// y = activation(x w + bias) [* (x up + up_bias)] * column_scale + residual for a few rows of x: dot products in fp32.
//
// The time is that of reading w once, so it goes from memory to registers in 16-byte accesses, many in flight. Where w
// is n x k, a warp takes LOADS columns and its lanes divide k, UNROLL vectors apart; where it is k x n, LANES lanes lie
// along n and each takes LOADS rows in a row, so that x is read in vectors too. Warps that divide k add their sums in a
// fixed order.
//
//   ROWS      of x, at most    WARPS_N, WARPS_K  of a block    LOADS, LANES, UNROLL  as above
//   VECTOR    elements of an access to w; divides its rows
//   X_VECTOR  of one to x; divides k, and LOADS where w is k x n
//   WEIGHTS_CONSTANT  1: nothing before this kernel writes w, so that it is read before all else
//   MIN_BLOCKS  on a multiprocessor: says to the compiler that registers are there for all loads
//   and the constants of gemm_epilogue.cuh
#include "types.cuh"
#include "activations.cuh"
#include "gemm_epilogue.cuh"

constexpr int THREADS = 32 * WARPS_N * WARPS_K;
constexpr int SUMS = TRANSPOSED ? LOADS : VECTOR;  // of a thread, for each row of x
using Sums = float[PARTS][ROWS][SUMS];

// Elements from `from` on, or zeros. What is not there is replaced by what is at `instead`: a load under a condition
// waits for the one before it.
template <int COUNT, bool KEEP>
__device__ __forceinline__ Pack<T, COUNT> load_if(bool there, const T* from, const T* instead) {
    const T* place = there ? from : instead;
    Pack<T, COUNT> loaded = KEEP ? load_cached<COUNT>(place) : load_once<COUNT>(place);
#pragma unroll
    for (unsigned& word : loaded.words) word = there ? word : 0;
    return loaded;
}

// The operands from a thread's first row and column on, and how many rows and columns are left; `first`: of all of w.
struct Operands {
    const T *x, *w[PARTS], *first[PARTS];
    int rows, columns;

    // Sums of rows that are not there are not stored, so the last row will do for them.
    template <int COUNT>
    __device__ __forceinline__ Pack<T, COUNT> load_x(int row, int k, bool inside) const {
        return load_if<COUNT, true>(inside, x + i64(ROWS == 1 ? 0 : min(row, rows - 1)) * K + k, x);
    }

    template <bool WHOLE>
    __device__ __forceinline__ Pack<T, VECTOR> load_w(int part, int column, i64 offset, bool inside) const {
        return load_if<VECTOR, false>(inside && (WHOLE || column < columns), w[part] + offset, first[part]);
    }
};

// Sums over the lanes of a warp that have the same columns; every lane gets them.
template <int FIRST>
__device__ __forceinline__ void add_lanes(Sums& sums) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < SUMS; ++j)
#pragma unroll
                for (int offset = FIRST; offset < 32; offset *= 2)
                    sums[part][i][j] += __shfl_xor_sync(0xffffffffu, sums[part][i][j], offset);
}

template <class Put>
__device__ __forceinline__ void put_each(const Sums& sums, int column, Put put) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < SUMS; ++j) put(part, i, column + j, sums[part][i][j]);
}

struct AlongK {
    static constexpr int COLUMNS_EACH = LOADS;
    static constexpr int STRIDE = WARPS_K * 32 * VECTOR, TURN = UNROLL * STRIDE;
    static constexpr bool WHOLE_K = K % TURN == 0, WHOLE_N = N % (WARPS_N * COLUMNS_EACH) == 0;
    Pack<T, VECTOR> x[UNROLL][ROWS], w[UNROLL][PARTS][LOADS];

    __device__ __forceinline__ static int column(int) { return 0; }
    __device__ __forceinline__ static int depth(int warp, int lane) { return (warp * 32 + lane) * VECTOR; }

    __device__ __forceinline__ void load_weights(const Operands& operands, int k) {
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
#pragma unroll
                for (int j = 0; j < LOADS; ++j) {
                    const int at = k + u * STRIDE;
                    w[u][part][j] = operands.load_w<WHOLE_N>(part, j, i64(j) * K + at, WHOLE_K || at < K);
                }
    }

    __device__ __forceinline__ void load_rows(const Operands& operands, int k) {
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const int at = k + u * STRIDE;
                x[u][i] = operands.load_x<VECTOR>(i, at, WHOLE_K || at < K);
            }
    }

    __device__ __forceinline__ void add(Sums& sums) const {
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            float rows[ROWS][VECTOR], values[VECTOR];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) unpack(x[u][i], rows[i]);
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
#pragma unroll
                for (int j = 0; j < LOADS; ++j) {
                    unpack(w[u][part][j], values);
#pragma unroll
                    for (int i = 0; i < ROWS; ++i)
#pragma unroll
                        for (int v = 0; v < VECTOR; ++v)
                            sums[part][i][j] = fmaf(rows[i][v], values[v], sums[part][i][j]);
                }
        }
    }

    template <class Put>
    __device__ __forceinline__ static void close(Sums& sums, int lane, Put put) {
        add_lanes<1>(sums);
        if (lane == 0) put_each(sums, 0, put);
    }
};

struct AlongN {
    static constexpr int COLUMNS_EACH = LANES * VECTOR;
    static constexpr int TURN = WARPS_K * (32 / LANES) * LOADS;
    static constexpr bool WHOLE_K = K % TURN == 0, WHOLE_N = N % (WARPS_N * COLUMNS_EACH) == 0;
    static constexpr int VECTORS = LOADS / X_VECTOR;
    Pack<T, X_VECTOR> x[ROWS][VECTORS];
    Pack<T, VECTOR> w[PARTS][LOADS];

    __device__ __forceinline__ static int column(int lane) { return lane % LANES * VECTOR; }
    __device__ __forceinline__ static int depth(int warp, int lane) {
        return (warp * (32 / LANES) + lane / LANES) * LOADS;
    }

    __device__ __forceinline__ void load_weights(const Operands& operands, int k) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int j = 0; j < LOADS; ++j)
                w[part][j] = operands.load_w<WHOLE_N>(part, 0, i64(k + j) * N, WHOLE_K || k + j < K);
    }

    __device__ __forceinline__ void load_rows(const Operands& operands, int k) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < VECTORS; ++j) {
                const int at = k + j * X_VECTOR;
                x[i][j] = operands.load_x<X_VECTOR>(i, at, WHOLE_K || at < K);
            }
    }

    __device__ __forceinline__ void add(Sums& sums) const {
        float rows[ROWS][VECTORS][X_VECTOR], values[VECTOR];
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < VECTORS; ++j) unpack(x[i][j], rows[i][j]);
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int j = 0; j < LOADS; ++j) {
                unpack(w[part][j], values);
#pragma unroll
                for (int i = 0; i < ROWS; ++i)
#pragma unroll
                    for (int v = 0; v < VECTOR; ++v)
                        sums[part][i][v] = fmaf(rows[i][j / X_VECTOR][j % X_VECTOR], values[v], sums[part][i][v]);
            }
    }

    template <class Put>
    __device__ __forceinline__ static void close(Sums& sums, int lane, Put put) {
        add_lanes<LANES>(sums);
        if (lane < LANES) put_each(sums, column(lane), put);
    }
};

#if TRANSPOSED
using Way = AlongK;
#else
using Way = AlongN;
#endif

constexpr int TILE = WARPS_N * Way::COLUMNS_EACH;
constexpr int TURNS = (K + Way::TURN - 1) / Way::TURN;  // of the loop over k
static_assert(TILE % WIDTH == 0, "vectors end with a tile");

// The sums of the block's first warps along k become those of all.
__device__ __forceinline__ void add_warps(float* shares) {
    constexpr int SHARE = PARTS * ROWS * TILE;
    for (int at = threadIdx.x; at < SHARE; at += THREADS) {
        float total = shares[at];
#pragma unroll
        for (int other = 1; other < WARPS_K; ++other) total += shares[other * SHARE + at];
        shares[at] = total;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
gemm_small(const T* x, const T* w, const T* up, const T* bias, const T* up_bias, const T* column_scale,
           const T* residual, T* y, float alpha, float beta, int m) {
    __shared__ __align__(16) float shares[WARPS_K][PARTS][ROWS][TILE];
    const int lane = threadIdx.x % 32, warp_n = threadIdx.x / 32 % WARPS_N, warp_k = threadIdx.x / 32 / WARPS_N;
    const int row = blockIdx.y * ROWS, tile = blockIdx.x * TILE;
    const int column = tile + warp_n * Way::COLUMNS_EACH + Way::column(lane), depth = Way::depth(warp_k, lane);

    const i64 corner = TRANSPOSED ? i64(column) * K : column;
    Operands operands{x + i64(row) * K, {w + corner}, {w}, m - row, N - column};
    if constexpr (PARTS == 2) operands.w[PARTS - 1] = up + corner, operands.first[PARTS - 1] = up;
    release_successor();
    if constexpr (!WEIGHTS_CONSTANT) wait_for_predecessor();
    Sums sums = {};
#pragma unroll 1
    for (int turn = 0; turn < TURNS; ++turn) {
        Way way;
        way.load_weights(operands, turn * Way::TURN + depth);
        wait_for_predecessor();
        way.load_rows(operands, turn * Way::TURN + depth);
        way.add(sums);
    }

    Way::close(sums, lane, [&](int part, int i, int j, float sum) {
        shares[warp_k][part][i][warp_n * Way::COLUMNS_EACH + j] = sum;
    });
    if constexpr (WARPS_K > 1) {
        __syncthreads();
        add_warps(&shares[0][0][0][0]);
    }
    __syncthreads();
    const Epilogue epilogue{bias, up_bias, column_scale, residual, y, alpha, beta};
    constexpr int VECTORS = TILE / WIDTH;
    const int last = min(m - row, ROWS) * VECTORS;
    for (int at = threadIdx.x; at < last; at += THREADS) {
        const int i = at / VECTORS, j = at % VECTORS * WIDTH;
        if (tile + j < N) epilogue.finish(&shares[0][0][i][j], ROWS * TILE, row + i, tile + j);
    }
}
