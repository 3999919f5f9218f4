// Matrix products of up to eight rows of x as dot products in fp32, for every dtype and architecture.
//
//   y = activation(x w + bias) [* (x up + up_bias)] * column_scale + column_shift + residual
//
// The kernel takes as long as reading the weights once. So weights go from memory to registers in accesses of 16 bytes,
// many of them in flight at once, and shared memory holds only sums. A block computes ROWS rows and TILE columns of y;
// WARPS_N warps divide the columns and WARPS_K warps divide k.
//   - If w is n x k (LanesAlongK), a warp has LOADS columns; its lanes divide k, each with UNROLL vectors in flight.
//   - If w is k x n (LanesAlongN), LANES lanes lie along n, and each reads LOADS adjacent rows of w. So x is read in
//     vectors too. The other lanes of the warp read other rows.
// Sums are added across lanes by shuffles, and across the warps that divide k through shared memory, in a fixed order.
// All threads run the epilogue (epilogue.cuh).
//
// Macros:
//   GEMM_N, GEMM_K   n and k; m is an argument    TRANSPOSED  1: w and up are n x k, 0: k x n
//   ROWS, WARPS_N, WARPS_K, LOADS, LANES, UNROLL    as above
//   VECTOR     elements per access to w; divides the elements of its rows
//   X_VECTOR   elements per access to x; divides k, and LOADS if w is k x n
//   WEIGHTS_CONSTANT   1: no kernel writes w and up, so they are read before the previous kernel ends
//   MIN_BLOCKS   minimum resident blocks per multiprocessor: a low number allows registers for all loads
//   WIDTH        elements per access to y, the residual and the column vectors; divides n
//   and the macros of epilogue.cuh
#include "types.cuh"
#include "finish_rows.cuh"

using i64 = long long;

constexpr int N = GEMM_N, K = GEMM_K;
constexpr int WEIGHTS = 1 + GATED;  // x is multiplied by w and, if GATED, also by up
static_assert(N % WIDTH == 0, "a row is whole vectors");

constexpr int THREADS = 32 * WARPS_N * WARPS_K;
constexpr int SUMS = TRANSPOSED ? LOADS : VECTOR;  // sums per thread and row of x
using Sums = float[WEIGHTS][ROWS][SUMS];

// Returns COUNT elements at `from` if `inside`, else zeros. If not `inside`, it still loads elements, from `instead`: a
// load under a condition would wait for the previous load. KEEP: other threads read the same elements.
template <int COUNT, bool KEEP>
__device__ __forceinline__ Pack<T, COUNT> load_or_zero(bool inside, const T* from, const T* instead) {
    const T* source = inside ? from : instead;
    Pack<T, COUNT> loaded = KEEP ? load_cached<COUNT>(source) : load_once<COUNT>(source);
#pragma unroll
    for (unsigned& word : loaded.words) word = inside ? word : 0;
    return loaded;
}

// The operands from a thread's first row and column on. `rows` and `columns` are the numbers of rows and columns of y
// from this first row and column to the end. `first` points to the first element of each weight.
struct Operands {
    const T *x, *w[WEIGHTS], *first[WEIGHTS];
    int rows, columns;

    // Loads elements of a row of x. For rows beyond the last one, whose sums are not stored, it loads elements of the
    // last row.
    template <int COUNT>
    __device__ __forceinline__ Pack<T, COUNT> load_x(int row, int k, bool inside) const {
        return load_or_zero<COUNT, true>(inside, x + i64(ROWS == 1 ? 0 : min(row, rows - 1)) * K + k, x);
    }

    template <bool DIVIDES>
    __device__ __forceinline__ Pack<T, VECTOR> load_w(int weight, int column, i64 offset, bool inside) const {
        return load_or_zero<VECTOR, false>(inside && (DIVIDES || column < columns), w[weight] + offset, first[weight]);
    }
};

// Adds the sums of the lanes of a warp that have the same columns; every lane gets the result.
template <int FIRST>
__device__ __forceinline__ void add_lanes(Sums& sums) {
#pragma unroll
    for (int weight = 0; weight < WEIGHTS; ++weight)
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < SUMS; ++j)
#pragma unroll
                for (int offset = FIRST; offset < 32; offset *= 2)
                    sums[weight][i][j] += __shfl_xor_sync(0xffffffffu, sums[weight][i][j], offset);
}

