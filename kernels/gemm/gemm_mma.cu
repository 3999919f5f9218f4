// Matrix products by mma.sync, for every size and alignment, from sm_80 on: fp16, bf16, and fp32 rounded to TF32.
//
//   y = activation(x w + bias) [* (x up + up_bias)] * column_scale + residual
//
// A block computes TILE_M x TILE_N of y; its WARPS_M x WARPS_N warps divide the tile among them. All threads load and
// all multiply:
//   1. Threads copy stages of TILE_K_BYTES along k of x and of the weights to shared memory by cp.async, STAGES - 1
//      stages ahead of the one that is multiplied. What lies outside a matrix becomes zero. Rows of 2-byte alignment
//      go through registers instead, because cp.async moves 4 bytes or more.
//   2. For each stage, one __syncthreads says both that it has arrived and that nobody reads the one that is now
//      overwritten. Warps load fragments by ldmatrix, one step of k ahead of the mma, and add up in fp32 registers.
//   3. The sums go to shared memory, where the stages were, so that the epilogue (epilogue.cuh) reads the residual and
//      writes y in whole rows.
// Stages are swizzled so that ldmatrix meets no bank twice (gemm_multiply.cuh).
//
// Macros:
//   GEMM_N, GEMM_K   n and k; m is an argument    TRANSPOSED  1: w and up are n x k, 0: k x n
//   TILE_M, TILE_N, TILE_K_BYTES, STAGES, WARPS_M, WARPS_N    as above
//   X_PITCH, W_PITCH   elements from row to row of x, and of w and up
//   X_COPY, W_COPY     bytes of a copy to shared memory: 16, 8, 4, or 2, which goes through registers
//   GROUP_M            rows of tiles that are computed before the next columns, so that they find w in L2
//   MIN_BLOCKS         blocks that must fit on a multiprocessor: a bound on registers
//   WIDTH              elements of an access to y, the residual and the column vectors; divides n
//   and those of epilogue.cuh
#include "types.cuh"
#include "epilogue.cuh"
#include "gemm_multiply.cuh"

constexpr int N = GEMM_N, K = GEMM_K;
constexpr int WEIGHTS = 1 + GATED;  // x is multiplied with w, and with up
static_assert(N % WIDTH == 0, "a row is whole vectors");

constexpr int THREADS = 32 * WARPS_M * WARPS_N;
constexpr int ITEM = sizeof(T);
constexpr int TILE_K = TILE_K_BYTES / ITEM;
constexpr int STEPS = TILE_K_BYTES / 32;  // mmas along k in a stage
constexpr int MMA_M = TILE_M / WARPS_M / 16, MMA_N = TILE_N / WARPS_N / 8;  // a warp's mma tiles
constexpr int TILES_N = (N + TILE_N - 1) / TILE_N, TILES_K = (K + TILE_K - 1) / TILE_K;
constexpr int W_ROWS = TRANSPOSED ? TILE_N : TILE_K, W_ROW_BYTES = TRANSPOSED ? TILE_K_BYTES : TILE_N * ITEM;
constexpr int X_BYTES = TILE_M * TILE_K_BYTES, W_BYTES = TILE_N * TILE_K_BYTES, STAGE = X_BYTES + WEIGHTS * W_BYTES;
constexpr int SUMS_PITCH = TILE_N + 8;  // of the sums in shared memory: 8 banks from row to row

static_assert(MMA_M * WARPS_M * 16 == TILE_M && MMA_N * WARPS_N * 8 == TILE_N && MMA_N % 2 == 0, "tiles of 16 x 16");
static_assert(TILE_N % 32 == 0, "sums of four rows fall into different banks");

// ---- global memory -> shared memory ------------------------------------------------------------------------------

// swizzled_offset, or with PAIRS one under which four rows of two columns fall into different banks: TF32 fragments of
// a k x n weight are read so.
template <int ROW_BYTES, bool PAIRS>
__device__ __forceinline__ int weight_offset(int row, int chunk) {
    if constexpr (PAIRS) return row * ROW_BYTES + ((chunk ^ (row & 3) << 1) << 4);
    else return swizzled_offset<ROW_BYTES>(row, chunk);
}

// Copies the first `read` of BYTES bytes asynchronously and zeroes the rest.
template <int BYTES>
__device__ __forceinline__ void copy_async(unsigned to, const char* from, int read) {
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(read)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(read)
                     : "memory");
}

// Copies one operand's share of a stage: ROWS rows of ROW_BYTES out of a matrix with a row every LINE bytes. PARTIAL:
// the last copy of a row may have fewer bytes than the others.
template <int ROWS, int ROW_BYTES, i64 LINE, int COPY, bool PARTIAL, bool PAIRS>
struct TileCopy {
    static constexpr int CHUNKS = ROW_BYTES / 16;
    static constexpr int EACH = (ROWS * CHUNKS + THREADS - 1) / THREADS;
    static constexpr bool FULL = ROWS * CHUNKS % THREADS == 0;
    unsigned registers[COPY == 2 ? EACH : 1][4];

