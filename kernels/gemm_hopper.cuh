// What the Hopper GEMMs share: a producer that keeps a ring of operand tiles filled by TMA, consumers that multiply.
//
// x is m x k, y and residual are m x n, all row-major of type ELEMENT; w and up are k x n, or n x k where TRANSPOSED.
// Products are summed in fp32, the rest is computed in fp32, and the result is rounded once.
//
//   TILE_M, TILE_N  of y: what one round through k computes. GATED: two products of that size, side by side
//   PINGPONG        1: each consumer warpgroup has tiles of its own, one finishes while the other multiplies
//                   0: the two consumers share a tile, the upper and the lower half of its rows
//   STAGES          of the ring of operand tiles in shared memory, 64 elements of k each
//   CLUSTER_M, CLUSTER_N  blocks of a cluster along m, which share tiles of w, or along n, which share tiles of x:
//                   each loads its part and multicasts it. Not both above 1
//   SPLIT           blocks that share a tile, each with a part of k: 1 but for gemm_hopper_split.cu
//   ACTIVATION      a name of activations.cuh     BIAS, UP_BIAS, COLUMN_SCALE, RESIDUAL   1 where present
//
// Operands lie in shared memory in rows of 128 bytes, swizzled by TMA as wgmma reads them.
#pragma once
#include "types.cuh"
#include "activations.cuh"
#include "hopper.cuh"

namespace {

using T = ELEMENT;

constexpr int K_STEP = 64;
constexpr int ROW_BYTES = 128;
constexpr int CLUSTER = CLUSTER_M * CLUSTER_N;  // blocks that share operands
constexpr int COLUMNS = TILE_N * (1 + GATED);   // of accumulators: those of up follow those of w
constexpr int CONSUMERS = 2;
constexpr int GROUP_ROWS = PINGPONG ? TILE_M : TILE_M / CONSUMERS;  // rows of a tile that a consumer computes
constexpr int ATOMS = GROUP_ROWS / 64;                              // wgmmas above each other
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;    // 128 (40 + 2 * 232) of the 65536

constexpr int X_BYTES = TILE_M * ROW_BYTES;
constexpr int STAGE_BYTES = X_BYTES + COLUMNS * ROW_BYTES;
static_assert(TILE_M % 64 == 0 && TILE_N % 64 == 0 && COLUMNS <= 256 && (PINGPONG || TILE_M % 128 == 0));
static_assert(CLUSTER <= 2);

// Of the stages: `full` is complete when TMA has filled one, `empty` when it has been read.
struct Barriers {
    u32 first;
    __device__ __forceinline__ u32 full(int stage) const { return first + 8 * stage; }
    __device__ __forceinline__ u32 empty(int stage) const { return first + 8 * (STAGES + stage); }
};

// By all threads: of the stages, and `more` others after them that one arrival completes. A barrier must follow.
__device__ __forceinline__ void init_barriers(const Barriers& barriers, int more) {
    const int i = int(threadIdx.x) - 128;  // a thread each; thread 0 has other things to do
    if (i < 0 || i >= 2 * STAGES + more) return;
    const bool empty = i >= STAGES && i < 2 * STAGES;
    hopper::barrier_init(barriers.first + 8 * i, empty ? CLUSTER * (PINGPONG ? 1 : CONSUMERS) : 1);
    hopper::barrier_init_fence();
}

// A place in a ring of SIZE buffers and how often it went around.
template <int SIZE>
struct Ring {
    int at = 0;
    u32 parity = 0;

    __device__ __forceinline__ void next() {
        if (++at == SIZE) {
            at = 0;
            parity ^= 1;
        }
    }
    __device__ __forceinline__ void skip(int count) {
        const int to = at + count;
        at = to % SIZE;
        parity ^= to / SIZE & 1;
    }
};

// Tiles in an order in which those that run together share operands in L2: down `group` rows of tiles, then right.
struct Tiles {
    int rows, columns, group;  // in clusters
    u32 rank;

    __device__ __forceinline__ Tiles(int m, int n, int group)
        : rows((m + TILE_M * CLUSTER_M - 1) / (TILE_M * CLUSTER_M)),
          columns((n + TILE_N * CLUSTER_N - 1) / (TILE_N * CLUSTER_N)), group(group),
          rank(CLUSTER > 1 ? hopper::cluster_rank() : 0) {}

    __device__ __forceinline__ int first() const { return blockIdx.x / (CLUSTER * SPLIT); }
    __device__ __forceinline__ int step() const { return gridDim.x / (CLUSTER * SPLIT); }
    __device__ __forceinline__ int count() const { return rows * columns; }

