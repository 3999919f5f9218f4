// y = activation(x w + bias) [* (x up + up_bias)] * column_scale + residual for few rows of x, in fp16 or bf16, by TMA
// and mma.sync (sm_90 and later).
//
// The time is that of reading w once. Each warp has a ring of STAGES stages in shared memory, which its first lane
// fills by TMA and which it alone multiplies: no warp waits for another before all of its sums are there, and nearly
// all bytes that an SM reads are asked for at once. A stage is 128 bytes of k: BN columns of each weight, and ROWS rows
// of x. The weights are mma's left operand, so that tiles of 8 rows of x suffice. Warps take stages of the block's part
// of k in turn; CLUSTER blocks share a tile, each with a part of k, and send each other their sums.
//
// 1x4096x4096 fp16 takes 8.5 us on an H200 (n x k; 9.0 as k x n), where 33.5 MB take 8.0 at the rate of a long copy. It
// is 10.6 where the launch does not start early. A kernel that only reads these bytes takes 7.4 and 9.3.
//
//   ROWS  of x, a multiple of 8    BN  columns of a tile: 32, or a multiple of 64    STAGES, WARPS, CLUSTER  as above
//   PRODUCTS  of one x, whose tiles lie side by side in the grid: COLUMNS, COLUMNS_2, COLUMNS_3 are their n
//   WEIGHTS_CONSTANT  1: nothing before this kernel writes them, so that they are asked for before all else
//   and the constants of gemm_epilogue.cuh
#include "types.cuh"
#include "activations.cuh"
#include "gemm_epilogue.cuh"
#include "gemm_multiply.cuh"
#include "hopper.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int ROW_BYTES = 128, BK = ROW_BYTES / sizeof(T);
constexpr int STEPS = ROW_BYTES / 32;              // of one mma along k
constexpr int WN = BN / 16, WM = ROWS / 8;         // mma tiles
constexpr int PANEL = BN < 64 ? BN : 64;           // columns of a box where w is k x n
constexpr int W_ROW = TRANSPOSED ? ROW_BYTES : PANEL * sizeof(T);
constexpr int PANEL_BYTES = BK * W_ROW;            // where w is k x n
constexpr int X_BYTES = ROWS * ROW_BYTES, W_BYTES = BN * ROW_BYTES, STAGE = X_BYTES + PARTS * W_BYTES;
constexpr int RING = STAGES * STAGE;
constexpr int PITCH = BN + 4;                      // of the sums: those of a warp's store fall into different banks
constexpr int TILES_K = (K + BK - 1) / BK;
constexpr int OWN = BN / CLUSTER;                  // columns that a block finishes
constexpr int EXCHANGE = CLUSTER > 1 ? PARTS * ROWS * BN * 4 : 0;  // bytes of others' sums of them, and its own

static_assert(sizeof(T) == 2, "ldmatrix moves 16-bit elements");
static_assert(OWN % 4 == 0 && OWN % WIDTH == 0, "vectors end with a block's columns");
static_assert(PARTS * ROWS * PITCH * 4 <= RING, "a warp's sums take the place of its stages");

// A warp's stages: `step` counts 128 bytes of k.
struct Ring {
    const TensorMap *x, *w[PARTS];
    unsigned memory, barriers;
    int row, column;

    __device__ __forceinline__ unsigned stage(int i) const { return memory + i * STAGE; }
    __device__ __forceinline__ unsigned barrier(int i) const { return barriers + 8 * i; }

    __device__ __forceinline__ void load_weights(int i, int step) const {
        hopper::barrier_arrive_expect(barrier(i), STAGE);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const TensorMap& map = *w[part];
            const unsigned to = stage(i) + X_BYTES + part * W_BYTES;
            if constexpr (TRANSPOSED) hopper::load(map, to, barrier(i), step * BK, column);
            else
#pragma unroll
                for (int panel = 0; panel < BN / PANEL; ++panel)
                    hopper::load(map, to + panel * PANEL_BYTES, barrier(i), column + panel * PANEL, step * BK);
        }
    }

    __device__ __forceinline__ void load_rows(int i, int step) const {
        hopper::load(*x, stage(i), barrier(i), step * BK, row);
    }
};

using Sums = float[PARTS][WN][WM][4];