    template <class Do>
    __device__ __forceinline__ static void each(Do action) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int index = threadIdx.x + i * THREADS;
            if (FULL || index < ROWS * CHUNKS) action(i, index / CHUNKS, index % CHUNKS);
        }
    }

    // Starts the copies. `rows` and `bytes` are left of the matrix from `from` on; what lies outside is zero.
    __device__ __forceinline__ void begin(unsigned to, const char* from, int rows, i64 bytes) {
        each([&](int i, int row, int chunk) {
            const char* source = from + row * LINE + chunk * 16;
            if constexpr (COPY == 2) {
                fetch(registers[i], source, row < rows ? bytes - chunk * 16 : 0);
            } else {
                const unsigned target = to + weight_offset<ROW_BYTES, PAIRS>(row, chunk);
#pragma unroll
                for (int at = 0; at < 16; at += COPY) {
                    const i64 left = bytes - (chunk * 16 + at);
                    const bool inside = row < rows && left > 0;
                    const int count = PARTIAL ? int(min(left, i64(COPY))) : COPY;
                    copy_async<COPY>(target + at, inside ? source + at : from, inside ? count : 0);
                }
            }
        });
    }

    __device__ __forceinline__ static void fetch(unsigned (&words)[4], const char* source, i64 bytes) {
        unsigned short halves[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            halves[j] = 0;
            if (2 * j < bytes) asm volatile("ld.global.u16 %0, [%1];" : "=h"(halves[j]) : "l"(source + 2 * j));
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) words[j] = halves[2 * j] | unsigned(halves[2 * j + 1]) << 16;
    }

    // Stores what went through registers.
    __device__ __forceinline__ void end(unsigned to) const {
        if constexpr (COPY == 2) {
            each([&](int i, int row, int chunk) {
                const unsigned target = to + weight_offset<ROW_BYTES, PAIRS>(row, chunk);
                asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(target),
                             "r"(registers[i][0]), "r"(registers[i][1]), "r"(registers[i][2]), "r"(registers[i][3])
                             : "memory");
            });
        }
    }
};

constexpr bool TF32 = ITEM == 4;
constexpr bool X_PARTIAL = K * ITEM % X_COPY > 0, W_PARTIAL = (TRANSPOSED ? K : N) * ITEM % W_COPY > 0;
using CopyX = TileCopy<TILE_M, TILE_K_BYTES, i64(X_PITCH) * ITEM, X_COPY, X_PARTIAL, false>;
using CopyW = TileCopy<W_ROWS, W_ROW_BYTES, i64(W_PITCH) * ITEM, W_COPY, W_PARTIAL, TF32 && !TRANSPOSED>;

struct Stage {
    CopyX x;
    CopyW w[WEIGHTS];
};

struct Operands {
    const char* x;             // from the block's first row on
    const char* w[WEIGHTS];    // from its first column on
    int rows, columns;         // of y that are left from there on

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

// ---- shared memory -> registers -> mma ---------------------------------------------------------------------------

__device__ __forceinline__ unsigned load_word(unsigned from) {
    unsigned word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from));
    return word;
}

__device__ __forceinline__ unsigned nearest_tf32(unsigned bits) {
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(__uint_as_float(bits)));
    return bits;
}

// A warp's operands of one mma step: x in tiles of 16 rows and 32 bytes of k, weights in pairs of tiles of 8 columns.
struct Fragments {
    unsigned x[MMA_M][4], w[WEIGHTS][MMA_N / 2][4];

    __device__ __forceinline__ void load(unsigned stage, int step) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int row = warp / WARPS_N * MMA_M * 16, column = warp % WARPS_N * MMA_N * 8;
#pragma unroll
        for (int i = 0; i < MMA_M; ++i)
            load_matrices<false>(
                x[i], stage + swizzled_offset<TILE_K_BYTES>(row + i * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
        for (int weight = 0; weight < WEIGHTS; ++weight)
#pragma unroll
            for (int j = 0; j < MMA_N / 2; ++j)
                load_pair(w[weight][j], stage + X_BYTES + weight * W_BYTES, column + j * 16, step, lane);
        if constexpr (TF32) round();
    }

    __device__ __forceinline__ static void load_pair(unsigned (&to)[4], unsigned tile, int column, int step, int lane) {
        if constexpr (TRANSPOSED) {
            const int row = column + lane % 8 + lane / 16 * 8;
            load_matrices<false>(to, tile + swizzled_offset<TILE_K_BYTES>(row, step * 2 + lane / 8 % 2));
        } else if constexpr (!TF32) {
            load_matrices<true>(to, tile + swizzled_offset<W_ROW_BYTES>(step * 16 + lane % 16, column / 8 + lane / 16));
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int k = step * 8 + lane % 4 + i % 2 * 4, at = column + lane / 4 + i / 2 * 8;
                to[i] = load_word(tile + weight_offset<W_ROW_BYTES, true>(k, at / 4) + at % 4 * 4);
            }
        }
    }