    // The first row and column of y in a tile.
    __device__ __forceinline__ int2 origin(int tile) const {
        const int band = tile / (group * columns), within = tile - band * group * columns;
        const int height = max(1, min(group, rows - band * group));  // beyond the last tile, any
        const int row = band * group + within % height, column = within / height;
        return {(row * CLUSTER_M + int(rank) % CLUSTER_M) * TILE_M,
                (column * CLUSTER_N + int(rank) / CLUSTER_M) * TILE_N};
    }
};

// ---- the producer ------------------------------------------------------------------------------------------------

// PARTS blocks of the cluster need the same box: each loads its part for all.
template <int PARTS>
__device__ __forceinline__ void load_part(const TensorMap& map, u32 to, u32 full, int c0, int c1) {
    if constexpr (PARTS == 1) hopper::load(map, to, full, c0, c1);
    else hopper::load_multicast(map, to, full, (1 << PARTS) - 1, c0, c1);
}

__device__ __forceinline__ void load_weight(const TensorMap& w, u32 to, u32 full, int part, int column, int k) {
    if constexpr (TRANSPOSED) {
        constexpr int ROWS = TILE_N / CLUSTER_M;
        load_part<CLUSTER_M>(w, to + part * ROWS * ROW_BYTES, full, k, column + part * ROWS);
    } else {
        constexpr int ROWS = K_STEP / CLUSTER_M;
#pragma unroll
        for (int i = 0; i < TILE_N / 64; ++i)
            load_part<CLUSTER_M>(w, to + (i * K_STEP + part * ROWS) * ROW_BYTES, full, column + 64 * i,
                                 k + part * ROWS);
    }
}

// `range`: the first step along k, and the one after the last.
__device__ __forceinline__ void produce(const TensorMap& x, const TensorMap& w, const TensorMap& up, u32 shared,
                                        const Barriers& barriers, const Tiles& tiles, int2 range) {
    constexpr int ROWS = TILE_M / CLUSTER_N;
    const int part = tiles.rank;
    Ring<STAGES> ring;
    for (int tile = tiles.first(); tile < tiles.count(); tile += tiles.step()) {
        const int2 origin = tiles.origin(tile);
        for (int step = range.x; step < range.y; ++step) {
            const int at = step * K_STEP;
            const u32 stage = shared + ring.at * STAGE_BYTES, full = barriers.full(ring.at);
            hopper::barrier_wait(barriers.empty(ring.at), ring.parity ^ 1);
            hopper::barrier_arrive_expect(full, STAGE_BYTES);
            const int x_part = CLUSTER_N > 1 ? part : 0, w_part = CLUSTER_M > 1 ? part : 0;
            load_part<CLUSTER_N>(x, stage + x_part * ROWS * ROW_BYTES, full, at, origin.x + x_part * ROWS);
            load_weight(w, stage + X_BYTES, full, w_part, origin.y, at);
            if constexpr (GATED) load_weight(up, stage + X_BYTES + TILE_N * ROW_BYTES, full, w_part, origin.y, at);
            ring.next();
        }
    }
}

// ---- the consumers ----------------------------------------------------------------------------------------------

__device__ __forceinline__ void release(u32 empty, int thread) {
    if constexpr (CLUSTER == 1) {
        if (thread == 0) hopper::barrier_arrive(empty);
    } else {
        if (thread < CLUSTER) hopper::barrier_arrive_at(empty, thread);
    }
}

// Named barriers 1 and 2: all threads of a consumer. 3 and 4, of both: it is this consumer's turn to multiply. A
// consumer that takes turns has not seen the other's stages fill, and could not tell a phase from the last but one.
__device__ __forceinline__ int turn(int consumer) { return 1 + CONSUMERS + consumer; }

// The sums over k of this consumer's rows from `first_row` on. `pass_on`: the other has a tile after this one.
__device__ __forceinline__ void multiply(float (&d)[ATOMS][COLUMNS / 2], Ring<STAGES>& ring, const Barriers& barriers,
                                         u32 shared, int first_row, int steps, int consumer, bool pass_on) {
    const int thread = threadIdx.x % 128;
    const u64 x = hopper::matrix_descriptor<128>(shared + first_row * ROW_BYTES, 16, 8 * ROW_BYTES);
    const u64 w = hopper::matrix_descriptor<128>(shared + X_BYTES, TRANSPOSED ? 16 : K_STEP * ROW_BYTES, 8 * ROW_BYTES);
    constexpr int X_STEP = 32 / 16, W_STEP = (TRANSPOSED ? 32 : 16 * ROW_BYTES) / 16;  // 16 of k, in units of 16 bytes
    u32 before = 0;
    if constexpr (PINGPONG) hopper::named_barrier(turn(consumer), 256);
    for (int step = 0; step < steps; ++step) {
        hopper::barrier_wait(barriers.full(ring.at), ring.parity);
        if (PINGPONG && pass_on && step == steps - 1) hopper::named_barrier_arrive(turn(1 - consumer), 256);
        const u64 stage = ring.at * (STAGE_BYTES / 16);
        hopper::wgmma_fence();
#pragma unroll
        for (int i = 0; i < K_STEP / 16; ++i)
#pragma unroll
            for (int atom = 0; atom < ATOMS; ++atom)
                hopper::wgmma<!TRANSPOSED>(T(), d[atom], x + stage + i * X_STEP + atom * (64 * ROW_BYTES / 16),
                                           w + stage + i * W_STEP, step > 0 || i > 0);
        hopper::wgmma_commit();
        hopper::wgmma_wait<1>();
        if (step > 0) release(before, thread);
        before = barriers.empty(ring.at);
        ring.next();
    }
    hopper::wgmma_wait<0>();
    release(before, thread);
#pragma unroll
    for (int atom = 0; atom < ATOMS; ++atom) hopper::settle(d[atom]);
}

// Two neighbours of each vector along n, as they lie in memory.
struct Added {
    u32 bias, up_bias, scale;
};

// Four sums of a thread, in wgmma's order of two columns and two rows, to results.
__device__ __forceinline__ void activate_four(const float* d, const float* up, const Added& added, float alpha,
                                              float beta, float (&y)[4]) {
    float bias[2], up_bias[2], scale[2];
    if constexpr (BIAS) widen(T(), added.bias, bias);
    if constexpr (UP_BIAS) widen(T(), added.up_bias, up_bias);
    if constexpr (COLUMN_SCALE) widen(T(), added.scale, scale);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        y[i] = activate::ACTIVATION(BIAS ? d[i] + bias[i % 2] : d[i], alpha, beta);
        if constexpr (GATED) y[i] *= UP_BIAS ? up[i] + up_bias[i % 2] : up[i];
        if constexpr (COLUMN_SCALE) y[i] *= scale[i % 2];
    }
}

}  // namespace
