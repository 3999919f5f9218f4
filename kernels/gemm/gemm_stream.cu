// Matrix products of few rows of x in fp16 or bf16, whose weights stream in by TMA, from sm_90 on.
//
//   y = activation(x w + bias) [* (x up + up_bias)] * column_scale + column_shift + residual
//
// The kernel takes as long as reading the weights once. So it keeps nearly as many bytes in flight as a multiprocessor
// can have, and no warp waits for another warp until its own sums are complete:
//   1. Each warp has a ring of STAGES stages in shared memory. Its first lane fills them by TMA, an mbarrier
//      signals that a stage has arrived, and only this warp multiplies it, by mma.sync. A stage is 128 bytes of k:
//      TILE_N columns of each weight and TILE_M rows of x. The weights are mma's left operand, so that tiles of 8 rows
//      of x suffice. Warps take the stages of the block's slice of k in turn.
//   2. Each warp overwrites its ring with its sums, and all threads add the sums of all warps.
//   3. CLUSTER blocks share a tile, each with a slice of k. Each block computes TILE_N / CLUSTER columns of y. It gets
//      the other blocks' sums of these columns by st.async, and an mbarrier counts the bytes that arrive.
//   4. All threads run the epilogue, "by row" (see epilogue.cuh).
//
// 1x4096x4096 in fp16 takes 8.5 us on an H200 (n x k; 9.0 as k x n), and 10.6 without programmatic dependent launch.
// At the rate of a long copy, the 33.5 MB of w take 8.0 us. A kernel that only reads w takes 7.4 us, and 9.3 us without
// programmatic dependent launch.
//
// Macros:
//   GEMM_N, GEMM_K   n and k; m is an argument    TRANSPOSED  1: w and up are n x k, 0: k x n
//   TILE_M   rows of x, a multiple of 8    TILE_N  columns of a tile: 32, or a multiple of 64
//   STAGES, WARPS, CLUSTER   as above
//   PRODUCTS   number of products of one x; their tiles follow each other in the grid, and their n are GEMM_N, GEMM_N_2
//              and GEMM_N_3
//   WEIGHTS_CONSTANT   1: no kernel writes the weights, so they are read before the previous kernel ends
//   NORM   1: the rows of x, at most NORM_ROWS, are normalized first (norm_of_rows.cuh), and are kept in shared memory;
//          stages then have no x, and TILE_M is 8
//   WIDTH   elements per access to y, the residual and the column vectors; divides every n and TILE_N / CLUSTER
//   and those of epilogue.cuh
#include "types.cuh"
#include "finish_rows.cuh"
#include "gemm_multiply.cuh"
#include "hopper.cuh"

constexpr int N = GEMM_N, K = GEMM_K;
constexpr int WEIGHTS = 1 + GATED;  // x is multiplied by w and, if GATED, also by up
static_assert(N % WIDTH == 0, "a row is whole vectors");

constexpr int THREADS = 32 * WARPS;
constexpr int ROW_BYTES = 128, TILE_K = ROW_BYTES / sizeof(T);
constexpr int STEPS = ROW_BYTES / 32;                   // mmas along k in a stage
constexpr int MMA_N = TILE_N / 16, MMA_M = TILE_M / 8;  // mma tiles of 16 columns x 8 rows of y
constexpr int PANEL = TILE_N < 64 ? TILE_N : 64;        // columns of a TMA box if w is k x n
constexpr int W_ROW = TRANSPOSED ? ROW_BYTES : PANEL * sizeof(T);
constexpr int PANEL_BYTES = TILE_K * W_ROW;  // bytes of a panel's box, if w is k x n
constexpr int X_BYTES = NORM ? 0 : TILE_M * ROW_BYTES, W_BYTES = TILE_N * ROW_BYTES;
constexpr int STAGE = X_BYTES + WEIGHTS * W_BYTES;
constexpr int RING = STAGES * STAGE;
constexpr int SUMS_PITCH = TILE_N + 4;  // floats per row: elements that a warp stores at once fall into different banks
constexpr int TILES_K = (K + TILE_K - 1) / TILE_K;
constexpr int OWN_COLUMNS = TILE_N / CLUSTER;  // columns of y that a block stores
// Bytes of the sums of OWN_COLUMNS columns that a block gets from all blocks of its cluster.
constexpr int EXCHANGE = CLUSTER > 1 ? WEIGHTS * TILE_M * TILE_N * 4 : 0;

