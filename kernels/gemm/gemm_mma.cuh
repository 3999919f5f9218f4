// The main loop of kernels that multiply tiles by mma.sync: it copies operands to a ring of stages in shared memory,
// loads fragments of the stages, and sums products in fp32. Matrix products (gemm_mma.cu) and convolutions
// (conv_mma.cu) differ in how they copy x.
//
// A block computes TILE_M x TILE_N of y; its WARPS_M x WARPS_N warps divide the tile among them. All threads load and
// all multiply:
//   1. Threads copy stages of TILE_K_BYTES along k of x and of the weights to shared memory by cp.async, STAGES - 1
//      stages ahead of the one that is multiplied. Elements outside a matrix become zero. Copies of 2 bytes, and
//      all copies before sm_80, go through registers instead, because cp.async needs sm_80 and 4 bytes or more.
//   2. For each stage, one __syncthreads ensures that it has arrived, and that no thread still reads the stage that is
//      overwritten next. Warps load fragments by ldmatrix, one step of k ahead of the mma, and sum in fp32 registers.
//   3. The sums overwrite the stages in shared memory, so that the epilogue (epilogue.cuh) can read the residual and
//      write y in whole rows.
// Stages are swizzled so that ldmatrix has no bank conflicts (gemm_multiply.cuh).
//
// Macros:
//   TILE_M, TILE_N, TILE_K_BYTES, STAGES, WARPS_M, WARPS_N    as above
//   TRANSPOSED   1: the weights are n x k, 0: k x n
//   and the macros of epilogue.cuh
#pragma once
#include "types.cuh"
#include "epilogue.cuh"
#include "gemm_multiply.cuh"

constexpr int WEIGHTS = 1 + GATED;  // x is multiplied by w and, if GATED, also by up

constexpr int THREADS = 32 * WARPS_M * WARPS_N;
constexpr int ITEM = sizeof(T);
constexpr int TILE_K = TILE_K_BYTES / ITEM;
constexpr int STEPS = TILE_K_BYTES / 32;                                    // mmas along k in a stage
constexpr int MMA_M = TILE_M / WARPS_M / 16, MMA_N = TILE_N / WARPS_N / 8;  // a warp's mma tiles
constexpr int W_ROWS = TRANSPOSED ? TILE_N : TILE_K, W_ROW_BYTES = TRANSPOSED ? TILE_K_BYTES : TILE_N * ITEM;
constexpr int X_BYTES = TILE_M * TILE_K_BYTES, W_BYTES = TILE_N * TILE_K_BYTES, STAGE = X_BYTES + WEIGHTS * W_BYTES;
constexpr int SUMS_PITCH = TILE_N + 8;  // floats between rows of sums in shared memory: rows begin 8 banks apart

static_assert(MMA_M * WARPS_M * 16 == TILE_M && MMA_N * WARPS_N * 8 == TILE_N && MMA_N % 2 == 0, "tiles of 16 x 16");
static_assert(TILE_N % 32 == 0, "sums of four rows fall into different banks");

constexpr bool TF32 = ITEM == 4;

// ---- global memory -> shared memory ------------------------------------------------------------------------------

// Returns the offset of a chunk in a row of weights; without PAIRS, it is swizzled_offset. PAIRS is for TF32 weights
// that are k x n: a warp reads a fragment from two adjacent chunks of four rows, and all eight chunks are in different
// banks.
template <int ROW_BYTES, bool PAIRS>
__device__ __forceinline__ int weight_offset(int row, int chunk) {
    if constexpr (PAIRS) return row * ROW_BYTES + ((chunk ^ (row & 3) << 1) << 4);
    else return swizzled_offset<ROW_BYTES>(row, chunk);
}

// Loads a chunk in pieces of COPY bytes. `inside` returns whether the piece at an offset lies inside the matrix; other
// pieces become zeros. `address` returns the address of a piece.
template <int COPY, class Inside, class Address>
__device__ __forceinline__ void fetch_chunk(unsigned (&words)[4], Inside inside, Address address) {
    if constexpr (COPY == 2) {
        unsigned short halves[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            halves[j] = 0;
            if (inside(2 * j)) halves[j] = load_half(address(2 * j));
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) words[j] = halves[2 * j] | unsigned(halves[2 * j + 1]) << 16;
    } else {
#pragma unroll
        for (int j = 0; j < 16; j += COPY) {
#pragma unroll
            for (int word = j / 4; word < (j + COPY) / 4; ++word) words[word] = 0;
            if (inside(j)) load_bytes<Use::OFTEN, COPY>(address(j), words + j / 4);
        }
    }
}

// Copies one operand's part of a stage: ROWS rows of ROW_BYTES from a matrix whose rows are LINE bytes apart. PARTIAL:
// the last copy of a row can have fewer bytes than the others.
template <int ROWS, int ROW_BYTES, i64 LINE, int COPY, bool PARTIAL, bool PAIRS>
struct TileCopy {
    static constexpr int CHUNKS = ROW_BYTES / 16;
    static constexpr int EACH = (ROWS * CHUNKS + THREADS - 1) / THREADS;
    static constexpr bool FULL = ROWS * CHUNKS % THREADS == 0;
    static constexpr bool THROUGH_REGISTERS = !is_asynchronous(COPY);
    static_assert(!(THROUGH_REGISTERS && PARTIAL), "a load has all its bytes or none");
    unsigned registers[THROUGH_REGISTERS ? EACH : 1][4];

