// Matrix products by mma.sync, for every size and alignment, from sm_80 on: fp16, bf16, and fp32 rounded to TF32.
//
//   y = activation(x w + bias) [* (x up + up_bias)] * column_scale + column_shift + residual
//
// gemm_mma.cuh has the tiles, their stages in shared memory and the main loop. Elements outside a matrix
// become zero.
//
// Macros:
//   GEMM_N, GEMM_K   n and k; m is an argument    TRANSPOSED  1: w and up are n x k, 0: k x n
//   X_PITCH, W_PITCH   elements between starts of rows of x, and of w and up
//   X_COPY, W_COPY     bytes per copy to shared memory: 16, 8 or 4; or 2, through registers
//   GROUP_M            rows of tiles in a group; tiles are computed down a group's columns, so that w stays in L2
//   MIN_BLOCKS         minimum resident blocks per multiprocessor: a bound on registers
//   X_GATE             1: x is multiplied by a gate first (gemm_gate.cuh)
//   WIDTH              elements per access to y, the residual and the column vectors; divides n
//   and the macros of gemm_mma.cuh and of epilogue.cuh
#include "types.cuh"
#include "epilogue.cuh"
#include "gemm_mma.cuh"
#include "gemm_gate.cuh"

constexpr int N = GEMM_N, K = GEMM_K;
constexpr int TILES_N = (N + TILE_N - 1) / TILE_N, TILES_K = (K + TILE_K - 1) / TILE_K;
static_assert(N % WIDTH == 0, "a row is whole vectors");

constexpr bool X_PARTIAL = K * ITEM % X_COPY > 0, W_PARTIAL = (TRANSPOSED ? K : N) * ITEM % W_COPY > 0;
using CopyX = TileCopy<TILE_M, TILE_K_BYTES, i64(X_PITCH) * ITEM, X_COPY, X_PARTIAL, false>;
using CopyW = TileCopy<W_ROWS, W_ROW_BYTES, i64(W_PITCH) * ITEM, W_COPY, W_PARTIAL, TF32 && !TRANSPOSED>;

struct Operands {
    struct Stage {
        CopyX x;
        CopyW w[WEIGHTS];
    };
    // Copies of fewer than 16 bytes can go through registers, which cannot hold the elements of several stages.
    static constexpr int AHEAD = X_COPY == 16 && W_COPY == 16 ? STAGES : 1;

    const char* x;           // address of the block's first row
    const char* w[WEIGHTS];  // addresses of the block's first column
    int rows, columns;       // rows and columns of y from the block's first ones on

    __device__ __forceinline__ void begin(Stage& stage, unsigned to, int k) const {
        const i64 left = i64(K - k) * ITEM;
        stage.x.begin(to, x + i64(k) * ITEM, rows, left);
#pragma unroll
        for (int weight = 0; weight < WEIGHTS; ++weight) {
            const unsigned target = to + X_BYTES + weight * W_BYTES;
            if constexpr (TRANSPOSED) stage.w[weight].begin(target, w[weight] + i64(k) * ITEM, columns, left);
            else stage.w[weight].begin(target, w[weight] + i64(k) * W_PITCH * ITEM, K - k, i64(columns) * ITEM);
        }
    }

    __device__ __forceinline__ static void end(const Stage& stage, unsigned to) {
        stage.x.end(to);
#pragma unroll
        for (int weight = 0; weight < WEIGHTS; ++weight) stage.w[weight].end(to + X_BYTES + weight * W_BYTES);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    gemm_mma(const T* x, const T* w, const T* up, EpilogueOperands epilogue_operands, int m, const T* gate,
             int pixels PROGRAM_PARAMETERS) {
    extern __shared__ __align__(128) char memory[];
    const int tile = blockIdx.x, tiles_m = (m + TILE_M - 1) / TILE_M, side = GROUP_M * TILES_N;
    const int first = tile / side * GROUP_M, high = min(tiles_m - first, GROUP_M);
    const int row = (first + tile % side % high) * TILE_M, column = tile % side / high * TILE_N;

    const i64 corner = TRANSPOSED ? i64(column) * W_PITCH : column;
    Operands operands{reinterpret_cast<const char*>(x + i64(row) * X_PITCH), {}, m - row, N - column};
    operands.w[0] = reinterpret_cast<const char*>(w + corner);
    if constexpr (GATED) operands.w[WEIGHTS - 1] = reinterpret_cast<const char*>(up + corner);

    release_successor();
    wait_for_predecessor();
    MmaSums sums = {};
    if constexpr (X_GATE) {
        GatedSums<X_COPY> gated{sums, gate, row, m, pixels};
        multiply_tiles(operands, shared_address(memory), 0, TILES_K, gated);
        sums = gated.sums;
    } else {
        multiply_tiles(operands, shared_address(memory), 0, TILES_K, sums);
    }

    __syncthreads();  // the sums overwrite the stages
    float* staged = reinterpret_cast<float*>(memory);
    sums.store(staged);
    __syncthreads();
    const Epilogue epilogue{epilogue_operands, {PROGRAM_ARGUMENTS}};
    constexpr int VECTORS = TILE_N / WIDTH;
    const int last = min(m - row, TILE_M) * VECTORS;
#pragma unroll 4
    for (int at = threadIdx.x; at < last; at += THREADS) {
        const int i = at / VECTORS, j = at % VECTORS * WIDTH;
        if (column + j < N)
            epilogue.finish<WIDTH>(staged + i * SUMS_PITCH + j, TILE_M * SUMS_PITCH, row + i, column + j, N);
    }
}