static_assert(sizeof(T) == 2, "ldmatrix moves 16-bit elements");
static_assert(OWN_COLUMNS % 4 == 0 && OWN_COLUMNS % WIDTH == 0, "vectors end with a block's columns");
static_assert(WEIGHTS * TILE_M * SUMS_PITCH * 4 <= RING, "a warp's sums take the place of its stages");

#if NORM
constexpr int NORM_PITCH = TILES_K * ROW_BYTES + 16;  // a column of chunks in eight rows falls into different banks
constexpr int NORM_SUMS = NORM_ROWS * NORM_PITCH;     // the offset of the warps' sums of squares
constexpr int NORM_BYTES = NORM_SUMS + (NORM_ROWS * WARPS * 4 + 15) / 16 * 16;
#include "norm_of_rows.cuh"
static_assert(TILE_M == 8, "each of eight lanes loads a row, or one of NORM_ROWS rows");
#else
#define NORM_PARAMETERS
constexpr int NORM_BYTES = 0;
#endif

// A warp's stages; `step` counts slices of 128 bytes of k.
struct Ring {
    const TensorMap *x, *w[WEIGHTS];  // with NORM, stages have no x
    unsigned memory, barriers;
    int row, column;

    __device__ __forceinline__ unsigned stage(int i) const { return memory + i * STAGE; }
    __device__ __forceinline__ unsigned barrier(int i) const { return barriers + 8 * i; }

    __device__ __forceinline__ void load_weights(int i, int step) const {
        hopper::barrier_arrive_expect(barrier(i), STAGE);
#pragma unroll
        for (int weight = 0; weight < WEIGHTS; ++weight) {
            const TensorMap& map = *w[weight];
            const unsigned to = stage(i) + X_BYTES + weight * W_BYTES;
            if constexpr (TRANSPOSED) hopper::load(map, to, barrier(i), step * TILE_K, column);
            else
#pragma unroll
                for (int panel = 0; panel < TILE_N / PANEL; ++panel)
                    hopper::load(map, to + panel * PANEL_BYTES, barrier(i), column + panel * PANEL, step * TILE_K);
        }
    }

    __device__ __forceinline__ void load_rows(int i, int step) const {
        hopper::load(*x, stage(i), barrier(i), step * TILE_K, row);
    }
};

using Sums = float[WEIGHTS][MMA_N][MMA_M][4];

// Loads a fragment of 16 columns of w by 16 of k.
__device__ __forceinline__ void load_weight(unsigned (&to)[4], unsigned tile, int n, int step, int lane) {
    if constexpr (TRANSPOSED) {
        load_matrices<false>(to, tile + swizzled_offset<W_ROW>(n * 16 + lane % 16, step * 2 + lane / 16));
    } else {
        const int chunk = n * 2 + lane / 8 % 2, row = step * 16 + lane % 8 + lane / 16 * 8;
        const unsigned panel = tile + chunk / (PANEL / 8) * PANEL_BYTES;
        load_matrices<true>(to, panel + swizzled_offset<W_ROW>(row, chunk % (PANEL / 8)));
    }
}

// `normalized` is the address of the stage's part of the normalized rows. If there are fewer than eight, lanes share
// them, and nothing stores the results of rows that do not exist.
__device__ __forceinline__ void multiply_stage(Sums& sums, unsigned stage, unsigned normalized) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int pair = 0; pair < STEPS / 2; ++pair) {
        unsigned x[MMA_M][4];
#pragma unroll
        for (int m = 0; m < MMA_M; ++m)
#if NORM
            load_matrices<false>(x[m], normalized + lane % 8 % NORM_ROWS * NORM_PITCH + (pair * 4 + lane / 8) * 16);
#else
            load_matrices<false>(x[m], stage + swizzled_offset<ROW_BYTES>(m * 8 + lane % 8, pair * 4 + lane / 8));
#endif
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int weight = 0; weight < WEIGHTS; ++weight) {
                unsigned w[MMA_N][4];
#pragma unroll
                for (int n = 0; n < MMA_N; ++n)
                    load_weight(w[n], stage + X_BYTES + weight * W_BYTES, n, pair * 2 + half, lane);
#pragma unroll
                for (int n = 0; n < MMA_N; ++n)
#pragma unroll
                    for (int m = 0; m < MMA_M; ++m)
                        multiply(T(), sums[weight][n][m], w[n], x[m][2 * half], x[m][2 * half + 1]);
            }
    }
}

