// What the Hopper GEMMs share: a producer that keeps a ring of operand tiles filled by TMA, consumers that multiply.
//
// x is m x k, y and residual are m x n, all row-major of type ELEMENT; w and up are k x n, or n x k where TRANSPOSED.
// Products are summed in fp32, the rest is computed in fp32, and the result is rounded once.
//
//   TILE_M, TILE_N  of y: what one round through k computes. GATED: two products of that size, side by side
//   PINGPONG        1: each consumer warpgroup has tiles of its own, one finishes while the other multiplies
//                   0: the consumers share a tile, each has as many of its rows
//   CONSUMERS       warpgroups that multiply: 2, or 3 that share a tile
//   STAGES          of the ring of operand tiles in shared memory, 64 elements of k each
//   SPLIT           blocks of a cluster, which share a tile, each with a part of k: 1 but for gemm_hopper_split.cu
//   PRODUCTS        of x with as many weights, each of its own n and with its own y and bias: 1 to 3. Above 1 neither
//                   GATED nor anything but a BIAS
//   DIRECT          0: n is a multiple of 8 and TMA stores y.  1: threads do, whose rows begin at any element, as vectors
//                   do; what TMA reads still has rows of multiples of 16 bytes
//   WEIGHTS_CONSTANT  1: no kernel writes them, so that the first are read before the one in front of this has ended
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
constexpr int COLUMNS = TILE_N * (1 + GATED);   // of accumulators: those of up follow those of w
constexpr int GROUP_ROWS = PINGPONG ? TILE_M : TILE_M / CONSUMERS;  // rows of a tile that a consumer computes
constexpr int ATOMS = GROUP_ROWS / 64;                              // wgmmas above each other
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32;        // 128 (40 + 2 * 232) of the 65536,
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : 160;      // or 128 (32 + 3 * 160)

constexpr int X_BYTES = TILE_M * ROW_BYTES;
constexpr int STAGE_BYTES = X_BYTES + COLUMNS * ROW_BYTES;
static_assert(TILE_M % 64 == 0 && TILE_N % 64 == 0 && COLUMNS <= 256);
static_assert(PINGPONG ? CONSUMERS == 2 : TILE_M % (64 * CONSUMERS) == 0);
static_assert(PRODUCTS == 1 || !(GATED || UP_BIAS || COLUMN_SCALE || RESIDUAL || SPLIT > 1));

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
    hopper::barrier_init(barriers.first + 8 * i, empty && !PINGPONG ? CONSUMERS : 1);
    hopper::barrier_init_fence();
}

// After init_barriers, by all threads: they see the barriers, and the other blocks that share the tile have started.
__device__ __forceinline__ void sync_blocks() {
    if constexpr (SPLIT > 1) hopper::cluster_barrier_relaxed();
    else __syncthreads();
}

// Warpgroup of this thread; through a shuffle, so that the compiler knows that a warp's threads agree.
__device__ __forceinline__ int warpgroup() { return __shfl_sync(0xffffffff, threadIdx.x / 128, 0); }

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

// One of what each product has its own of; a run-time index would move the array to memory.
template <class Value>
__device__ __forceinline__ Value pick(const Value (&of)[PRODUCTS], int product) {
    Value found = of[0];
#pragma unroll
    for (int i = 1; i < PRODUCTS; ++i)
        if (product == i) found = of[i];
    return found;
}

// The weights, whose tiles lie side by side.
struct Weights {
    const TensorMap* maps[PRODUCTS];
    int n[PRODUCTS];

    static __device__ __forceinline__ int columns_of(int n) { return (n + TILE_N - 1) / TILE_N; }
    __device__ __forceinline__ int columns() const {
        int sum = 0;
#pragma unroll
        for (int i = 0; i < PRODUCTS; ++i) sum += columns_of(n[i]);
        return sum;
    }
    // Which product a column of all tiles belongs to; it becomes a column of that one.
    __device__ __forceinline__ int find(int& column) const {
        int product = 0;
#pragma unroll
        for (int i = 0; i < PRODUCTS - 1; ++i) {
            const int width = columns_of(n[i]) * TILE_N;
            if (column < width) break;
            column -= width;
            ++product;
        }
        return product;
    }
};

