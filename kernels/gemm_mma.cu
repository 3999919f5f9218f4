// y = activation(x w + bias) [* (x up + up_bias)] * column_scale + residual by mma.sync: fp16, bf16, fp32 as TF32.
//
// A block computes BM x BN of y. Stages of BK_BYTES along k go to shared memory by cp.async, STAGES - 1 of them ahead
// of the one that is multiplied. Sums are fp32; the epilogue reads them from shared memory, so that y and residual move
// in whole rows, and rounds once.
//
//   ITEM_T  storage type     COLUMNS, DEPTH  n and k     TRANSPOSED  1: w and up are n x k, 0: k x n
//   BM, BN, BK_BYTES, STAGES  as above    WARPS_M, WARPS_N  how warps divide the tile
//   X_PITCH, W_PITCH  elements from row to row of x, and of w and up
//   X_COPY, W_COPY  bytes of a copy to shared memory: 16, 8, 4, or 2, which goes through registers
//   GROUP  tiles along m that run side by side, so that they find w in L2
//   and the constants of gemm_epilogue.cuh
#include "types.cuh"
#include "activations.cuh"
#include "gemm_epilogue.cuh"
#include "gemm_multiply.cuh"

constexpr int THREADS = 32 * WARPS_M * WARPS_N;
constexpr int ITEM = sizeof(T);
constexpr int BK = BK_BYTES / ITEM;
constexpr int STEPS = BK_BYTES / 32;  // of one mma along k
constexpr int WM = BM / WARPS_M / 16, WN = BN / WARPS_N / 8;  // a warp's mma tiles
constexpr int TILES_N = (N + BN - 1) / BN, TILES_K = (K + BK - 1) / BK;
constexpr int W_ROWS = TRANSPOSED ? BN : BK, W_ROW_BYTES = TRANSPOSED ? BK_BYTES : BN * ITEM;
constexpr int X_BYTES = BM * BK_BYTES, W_BYTES = BN * BK_BYTES, STAGE = X_BYTES + PARTS * W_BYTES;
constexpr int PITCH = BN + 8;  // of the sums in shared memory: 8 banks from row to row

static_assert(WM * WARPS_M * 16 == BM && WN * WARPS_N * 8 == BN && WN % 2 == 0, "tiles of 16 x 16");
static_assert(BN % 32 == 0, "sums of four rows fall into different banks");

// ---- global memory -> shared memory ------------------------------------------------------------------------------

// As `place`; PAIRS: four rows of two columns fall into different banks, which TF32 k x n is read by.
template <int ROW_BYTES, bool PAIRS>
__device__ __forceinline__ int place_of(int row, int chunk) {
    if constexpr (PAIRS) return row * ROW_BYTES + ((chunk ^ (row & 3) << 1) << 4);
    else return place<ROW_BYTES>(row, chunk);
}

// The first `read` bytes; the rest is zero.
template <int BYTES>
__device__ __forceinline__ void copy_async(unsigned to, const char* from, int read) {
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(read)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(read)
                     : "memory");
}

// The copy of one operand's part of a stage: ROWS rows of ROW_BYTES out of a matrix with a row every LINE bytes. CUT: the
// last copy of a row may be of a part of its bytes.
template <int ROWS, int ROW_BYTES, i64 LINE, int COPY, bool CUT, bool PAIRS>
struct Tile {
    static constexpr int CHUNKS = ROW_BYTES / 16;
    static constexpr int EACH = (ROWS * CHUNKS + THREADS - 1) / THREADS;
    static constexpr bool FULL = ROWS * CHUNKS % THREADS == 0;
    unsigned held[COPY == 2 ? EACH : 1][4];