template <class Store>
__device__ __forceinline__ void store_each(const Sums& sums, int column, Store store_sum) {
#pragma unroll
    for (int weight = 0; weight < WEIGHTS; ++weight)
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < SUMS; ++j) store_sum(weight, i, column + j, sums[weight][i][j]);
}

struct LanesAlongK {
    static constexpr int COLUMNS_EACH = LOADS;
    static constexpr int STRIDE = WARPS_K * 32 * VECTOR, K_STEP = UNROLL * STRIDE;
    static constexpr bool DIVIDES_K = K % K_STEP == 0, DIVIDES_N = N % (WARPS_N * COLUMNS_EACH) == 0;
    Pack<T, VECTOR> x[UNROLL][ROWS], w[UNROLL][WEIGHTS][LOADS];

    __device__ __forceinline__ static int column(int) { return 0; }
    __device__ __forceinline__ static int depth(int warp, int lane) { return (warp * 32 + lane) * VECTOR; }

    __device__ __forceinline__ void load_weights(const Operands& operands, int k) {
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
#pragma unroll
            for (int weight = 0; weight < WEIGHTS; ++weight)
#pragma unroll
                for (int j = 0; j < LOADS; ++j) {
                    const int at = k + u * STRIDE;
                    w[u][weight][j] = operands.load_w<DIVIDES_N>(weight, j, i64(j) * K + at, DIVIDES_K || at < K);
                }
    }

    __device__ __forceinline__ void load_rows(const Operands& operands, int k) {
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const int at = k + u * STRIDE;
                x[u][i] = operands.load_x<VECTOR>(i, at, DIVIDES_K || at < K);
            }
    }

    __device__ __forceinline__ void add(Sums& sums) const {
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            float rows[ROWS][VECTOR], values[VECTOR];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) unpack(x[u][i], rows[i]);
#pragma unroll
            for (int weight = 0; weight < WEIGHTS; ++weight)
#pragma unroll
                for (int j = 0; j < LOADS; ++j) {
                    unpack(w[u][weight][j], values);
#pragma unroll
                    for (int i = 0; i < ROWS; ++i)
#pragma unroll
                        for (int v = 0; v < VECTOR; ++v)
                            sums[weight][i][j] = fmaf(rows[i][v], values[v], sums[weight][i][j]);
                }
        }
    }

    template <class Store>
    __device__ __forceinline__ static void finish_lanes(Sums& sums, int lane, Store store_sum) {
        add_lanes<1>(sums);
        if (lane == 0) store_each(sums, 0, store_sum);
    }
};

struct LanesAlongN {
    static constexpr int COLUMNS_EACH = LANES * VECTOR;
    static constexpr int K_STEP = WARPS_K * (32 / LANES) * LOADS;
    static constexpr bool DIVIDES_K = K % K_STEP == 0, DIVIDES_N = N % (WARPS_N * COLUMNS_EACH) == 0;
    static constexpr int VECTORS = LOADS / X_VECTOR;
    Pack<T, X_VECTOR> x[ROWS][VECTORS];
    Pack<T, VECTOR> w[WEIGHTS][LOADS];

    __device__ __forceinline__ static int column(int lane) { return lane % LANES * VECTOR; }
    __device__ __forceinline__ static int depth(int warp, int lane) {
        return (warp * (32 / LANES) + lane / LANES) * LOADS;
    }

    __device__ __forceinline__ void load_weights(const Operands& operands, int k) {
#pragma unroll
        for (int weight = 0; weight < WEIGHTS; ++weight)
#pragma unroll
            for (int j = 0; j < LOADS; ++j)
                w[weight][j] = operands.load_w<DIVIDES_N>(weight, 0, i64(k + j) * N, DIVIDES_K || k + j < K);
    }

    __device__ __forceinline__ void load_rows(const Operands& operands, int k) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < VECTORS; ++j) {
                const int at = k + j * X_VECTOR;
                x[i][j] = operands.load_x<X_VECTOR>(i, at, DIVIDES_K || at < K);
            }
    }

    __device__ __forceinline__ void add(Sums& sums) const {
        float rows[ROWS][VECTORS][X_VECTOR], values[VECTOR];
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < VECTORS; ++j) unpack(x[i][j], rows[i][j]);
#pragma unroll
        for (int weight = 0; weight < WEIGHTS; ++weight)