// Begins to load the weights of one warp's steps: `from`, `from` + WARPS and so on, as long as they are below `to`.
__device__ __forceinline__ void fill_ring(const Ring& ring, bool first, int from, int to) {
    if (!NORM && first) hopper::prefetch(*ring.x);
    if constexpr (!WEIGHTS_CONSTANT) wait_for_predecessor();
    if (first) {
        for (int i = 0; i < STAGES; ++i) hopper::barrier_init(ring.barrier(i), 1);
        hopper::store_fence();
    }
    __syncwarp();
    if (first)
        for (int i = 0; i < STAGES && from + i * WARPS < to; ++i) ring.load_weights(i, from + i * WARPS);
}

// Multiplies these steps; `normalized` is the address of the normalized rows, if the kernel normalizes x.
__device__ __forceinline__ void multiply_steps(Sums& sums, const Ring& ring, bool first, int from, int to,
                                               unsigned normalized) {
    if (!NORM && first)
        for (int i = 0; i < STAGES && from + i * WARPS < to; ++i) ring.load_rows(i, from + i * WARPS);
    __syncwarp();
    int at = 0, parity = 0;
#pragma unroll 1
    for (int step = from; step < to; step += WARPS) {
        hopper::barrier_wait(ring.barrier(at), parity);
        multiply_stage(sums, ring.stage(at), normalized + step * ROW_BYTES);
        __syncwarp();
        if (first && step + STAGES * WARPS < to) {
            ring.load_weights(at, step + STAGES * WARPS);
            if constexpr (!NORM) ring.load_rows(at, step + STAGES * WARPS);
        }
        if (++at == STAGES) at = 0, parity ^= 1;
    }
}

__device__ __forceinline__ void store_sums(const Sums& sums, float* to) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int weight = 0; weight < WEIGHTS; ++weight)
#pragma unroll
        for (int n = 0; n < MMA_N; ++n)
#pragma unroll
            for (int m = 0; m < MMA_M; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    to[(weight * TILE_M + m * 8 + lane % 4 * 2 + i % 2) * SUMS_PITCH + n * 16 + lane / 4 + i / 2 * 8] =
                        sums[weight][n][m][i];
}

// Adds COUNT adjacent sums over all warps; `from` points to the first warp's sums.
template <int COUNT>
__device__ __forceinline__ void add_warps(const float* from, float (&to)[COUNT]) {
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp)
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const float value = from[warp * (RING / 4) + i];
            to[i] = warp ? to[i] + value : value;
        }
}

// The sums of the columns that this block stores, from every block of the cluster: CLUSTER x WEIGHTS x TILE_M x
// OWN_COLUMNS.
struct Exchange {
    const float* sums;
    unsigned barrier;

    __device__ __forceinline__ void begin(int rows) const {  // called by every thread
        if (threadIdx.x == 0) {
            hopper::barrier_init(barrier, 1);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncwarp();
        if (threadIdx.x == 0) hopper::barrier_arrive_expect(barrier, WEIGHTS * rows * TILE_N * 4);
        __syncwarp();
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    }

    __device__ __forceinline__ void wait_for_peers() const {  // until the other blocks' mbarriers are initialised
        asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    }

    __device__ __forceinline__ void send(int rank, int weight, int row, int column, const float (&values)[4]) const {
        const unsigned to = shared_address(sums) +
                            (((rank * WEIGHTS + weight) * TILE_M + row) * OWN_COLUMNS + column % OWN_COLUMNS) * 4;
        asm volatile(
            "{ .reg .b32 target, signal;\n"
            "mapa.shared::cluster.u32 target, %0, %2;\n"
            "mapa.shared::cluster.u32 signal, %1, %2;\n"
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [target], {%3, %4, %5, %6}, "
            "[signal]; }" ::"r"(to),
            "r"(barrier), "r"(column / OWN_COLUMNS), "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3])
            : "memory");
    }

    // Sends each sum to the block that stores its column; returns when all sums for this block have arrived.
    __device__ __forceinline__ void swap(const float* staged, int rank, int rows) const {
        for (int at = threadIdx.x; at < WEIGHTS * rows * (TILE_N / 4); at += THREADS) {
            const int line = at / (TILE_N / 4), column = at % (TILE_N / 4) * 4;
            const int weight = WEIGHTS == 1 ? 0 : line / rows, row = line - weight * rows;
            float values[4];
            add_warps(staged + (weight * TILE_M + row) * SUMS_PITCH + column, values);
            send(rank, weight, row, column, values);
        }
        hopper::barrier_wait(barrier, 0);
    }

    __device__ __forceinline__ void receive(int weight, int row, int column, float (&to)[WIDTH]) const {
#pragma unroll
        for (int rank = 0; rank < CLUSTER; ++rank)
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
                const float value = sums[((rank * WEIGHTS + weight) * TILE_M + row) * OWN_COLUMNS + column + i];
                to[i] = rank ? to[i] + value : value;
            }
    }
};