// Tiles in an order in which those that run together share operands in L2: down `group` rows of tiles, then right.
struct Tiles {
    int rows, columns, group;

    __device__ __forceinline__ Tiles(int m, int columns, int group)
        : rows((m + TILE_M - 1) / TILE_M), columns(columns), group(group) {}

    __device__ __forceinline__ int first() const { return blockIdx.x / SPLIT; }
    __device__ __forceinline__ int step() const { return gridDim.x / SPLIT; }
    __device__ __forceinline__ int count() const { return rows * columns; }

    // The first row and column of a tile; columns of all products count.
    __device__ __forceinline__ int2 origin(int tile) const {
        const int band = tile / (group * columns), within = tile - band * group * columns;
        const int height = min(group, rows - band * group);
        return {(band * group + within % height) * TILE_M, within / height * TILE_N};
    }
};

// ---- the producer ------------------------------------------------------------------------------------------------

__device__ __forceinline__ void load_weight(const TensorMap& w, u32 to, u32 full, int column, int k) {
    if constexpr (TRANSPOSED) {
        hopper::load(w, to, full, k, column);
    } else {
#pragma unroll
        for (int i = 0; i < TILE_N / 64; ++i) hopper::load(w, to + i * K_STEP * ROW_BYTES, full, column + 64 * i, k);
    }
}

__device__ __forceinline__ void load_weights(const TensorMap& w, const TensorMap& up, u32 stage, u32 full, int column,
                                             int k) {
    load_weight(w, stage + X_BYTES, full, column, k);
    if constexpr (GATED) load_weight(up, stage + X_BYTES + TILE_N * ROW_BYTES, full, column, k);
}

// `range`: the first step along k, and the one after the last.
__device__ __forceinline__ void produce(const TensorMap& x, const Weights& weights, const TensorMap& up, u32 shared,
                                        const Barriers& barriers, const Tiles& tiles, int2 range) {
    int ahead = 0;  // stages that have their weights, but not yet x
    if (WEIGHTS_CONSTANT && tiles.first() < tiles.count()) {
        int2 origin = tiles.origin(tiles.first());
        const TensorMap& w = *pick(weights.maps, weights.find(origin.y));
        for (; ahead < min(STAGES, range.y - range.x); ++ahead) {
            const u32 stage = shared + ahead * STAGE_BYTES, full = barriers.full(ahead);
            hopper::barrier_arrive_expect(full, STAGE_BYTES);
            load_weights(w, up, stage, full, origin.y, (range.x + ahead) * K_STEP);
        }
    }
    wait_for_predecessor();
    Ring<STAGES> ring;
    for (int tile = tiles.first(); tile < tiles.count(); tile += tiles.step()) {
        int2 origin = tiles.origin(tile);
        const TensorMap& w = *pick(weights.maps, weights.find(origin.y));
        for (int step = range.x; step < range.y; ++step) {
            const u32 stage = shared + ring.at * STAGE_BYTES, full = barriers.full(ring.at);
            if (WEIGHTS_CONSTANT && ahead > 0) {
                --ahead;
            } else {
                hopper::barrier_wait(barriers.empty(ring.at), ring.parity ^ 1);
                hopper::barrier_arrive_expect(full, STAGE_BYTES);
                load_weights(w, up, stage, full, origin.y, step * K_STEP);
            }
            hopper::load(x, stage, full, step * K_STEP, origin.x);
            ring.next();
        }
    }
}

// ---- the consumers ----------------------------------------------------------------------------------------------

// Named barriers 1 and 2: all threads of a consumer. 3 and 4, of both: it is this consumer's turn to multiply. A
// consumer that takes turns has not seen the other's stages fill, and could not tell a phase from the last but one.
__device__ __forceinline__ int turn(int consumer) { return 1 + CONSUMERS + consumer; }