#pragma unroll
            for (int j = 0; j < LOADS; ++j) {
                unpack(w[weight][j], values);
#pragma unroll
                for (int i = 0; i < ROWS; ++i)
#pragma unroll
                    for (int v = 0; v < VECTOR; ++v)
                        sums[weight][i][v] = fmaf(rows[i][j / X_VECTOR][j % X_VECTOR], values[v], sums[weight][i][v]);
            }
    }

    template <class Store>
    __device__ __forceinline__ static void finish_lanes(Sums& sums, int lane, Store store_sum) {
        add_lanes<LANES>(sums);
        if (lane < LANES) store_each(sums, column(lane), store_sum);
    }
};

#if TRANSPOSED
using Mainloop = LanesAlongK;
#else
using Mainloop = LanesAlongN;
#endif

constexpr int TILE = WARPS_N * Mainloop::COLUMNS_EACH;
constexpr int K_STEPS = (K + Mainloop::K_STEP - 1) / Mainloop::K_STEP;
static_assert(TILE % WIDTH == 0, "vectors end with a tile");

// Adds the sums of the warps that divide k to the first warp's sums.
__device__ __forceinline__ void add_warps(float* partial) {
    constexpr int PARTIAL_SUMS = WEIGHTS * ROWS * TILE;
    for (int at = threadIdx.x; at < PARTIAL_SUMS; at += THREADS) {
        float total = partial[at];
#pragma unroll
        for (int other = 1; other < WARPS_K; ++other) total += partial[other * PARTIAL_SUMS + at];
        partial[at] = total;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    gemm_small(const T* x, const T* w, const T* up, EpilogueOperands epilogue_operands, int m PROGRAM_PARAMETERS) {
    __shared__ __align__(16) float partial[WARPS_K][WEIGHTS][ROWS][TILE];
    const int lane = threadIdx.x % 32, warp_n = threadIdx.x / 32 % WARPS_N, warp_k = threadIdx.x / 32 / WARPS_N;
    const int row = blockIdx.y * ROWS, tile = blockIdx.x * TILE;
    const int column = tile + warp_n * Mainloop::COLUMNS_EACH + Mainloop::column(lane);
    const int depth = Mainloop::depth(warp_k, lane);

    const i64 corner = TRANSPOSED ? i64(column) * K : column;
    Operands operands{x + i64(row) * K, {w + corner}, {w}, m - row, N - column};
    if constexpr (GATED) operands.w[WEIGHTS - 1] = up + corner, operands.first[WEIGHTS - 1] = up;
    release_successor();
    if constexpr (!WEIGHTS_CONSTANT) wait_for_predecessor();
    Sums sums = {};
#pragma unroll 1
    for (int step = 0; step < K_STEPS; ++step) {
        Mainloop mainloop;
        mainloop.load_weights(operands, step * Mainloop::K_STEP + depth);
        wait_for_predecessor();
        mainloop.load_rows(operands, step * Mainloop::K_STEP + depth);
        mainloop.add(sums);
    }

    Mainloop::finish_lanes(sums, lane, [&](int weight, int i, int j, float sum) {
        partial[warp_k][weight][i][warp_n * Mainloop::COLUMNS_EACH + j] = sum;
    });
    if constexpr (WARPS_K > 1) {
        __syncthreads();
        add_warps(&partial[0][0][0][0]);
    }
    __syncthreads();
    const Epilogue epilogue{epilogue_operands, {PROGRAM_ARGUMENTS}};
    const auto sums_of = [&](int i, int j, float (&values)[WIDTH], float (&ups)[WIDTH]) {
#pragma unroll
        for (int v = 0; v < WIDTH; ++v) {
            values[v] = partial[0][0][i][j + v];
            if constexpr (GATED) ups[v] = partial[0][WEIGHTS - 1][i][j + v];
        }
    };
    finish_rows<TILE, THREADS, ROWS>(epilogue, row, min(m - row, ROWS), tile, N, sums_of);
}