// The bias and the result of the second or third product; stream.py writes the fields in this order.
struct ProductOutput {
    const T* bias;
    T* y;
};

#if CLUSTER > 1
extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER, 1, 1)
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1)
#endif
#if NORM
    gemm_stream(const T* x, const __grid_constant__ TensorMap w,
#else
    gemm_stream(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
#endif
#if GATED || PRODUCTS > 1
                const __grid_constant__ TensorMap w_2,
#endif
#if PRODUCTS > 2
                const __grid_constant__ TensorMap w_3,
#endif
#if PRODUCTS > 1
                ProductOutput second,
#endif
#if PRODUCTS > 2
                ProductOutput third,
#endif
                EpilogueOperands epilogue_operands, int m NORM_PARAMETERS PROGRAM_PARAMETERS) {
    extern __shared__ __align__(1024) char memory[];
    release_successor();
    const int warp = threadIdx.x / 32, rank = CLUSTER > 1 ? hopper::cluster_rank() : 0;
    const int row = blockIdx.y * TILE_M, rows = min(m - row, TILE_M);
    int tile = blockIdx.x / CLUSTER, n = N;
    const TensorMap* map = &w;
    [[maybe_unused]] const auto take = [&](const TensorMap& weight, const ProductOutput& output, int columns,
                                           int from) {
        map = &weight, n = columns, tile -= from;
        epilogue_operands.bias = output.bias, epilogue_operands.y = output.y;
    };
#if PRODUCTS > 1
    constexpr int SECOND = (GEMM_N + TILE_N - 1) / TILE_N;  // the first tile of the second product
    constexpr int THIRD = SECOND + (GEMM_N_2 + TILE_N - 1) / TILE_N;
    if (tile >= SECOND && tile < THIRD) take(w_2, second, GEMM_N_2, SECOND);
#endif
#if PRODUCTS > 2
    if (tile >= THIRD) take(w_3, third, GEMM_N_3, THIRD);
#endif
    const unsigned base = shared_address(memory), normalized = base + WARPS * RING + EXCHANGE;
    const unsigned barriers = normalized + NORM_BYTES;
    const Exchange exchange{reinterpret_cast<float*>(memory + WARPS * RING), barriers + WARPS * STAGES * 8};
    if constexpr (CLUSTER > 1) exchange.begin(rows);
    Ring ring{nullptr, {map}, base + warp * RING, barriers + warp * STAGES * 8, row, tile * TILE_N};
#if GATED
    ring.w[1] = &w_2;
#endif
#if !NORM
    ring.x = &x;
#endif
    Sums sums = {};
    const int from = TILES_K * rank / CLUSTER + warp, to = TILES_K * (rank + 1) / CLUSTER;
    const bool first = threadIdx.x % 32 == 0;
    fill_ring(ring, first, from, to);
#if NORM
    NormalizedRows of_norm;
    of_norm.load_scales(norm);
#endif
    if constexpr (WEIGHTS_CONSTANT) wait_for_predecessor();
#if NORM
    float* const squares = reinterpret_cast<float*>(memory + WARPS * RING + EXCHANGE + NORM_SUMS);
    of_norm.normalize(squares, x, norm, 0, rows,
                      [&](int at, const unsigned (&words)[4]) { store_chunk(normalized + at, words); });
#endif
    multiply_steps(sums, ring, first, from, to, normalized);

    float* staged = reinterpret_cast<float*>(memory);
    store_sums(sums, staged + warp * (RING / 4));
    if constexpr (CLUSTER > 1) exchange.wait_for_peers();
    __syncthreads();
    if constexpr (CLUSTER > 1) exchange.swap(staged, rank, rows);
    const Epilogue epilogue{epilogue_operands, {PROGRAM_ARGUMENTS}};
    const auto sums_of = [&](int i, int j, float (&values)[WIDTH], float (&ups)[WIDTH]) {
        if constexpr (CLUSTER > 1) {
            exchange.receive(0, i, j, values);
            if constexpr (GATED) exchange.receive(1, i, j, ups);
        } else {
            add_warps(staged + i * SUMS_PITCH + j, values);
            if constexpr (GATED) add_warps(staged + (TILE_M + i) * SUMS_PITCH + j, ups);
        }
    };
    finish_rows<OWN_COLUMNS, THREADS, TILE_M>(epilogue, row, rows, tile * TILE_N + rank * OWN_COLUMNS, n, sums_of);
}