__device__ __forceinline__ u64 with_low(u64 descriptor, u32 low) { return (descriptor >> 32) << 32 | low; }

// The sums over k of this consumer's rows from `first_row` on. `pass_on`: the other has a tile after this one.
__device__ __forceinline__ void multiply(float (&d)[ATOMS][COLUMNS / 2], Ring<STAGES>& ring, const Barriers& barriers,
                                         u32 shared, int first_row, int steps, int consumer, bool pass_on) {
    const int thread = threadIdx.x % 128;
    const u64 x = hopper::matrix_descriptor<128>(shared + first_row * ROW_BYTES, 16, 8 * ROW_BYTES);
    const u64 w = hopper::matrix_descriptor<128>(shared + X_BYTES, TRANSPOSED ? 16 : K_STEP * ROW_BYTES, 8 * ROW_BYTES);
    constexpr int X_STEP = 32 / 16, W_STEP = (TRANSPOSED ? 32 : 16 * ROW_BYTES) / 16;  // 16 of k, in units of 16 bytes
    const u32 x_low = u32(x), w_low = u32(w);  // addresses are in the low words: only those change, in 32 bits
    u32 before = 0;
    if constexpr (PINGPONG) hopper::named_barrier(turn(consumer), 256);
    for (int step = 0; step < steps; ++step) {
        hopper::barrier_wait(barriers.full(ring.at), ring.parity);
        if (PINGPONG && pass_on && step == steps - 1) hopper::named_barrier_arrive(turn(1 - consumer), 256);
        const u32 stage = ring.at * (STAGE_BYTES / 16);
        hopper::wgmma_fence();
#pragma unroll
        for (int i = 0; i < K_STEP / 16; ++i)
#pragma unroll
            for (int atom = 0; atom < ATOMS; ++atom)
                hopper::wgmma<!TRANSPOSED>(
                    T(), d[atom], with_low(x, x_low + stage + i * X_STEP + atom * (64 * ROW_BYTES / 16)),
                    with_low(w, w_low + stage + i * W_STEP), step > 0 || i > 0);
        hopper::wgmma_commit();
        hopper::wgmma_wait<1>();
        if (step > 0 && thread == 0) hopper::barrier_arrive(before);
        before = barriers.empty(ring.at);
        ring.next();
    }
    hopper::wgmma_wait<0>();
    if (thread == 0) hopper::barrier_arrive(before);
#pragma unroll
    for (int atom = 0; atom < ATOMS; ++atom) hopper::settle(d[atom]);
}

// Two neighbours of each vector along n.
struct Added {
    float2 bias, up_bias, scale;
};

__device__ __forceinline__ float either(float2 both, int i) { return i % 2 ? both.y : both.x; }

__device__ __forceinline__ float2 widen_two(u32 word) {
    float both[2];
    widen(T(), word, both);
    return {both[0], both[1]};
}

// Two neighbours of a row that has `left` elements from `from` on; zeros beyond.
__device__ __forceinline__ u32 load_two(const T* from, int left) {
    if constexpr (!DIRECT) return left > 0 ? load_cached<2>(from).words[0] : 0;
    const u32 first = left > 0 ? load_cached<1>(from).words[0] : 0;
    return left > 1 ? load_cached<1>(from + 1).words[0] << 16 | first : first;
}

// Four sums of a thread, in wgmma's order of two columns and two rows, to results.
__device__ __forceinline__ void activate_four(const float* d, const float* up, const Added& added, float alpha,
                                              float beta, float (&y)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        y[i] = activate::ACTIVATION(BIAS ? d[i] + either(added.bias, i) : d[i], alpha, beta);
        if constexpr (GATED) y[i] *= UP_BIAS ? up[i] + either(added.up_bias, i) : up[i];
        if constexpr (COLUMN_SCALE) y[i] *= either(added.scale, i);
    }
}

}  // namespace