    template <class Do>
    __device__ __forceinline__ static void each(Do action) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int index = threadIdx.x + i * THREADS;
            if (FULL || index < ROWS * CHUNKS) action(i, index / CHUNKS, index % CHUNKS);
        }
    }

    // Starts the copies. From `from` on, the matrix has `rows` rows and `bytes` bytes per row; zeros replace the rest.
    __device__ __forceinline__ void begin(unsigned to, const char* from, int rows, i64 bytes) {
        each([&](int i, int row, int chunk) {
            const char* source = from + row * LINE + chunk * 16;
            if constexpr (THROUGH_REGISTERS) {
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
        fetch_chunk<COPY>(words, [&](int at) { return at < bytes; }, [&](int at) { return source + at; });
    }

    // Stores the chunks that went through registers.
    __device__ __forceinline__ void end(unsigned to) const {
        if constexpr (THROUGH_REGISTERS) {
            each([&](int i, int row, int chunk) {
                store_chunk(to + weight_offset<ROW_BYTES, PAIRS>(row, chunk), registers[i]);
            });
        }
    }
};

// ---- shared memory -> registers -> mma ---------------------------------------------------------------------------

// A warp's operands of one mma step: x in tiles of 16 rows and 32 bytes of k, weights in pairs of tiles of 8 columns.
struct Fragments {
    unsigned x[MMA_M][4], w[WEIGHTS][MMA_N / 2][4];

    // ROUND: fp32 operands are rounded to TF32; this must be the last operation on them.
    template <bool ROUND = true>
    __device__ __forceinline__ void load(unsigned stage, int step) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int row = warp / WARPS_N * MMA_M * 16, column = warp % WARPS_N * MMA_N * 8;
#pragma unroll
        for (int i = 0; i < MMA_M; ++i)
            load_matrices<false>(x[i],
                                 stage + swizzled_offset<TILE_K_BYTES>(row + i * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
        for (int weight = 0; weight < WEIGHTS; ++weight)
#pragma unroll
            for (int j = 0; j < MMA_N / 2; ++j)
                load_pair(w[weight][j], stage + X_BYTES + weight * W_BYTES, column + j * 16, step, lane);
        if constexpr (TF32 && ROUND) round();
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

// The sums of a thread, in the layout of mma.
struct MmaSums {
    float at[WEIGHTS][MMA_M][MMA_N][4];

    __device__ __forceinline__ void prepare() {}

    // Multiplies a stage and adds the products.
    __device__ __forceinline__ void add(unsigned stage) {
        Fragments fragments[2];
        fragments[0].load(stage, 0);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (step + 1 < STEPS) fragments[(step + 1) % 2].load(stage, step + 1);
            fragments[step % 2].multiply_all(at);
        }
    }

    // Stores the sums in shared memory, in rows of SUMS_PITCH floats; first for w, then for up.
    __device__ __forceinline__ void store(float* to) const {
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
                    for (int half = 0; half < 2; ++half) {
                        float* pair = corner + (weight * TILE_M + i * 16 + half * 8) * SUMS_PITCH + j * 8;
                        *reinterpret_cast<float2*>(pair) =
                            make_float2(at[weight][i][j][2 * half], at[weight][i][j][2 * half + 1]);
                    }
    }
};

// The main loop: multiplies the tiles of k from `first` up to, but without, `last`. There is no barrier after the last
// multiplications: the caller needs one before it overwrites the stages. Operands has
//   Stage                  the elements that a thread holds while a stage is copied
//   begin(stage, to, k)    starts the copies of the stage that begins at k, to the address `to` in shared memory
//   end(stage, to)         stores the elements that went through registers
//   AHEAD                  the maximum number of stages whose elements a thread can hold
// and Sums
//   prepare()              is called while the first copies are in flight
//   add(stage)             multiplies a stage
template <class Operands, class Sums>
__device__ __forceinline__ void multiply_tiles(const Operands& operands, unsigned stages, int first, int last,
                                               Sums& sums) {
    typename Operands::Stage stage;
    constexpr int AHEAD = Operands::AHEAD;
#pragma unroll AHEAD
    for (int i = 0; i < STAGES - 1; ++i) {
        if (first + i < last) {
            operands.begin(stage, stages + i * STAGE, (first + i) * TILE_K);
            Operands::end(stage, stages + i * STAGE);
        }
        commit_copies();
    }
    sums.prepare();
    int reading = 0, writing = STAGES - 1;
#pragma unroll 1
    for (int tile = first; tile < last; ++tile) {
        wait_for_groups<STAGES - 2>();
        __syncthreads();
        const bool more = tile + STAGES - 1 < last;
        if (more) operands.begin(stage, stages + writing * STAGE, (tile + STAGES - 1) * TILE_K);
        commit_copies();
        sums.add(stages + reading * STAGE);
        if (more) Operands::end(stage, stages + writing * STAGE);
        reading = reading + 1 == STAGES ? 0 : reading + 1;
        writing = writing + 1 == STAGES ? 0 : writing + 1;
    }
    wait_for_groups<0>();
}