    template <class Do>
    __device__ __forceinline__ static void each(Do action) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int index = threadIdx.x + i * THREADS;
            if (FULL || index < ROWS * CHUNKS) action(i, index / CHUNKS, index % CHUNKS);
        }
    }

    // `rows` and `bytes` are left of the matrix from `from` on: what lies outside is zero.
    __device__ __forceinline__ void begin(unsigned to, const char* from, int rows, i64 bytes) {
        each([&](int i, int row, int chunk) {
            const char* source = from + row * LINE + chunk * 16;
            if constexpr (COPY == 2) {
                fetch(held[i], source, row < rows ? bytes - chunk * 16 : 0);
            } else {
                const unsigned target = to + place_of<ROW_BYTES, PAIRS>(row, chunk);
#pragma unroll
                for (int at = 0; at < 16; at += COPY) {
                    const i64 left = bytes - (chunk * 16 + at);
                    const bool there = row < rows && left > 0;
                    const int most = CUT ? int(min(left, i64(COPY))) : COPY;
                    copy_async<COPY>(target + at, there ? source + at : from, there ? most : 0);
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

    __device__ __forceinline__ void end(unsigned to) const {
        if constexpr (COPY == 2) {
            each([&](int i, int row, int chunk) {
                const unsigned target = to + place_of<ROW_BYTES, PAIRS>(row, chunk);
                asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(target),
                             "r"(held[i][0]), "r"(held[i][1]), "r"(held[i][2]), "r"(held[i][3]) : "memory");
            });
        }
    }
};

constexpr bool TF32 = ITEM == 4;
constexpr bool X_CUT = K * ITEM % X_COPY > 0, W_CUT = (TRANSPOSED ? K : N) * ITEM % W_COPY > 0;
using TileX = Tile<BM, BK_BYTES, i64(X_PITCH) * ITEM, X_COPY, X_CUT, false>;
using TileW = Tile<W_ROWS, W_ROW_BYTES, i64(W_PITCH) * ITEM, W_COPY, W_CUT, TF32 && !TRANSPOSED>;

struct Stage {
    TileX x;
    TileW w[PARTS];
};

struct Operands {
    const char* x;          // from the block's first row on
    const char* w[PARTS];   // from its first column on
    int rows, columns;      // that are left of y from there on

    __device__ __forceinline__ void begin(Stage& stage, unsigned to, int k) const {
        const i64 left = i64(K - k) * ITEM;
        stage.x.begin(to, x + i64(k) * ITEM, rows, left);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const unsigned target = to + X_BYTES + part * W_BYTES;
            if constexpr (TRANSPOSED) stage.w[part].begin(target, w[part] + i64(k) * ITEM, columns, left);
            else stage.w[part].begin(target, w[part] + i64(k) * W_PITCH * ITEM, K - k, i64(columns) * ITEM);
        }
    }

    __device__ __forceinline__ static void end(const Stage& stage, unsigned to) {
        stage.x.end(to);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) stage.w[part].end(to + X_BYTES + part * W_BYTES);
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

// A warp's operands of one step: x in tiles of 16 x 32 bytes of k, w in pairs of tiles of 8 columns.
struct Fragments {
    unsigned x[WM][4], w[PARTS][WN / 2][4];

    __device__ __forceinline__ void load(unsigned stage, int step) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int row = warp / WARPS_N * WM * 16, column = warp % WARPS_N * WN * 8;
#pragma unroll
        for (int i = 0; i < WM; ++i)
            load_matrices<false>(
                x[i], stage + place<BK_BYTES>(row + i * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int j = 0; j < WN / 2; ++j)
                load_pair(w[part][j], stage + X_BYTES + part * W_BYTES, column + j * 16, step, lane);
        if constexpr (TF32) round();
    }

    __device__ __forceinline__ static void load_pair(unsigned (&to)[4], unsigned tile, int column, int step, int lane) {
        if constexpr (TRANSPOSED) {
            const int row = column + lane % 8 + lane / 16 * 8;
            load_matrices<false>(to, tile + place<BK_BYTES>(row, step * 2 + lane / 8 % 2));
        } else if constexpr (!TF32) {
            load_matrices<true>(to, tile + place<W_ROW_BYTES>(step * 16 + lane % 16, column / 8 + lane / 16));
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int k = step * 8 + lane % 4 + i % 2 * 4, at = column + lane / 4 + i / 2 * 8;
                to[i] = load_word(tile + place_of<W_ROW_BYTES, true>(k, at / 4) + at % 4 * 4);
            }
        }
    }

    __device__ __forceinline__ void round() {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
#pragma unroll
            for (int i = 0; i < WM; ++i) x[i][r] = nearest_tf32(x[i][r]);
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
#pragma unroll
                for (int j = 0; j < WN / 2; ++j) w[part][j][r] = nearest_tf32(w[part][j][r]);
        }
    }

    __device__ __forceinline__ void multiply_all(float (&sums)[PARTS][WM][WN][4]) const {
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int i = 0; i < WM; ++i)
#pragma unroll
                for (int j = 0; j < WN; ++j)
                    multiply(T(), sums[part][i][j], x[i], w[part][j / 2][j % 2 * 2], w[part][j / 2][j % 2 * 2 + 1]);
    }
};