// 16 columns of w by 16 of k.
__device__ __forceinline__ void load_weight(unsigned (&to)[4], unsigned tile, int n, int step, int lane) {
    if constexpr (TRANSPOSED) {
        load_matrices<false>(to, tile + place<W_ROW>(n * 16 + lane % 16, step * 2 + lane / 16));
    } else {
        const int chunk = n * 2 + lane / 8 % 2, row = step * 16 + lane % 8 + lane / 16 * 8;
        load_matrices<true>(to, tile + chunk / (PANEL / 8) * PANEL_BYTES + place<W_ROW>(row, chunk % (PANEL / 8)));
    }
}

__device__ __forceinline__ void multiply_stage(Sums& sums, unsigned stage) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int pair = 0; pair < STEPS / 2; ++pair) {
        unsigned x[WM][4];
#pragma unroll
        for (int m = 0; m < WM; ++m)
            load_matrices<false>(x[m], stage + place<ROW_BYTES>(m * 8 + lane % 8, pair * 4 + lane / 8));
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                unsigned w[WN][4];
#pragma unroll
                for (int n = 0; n < WN; ++n)
                    load_weight(w[n], stage + X_BYTES + part * W_BYTES, n, pair * 2 + half, lane);
#pragma unroll
                for (int n = 0; n < WN; ++n)
#pragma unroll
                    for (int m = 0; m < WM; ++m)
                        multiply(T(), sums[part][n][m], w[n], x[m][2 * half], x[m][2 * half + 1]);
            }
    }
}

// Steps from, from + WARPS … up to `to`.
__device__ __forceinline__ void multiply_steps(Sums& sums, const Ring& ring, int from, int to) {
    const bool first = threadIdx.x % 32 == 0;
    if (first) hopper::prefetch(*ring.x);
    if constexpr (!WEIGHTS_CONSTANT) wait_for_predecessor();
    if (first) {
        for (int i = 0; i < STAGES; ++i) hopper::barrier_init(ring.barrier(i), 1);
        hopper::store_fence();
    }
    __syncwarp();
    if (first)
        for (int i = 0; i < STAGES && from + i * WARPS < to; ++i) ring.load_weights(i, from + i * WARPS);
    if constexpr (WEIGHTS_CONSTANT) wait_for_predecessor();
    if (first)
        for (int i = 0; i < STAGES && from + i * WARPS < to; ++i) ring.load_rows(i, from + i * WARPS);
    __syncwarp();
    int at = 0, parity = 0;
#pragma unroll 1
    for (int step = from; step < to; step += WARPS) {
        hopper::barrier_wait(ring.barrier(at), parity);
        multiply_stage(sums, ring.stage(at));
        __syncwarp();
        if (first && step + STAGES * WARPS < to) {
            ring.load_weights(at, step + STAGES * WARPS);
            ring.load_rows(at, step + STAGES * WARPS);
        }
        if (++at == STAGES) at = 0, parity ^= 1;
    }
}

__device__ __forceinline__ void put_sums(const Sums& sums, float* to) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (int n = 0; n < WN; ++n)
#pragma unroll
            for (int m = 0; m < WM; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    to[(part * ROWS + m * 8 + lane % 4 * 2 + i % 2) * PITCH + n * 16 + lane / 4 + i / 2 * 8] =
                        sums[part][n][m][i];
}

// COUNT sums of all warps, from the place of the first one's on.
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

// Where the sums arrive that the blocks of a cluster have of this one's columns: CLUSTER x PARTS x ROWS x OWN.
struct Exchange {
    const float* sums;
    unsigned barrier;

    __device__ __forceinline__ void begin(int rows) const {  // by every thread
        if (threadIdx.x == 0) {
            hopper::barrier_init(barrier, 1);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncwarp();
        if (threadIdx.x == 0) hopper::barrier_arrive_expect(barrier, PARTS * rows * BN * 4);
        __syncwarp();
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    }

    __device__ __forceinline__ void wait_for_peers() const {  // until their barriers are there
        asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    }

    __device__ __forceinline__ void send(int rank, int part, int row, int column, const float (&values)[4]) const {
        const unsigned to = shared_address(sums) + (((rank * PARTS + part) * ROWS + row) * OWN + column % OWN) * 4;
        asm volatile("{ .reg .b32 place, signal;\n"
                     "mapa.shared::cluster.u32 place, %0, %2;\n"
                     "mapa.shared::cluster.u32 signal, %1, %2;\n"
                     "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [place], {%3, %4, %5, %6}, "
                     "[signal]; }" ::"r"(to), "r"(barrier), "r"(column / OWN), "f"(values[0]), "f"(values[1]),
                     "f"(values[2]), "f"(values[3]) : "memory");
    }

    // Every block's sums to those that finish them; returns when this one has all of its own.
    __device__ __forceinline__ void swap(const float* staged, int rank, int rows) const {
        for (int at = threadIdx.x; at < PARTS * rows * (BN / 4); at += THREADS) {
            const int line = at / (BN / 4), column = at % (BN / 4) * 4;
            const int part = PARTS == 1 ? 0 : line / rows, row = line - part * rows;
            float values[4];
            add_warps(staged + (part * ROWS + row) * PITCH + column, values);
            send(rank, part, row, column, values);
        }
        hopper::barrier_wait(barrier, 0);
    }

    __device__ __forceinline__ void receive(int part, int row, int column, float (&to)[WIDTH]) const {
#pragma unroll
        for (int rank = 0; rank < CLUSTER; ++rank)
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
                const float value = sums[((rank * PARTS + part) * ROWS + row) * OWN + column + i];
                to[i] = rank ? to[i] + value : value;
            }
    }
};