    __device__ __forceinline__ void round() {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
#pragma unroll
            for (int i = 0; i < MMA_M; ++i) x[i][r] = nearest_tf32(x[i][r]);
#pragma unroll
            for (int weight = 0; weight < WEIGHTS; ++weight)
#pragma unroll
                for (int j = 0; j < MMA_N / 2; ++j) w[weight][j][r] = nearest_tf32(w[weight][j][r]);
        }
    }

    __device__ __forceinline__ void multiply_all(float (&sums)[WEIGHTS][MMA_M][MMA_N][4]) const {
#pragma unroll
        for (int weight = 0; weight < WEIGHTS; ++weight)
#pragma unroll
            for (int i = 0; i < MMA_M; ++i)
#pragma unroll
                for (int j = 0; j < MMA_N; ++j)
                    multiply(T(), sums[weight][i][j], x[i], w[weight][j / 2][j % 2 * 2],
                             w[weight][j / 2][j % 2 * 2 + 1]);
    }
};

// The main loop. Each thread's last barrier comes before its last multiplications.
__device__ __forceinline__ void multiply_tiles(const Operands& operands, unsigned stages,
                                               float (&sums)[WEIGHTS][MMA_M][MMA_N][4]) {
    Stage stage;
    // Registers do not hold the elements of several stages.
    constexpr int AHEAD = X_COPY == 16 && W_COPY == 16 ? STAGES : 1;
#pragma unroll AHEAD
    for (int i = 0; i < STAGES - 1; ++i) {
        if (i < TILES_K) {
            operands.begin(stage, stages + i * STAGE, i * TILE_K);
            Operands::end(stage, stages + i * STAGE);
        }
        asm volatile("cp.async.commit_group;");
    }
    int reading = 0, writing = STAGES - 1;
#pragma unroll 1
    for (int tile = 0; tile < TILES_K; ++tile) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads();
        const bool more = tile + STAGES - 1 < TILES_K;
        if (more) operands.begin(stage, stages + writing * STAGE, (tile + STAGES - 1) * TILE_K);
        asm volatile("cp.async.commit_group;");
        Fragments fragments[2];
        fragments[0].load(stages + reading * STAGE, 0);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (step + 1 < STEPS) fragments[(step + 1) % 2].load(stages + reading * STAGE, step + 1);
            fragments[step % 2].multiply_all(sums);
        }
        if (more) Operands::end(stage, stages + writing * STAGE);
        reading = reading + 1 == STAGES ? 0 : reading + 1;
        writing = writing + 1 == STAGES ? 0 : writing + 1;
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
}

// ---- the epilogue ------------------------------------------------------------------------------------------------

__device__ __forceinline__ void store_sums(const float (&sums)[WEIGHTS][MMA_M][MMA_N][4], float* to) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = warp / WARPS_N * MMA_M * 16 + lane / 4, column = warp % WARPS_N * MMA_N * 8 + lane % 4 * 2;
    float* corner = to + row * SUMS_PITCH + column;
#pragma unroll
    for (int weight = 0; weight < WEIGHTS; ++weight)
#pragma unroll
        for (int i = 0; i < MMA_M; ++i)
#pragma unroll
            for (int j = 0; j < MMA_N; ++j)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    *reinterpret_cast<float2*>(corner + (weight * TILE_M + i * 16 + half * 8) * SUMS_PITCH + j * 8) =
                        make_float2(sums[weight][i][j][2 * half], sums[weight][i][j][2 * half + 1]);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
gemm_mma(const T* x, const T* w, const T* up, const T* bias, const T* up_bias, const T* column_scale,
         const T* residual, T* y, float alpha, float beta, int m) {
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
    float sums[WEIGHTS][MMA_M][MMA_N][4] = {};
    multiply_tiles(operands, shared_address(memory), sums);

    __syncthreads();  // the sums overwrite the stages
    float* staged = reinterpret_cast<float*>(memory);
    store_sums(sums, staged);
    __syncthreads();
    const Epilogue epilogue{bias, up_bias, column_scale, residual, y, alpha, beta};
    constexpr int VECTORS = TILE_N / WIDTH;
    const int last = min(m - row, TILE_M) * VECTORS;
#pragma unroll 4
    for (int at = threadIdx.x; at < last; at += THREADS) {
        const int i = at / VECTORS, j = at % VECTORS * WIDTH;
        if (column + j < N)
            epilogue.finish<WIDTH>(staged + i * SUMS_PITCH + j, TILE_M * SUMS_PITCH, row + i, column + j, N);
    }
}