// Each thread's last barrier is before its last multiplications.
__device__ __forceinline__ void multiply_tiles(const Operands& operands, unsigned stages,
                                               float (&sums)[PARTS][WM][WN][4]) {
    Stage stage;
    constexpr int AHEAD = X_COPY == 16 && W_COPY == 16 ? STAGES : 1;  // elements of many stages do not fit registers
#pragma unroll AHEAD
    for (int i = 0; i < STAGES - 1; ++i) {
        if (i < TILES_K) {
            operands.begin(stage, stages + i * STAGE, i * BK);
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
        if (more) operands.begin(stage, stages + writing * STAGE, (tile + STAGES - 1) * BK);
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

__device__ __forceinline__ void put_sums(const float (&sums)[PARTS][WM][WN][4], float* to) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float* corner = to + (warp / WARPS_N * WM * 16 + lane / 4) * PITCH + warp % WARPS_N * WN * 8 + lane % 4 * 2;
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (int i = 0; i < WM; ++i)
#pragma unroll
            for (int j = 0; j < WN; ++j)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    *reinterpret_cast<float2*>(corner + (part * BM + i * 16 + half * 8) * PITCH + j * 8) =
                        make_float2(sums[part][i][j][2 * half], sums[part][i][j][2 * half + 1]);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
gemm_mma(const T* x, const T* w, const T* up, const T* bias, const T* up_bias, const T* column_scale,
         const T* residual, T* y, float alpha, float beta, int m) {
    extern __shared__ __align__(128) char memory[];
    const int tile = blockIdx.x, tiles_m = (m + BM - 1) / BM, side = GROUP * TILES_N;
    const int first = tile / side * GROUP, high = min(tiles_m - first, GROUP);
    const int row = (first + tile % side % high) * BM, column = tile % side / high * BN;

    const i64 corner = TRANSPOSED ? i64(column) * W_PITCH : column;
    Operands operands{reinterpret_cast<const char*>(x + i64(row) * X_PITCH), {}, m - row, N - column};
    operands.w[0] = reinterpret_cast<const char*>(w + corner);
    if constexpr (PARTS == 2) operands.w[PARTS - 1] = reinterpret_cast<const char*>(up + corner);

    release_successor();
    wait_for_predecessor();
    float sums[PARTS][WM][WN][4] = {};
    multiply_tiles(operands, shared_address(memory), sums);

    __syncthreads();  // the stages become the place of the sums
    float* staged = reinterpret_cast<float*>(memory);
    put_sums(sums, staged);
    __syncthreads();
    const Epilogue epilogue{bias, up_bias, column_scale, residual, y, alpha, beta};
    constexpr int VECTORS = BN / WIDTH;
    const int last = min(m - row, BM) * VECTORS;
#pragma unroll 4
    for (int at = threadIdx.x; at < last; at += THREADS) {
        const int i = at / VECTORS, j = at % VECTORS * WIDTH;
        if (column + j < N) epilogue.finish(staged + i * PITCH + j, BM * PITCH, row + i, column + j);
    }
}