// This block's columns of y, from `first` on.
__device__ __forceinline__ void finish(const Epilogue& epilogue, const Exchange& exchange, const float* staged, int row,
                                       int rows, int first) {
    constexpr int VECTORS = OWN / WIDTH;
    for (int at = threadIdx.x; at < rows * VECTORS; at += THREADS) {
        const int i = at / VECTORS, j = at % VECTORS * WIDTH;
        float values[WIDTH], other[WIDTH];
        if constexpr (CLUSTER > 1) {
            exchange.receive(0, i, j, values);
            if constexpr (PARTS == 2) exchange.receive(1, i, j, other);
        } else {
            add_warps(staged + i * PITCH + j, values);
            if constexpr (PARTS == 2) add_warps(staged + (ROWS + i) * PITCH + j, other);
        }
        if (first + j < epilogue.n) epilogue.finish(values, other, row + i, first + j);
    }
}

#if CLUSTER > 1
extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER, 1, 1)
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1)
#endif
gemm_stream(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
#if PARTS * PRODUCTS > 1
            const __grid_constant__ TensorMap w_2,
#endif
#if PRODUCTS > 2
            const __grid_constant__ TensorMap w_3,
#endif
            const T* bias, const T* bias_2, const T* bias_3, const T* column_scale, const T* residual, T* y, T* y_2,
            T* y_3, float alpha, float beta, int m) {
    extern __shared__ __align__(1024) char memory[];
    release_successor();
    const int warp = threadIdx.x / 32, rank = CLUSTER > 1 ? hopper::cluster_rank() : 0;
    const int row = blockIdx.y * ROWS, rows = min(m - row, ROWS);
    int tile = blockIdx.x / CLUSTER, n = N;
    const TensorMap* weight = &w;
#if PRODUCTS > 1
    constexpr int SECOND = (COLUMNS + BN - 1) / BN, THIRD = SECOND + (COLUMNS_2 + BN - 1) / BN;  // first tiles
    if (tile >= SECOND && tile < THIRD) weight = &w_2, bias = bias_2, y = y_2, n = COLUMNS_2, tile -= SECOND;
#endif
#if PRODUCTS > 2
    if (tile >= THIRD) weight = &w_3, bias = bias_3, y = y_3, n = COLUMNS_3, tile -= THIRD;
#endif
    const unsigned base = shared_address(memory), barriers = base + WARPS * RING + EXCHANGE;
    const Exchange exchange{reinterpret_cast<float*>(memory + WARPS * RING), barriers + WARPS * STAGES * 8};
    if constexpr (CLUSTER > 1) exchange.begin(rows);
    Ring ring{&x, {weight}, base + warp * RING, barriers + warp * STAGES * 8, row, tile * BN};
#if PARTS == 2
    ring.w[1] = &w_2;
#endif
    Sums sums = {};
    multiply_steps(sums, ring, TILES_K * rank / CLUSTER + warp, TILES_K * (rank + 1) / CLUSTER);

    float* staged = reinterpret_cast<float*>(memory);
    put_sums(sums, staged + warp * (RING / 4));
    if constexpr (CLUSTER > 1) exchange.wait_for_peers();
    __syncthreads();
    if constexpr (CLUSTER > 1) exchange.swap(staged, rank, rows);
    const Epilogue epilogue{bias, bias_2, column_scale, residual, y, alpha, beta, n};
    finish(epilogue, exchange, staged, row, rows, tile * BN + rank * OWN);
}
