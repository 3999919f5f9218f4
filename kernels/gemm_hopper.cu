// y = activation(x w + bias) [* (x up + up_bias)] * column_scale + residual, with wgmma and TMA (sm_90a).
//
// x is m x k, y and residual are m x n, all row-major of type ELEMENT; w and up are k x n, or n x k where TRANSPOSED.
// Products are summed in fp32, the rest is computed in fp32, and the result is rounded once.
//
//   TILE_M, TILE_N  of y: what one round through k computes. GATED: two products of that size, side by side
//   PINGPONG        1: each consumer warpgroup has tiles of its own, one finishes while the other multiplies
//                   0: the two consumers share a tile, the upper and the lower half of its rows
//   STAGES          of the ring of operand tiles in shared memory, 64 elements of k each
//   SLOTS           pieces of y, 64 x 64, that a consumer may have between registers and memory: 2 or more, and where
//                   there is a RESIDUAL at most one more than a tile has
//   CLUSTER_M, CLUSTER_N  blocks of a cluster along m, which share tiles of w, or along n, which share tiles of x:
//                   each loads its part and multicasts it. Not both above 1
//   ACTIVATION      a name of activations.cuh     BIAS, UP_BIAS, COLUMN_SCALE, RESIDUAL   1 where present
//
// A block has a producer warpgroup, of which one thread issues all loads, and two consumers; it stays and takes every
// gridDim.x-th tile. Operands lie in shared memory in rows of 128 bytes, swizzled by TMA as wgmma reads them.
#include "types.cuh"
#include "activations.cuh"
#include "hopper.cuh"

namespace {

using T = ELEMENT;

constexpr int K_STEP = 64;
constexpr int ROW_BYTES = 128;
constexpr int CLUSTER = CLUSTER_M * CLUSTER_N;
constexpr int COLUMNS = TILE_N * (1 + GATED);  // of accumulators: those of up follow those of w
constexpr int CONSUMERS = 2;
constexpr int GROUP_ROWS = PINGPONG ? TILE_M : TILE_M / CONSUMERS;  // rows of a tile that a consumer computes
constexpr int ATOMS = GROUP_ROWS / 64;                              // wgmmas above each other
constexpr int PIECE_COLUMNS = TILE_N / 64;
constexpr int PIECES = ATOMS * PIECE_COLUMNS;  // of 64 x 64 elements of y
constexpr int VECTORS = BIAS + UP_BIAS + COLUMN_SCALE;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;  // 128 (40 + 2 * 232) of the 65536

constexpr int X_BYTES = TILE_M * ROW_BYTES;
constexpr int STAGE_BYTES = X_BYTES + COLUMNS * ROW_BYTES;
constexpr int PIECE_BYTES = 64 * ROW_BYTES;
constexpr int PIECES_AT = STAGES * STAGE_BYTES;
constexpr int VECTORS_AT = PIECES_AT + CONSUMERS * SLOTS * PIECE_BYTES;
constexpr int BARRIERS_AT = VECTORS_AT + CONSUMERS * VECTORS * TILE_N * 2;

static_assert(TILE_M % 64 == 0 && TILE_N % 64 == 0 && COLUMNS <= 256 && (PINGPONG || TILE_M % 128 == 0));
static_assert(SLOTS >= 2 && (!RESIDUAL || SLOTS <= PIECES + 1));
static_assert(CLUSTER <= 2);

struct Barriers {
    u32 first;
    __device__ __forceinline__ u32 full(int stage) const { return first + 8 * stage; }
    __device__ __forceinline__ u32 empty(int stage) const { return first + 8 * (STAGES + stage); }
    __device__ __forceinline__ u32 residual(int slot) const { return first + 8 * (2 * STAGES + slot); }
};

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

    __device__ __forceinline__ int first() const { return blockIdx.x / CLUSTER; }
    __device__ __forceinline__ int step() const { return gridDim.x / CLUSTER; }
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

__device__ __forceinline__ void produce(const TensorMap& x, const TensorMap& w, const TensorMap& up, u32 shared,
                                        const Barriers& barriers, const Tiles& tiles, int k) {
    constexpr int ROWS = TILE_M / CLUSTER_N;
    const int part = tiles.rank;
    Ring<STAGES> ring;
    for (int tile = tiles.first(); tile < tiles.count(); tile += tiles.step()) {
        const int2 origin = tiles.origin(tile);
        for (int at = 0; at < k; at += K_STEP) {
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

// ---- a consumer --------------------------------------------------------------------------------------------------

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

// What is added to or multiplied with columns: two elements of each vector a thread on their way to shared memory.
struct Vectors {
    u32 words[VECTORS > 0 ? VECTORS : 1];

    __device__ __forceinline__ void fetch(const T* bias, const T* up_bias, const T* scale, int column, int n) {
        int i = 0;
        const bool inside = column < n;  // n is a multiple of 8
        if constexpr (BIAS) words[i++] = inside ? load_cached<2>(bias + column).words[0] : 0;
        if constexpr (UP_BIAS) words[i++] = inside ? load_cached<2>(up_bias + column).words[0] : 0;
        if constexpr (COLUMN_SCALE) words[i++] = inside ? load_cached<2>(scale + column).words[0] : 0;
    }
};

__device__ __forceinline__ float2 two(const u32* vector, int column) {
    float both[2];
    widen(T(), vector[column / 2], both);
    return {both[0], both[1]};
}

// Four neighbours of a thread's accumulators (wgmma's order: two columns, two rows) to results.
__device__ __forceinline__ void activate_four(const float* d, const float* up, const u32* vectors, int column,
                                              float alpha, float beta, float (&y)[4]) {
    const float2 bias = BIAS ? two(vectors, column) : float2{0.0f, 0.0f};
    const float2 up_bias = UP_BIAS ? two(vectors + BIAS * TILE_N / 2, column) : float2{0.0f, 0.0f};
    const float2 scale = COLUMN_SCALE ? two(vectors + (BIAS + UP_BIAS) * TILE_N / 2, column) : float2{1.0f, 1.0f};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        y[i] = activate::ACTIVATION(BIAS ? d[i] + (i % 2 ? bias.y : bias.x) : d[i], alpha, beta);
        if constexpr (GATED) y[i] *= UP_BIAS ? up[i] + (i % 2 ? up_bias.y : up_bias.x) : up[i];
        if constexpr (COLUMN_SCALE) y[i] *= i % 2 ? scale.y : scale.x;
    }
}

// One consumer's way from accumulators to memory, through its slots.
struct Output {
    const TensorMap& y;
    const TensorMap& residual;
    u32 slots;            // shared memory
    u32 lane_at;          // where in a slot this lane's row of matrices begins
    const u32* vectors;   // shared memory, T
    Barriers barriers;    // residual(0) is this consumer's first
    int thread, named;    // of the warpgroup; its barrier
    Ring<SLOTS> ring;

    __device__ __forceinline__ u32 slot(int index) const { return slots + index * PIECE_BYTES; }

    __device__ __forceinline__ void fetch_residual(int index, int2 origin, int piece) {
        hopper::barrier_arrive_expect(barriers.residual(index), PIECE_BYTES);
        hopper::load(residual, slot(index), barriers.residual(index), origin.y + piece % PIECE_COLUMNS * 64,
                     origin.x + piece / PIECE_COLUMNS * 64);
    }

    // 16 rows and 64 columns a warp: `d` and `up` are the thread's accumulators of the piece.
    __device__ __forceinline__ void fill(const float* d, const float* up, int column, float alpha, float beta) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 at = (slot(ring.at) + lane_at) ^ i << 5;  // 16 columns on, in swizzled rows
            float results[2][4];
#pragma unroll
            for (int j = 0; j < 2; ++j)
                activate_four(d + 8 * i + 4 * j, up + 8 * i + 4 * j, vectors, column + 16 * i + 8 * j, alpha, beta,
                              results[j]);
            u32 words[4];
            if constexpr (RESIDUAL) {
                hopper::load_matrices(at, words);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float both[2];
                    widen(T(), words[j], both);
                    results[j / 2][j % 2 * 2] += both[0];
                    results[j / 2][j % 2 * 2 + 1] += both[1];
                }
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) words[j] = narrow(T(), &results[j / 2][j % 2 * 2]);
            hopper::store_matrices(at, words);
        }
    }

    // `next`: this consumer's next tile, if there is one.
    __device__ __forceinline__ void finish(float (&d)[ATOMS][COLUMNS / 2], int2 origin, bool more, int2 next,
                                           float alpha, float beta) {
        const int column = thread % 4 * 2;
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            const int atom = piece / PIECE_COLUMNS, right = piece % PIECE_COLUMNS;
            if constexpr (RESIDUAL) hopper::barrier_wait(barriers.residual(ring.at), ring.parity);
            const float* gate = &d[atom][32 * right];
            fill(gate, gate + (GATED ? TILE_N / 2 : 0), 64 * right + column, alpha, beta);
            hopper::store_fence();
            // The slot that the next piece, or a later residual, goes to: its store has read it.
            if (thread == 0) hopper::store_wait_read<RESIDUAL ? 0 : SLOTS - 2>();
            hopper::named_barrier(named, 128);
            if (thread == 0) {
                hopper::store(y, slot(ring.at), origin.y + 64 * right, origin.x + 64 * atom);
                hopper::store_commit();
                if constexpr (RESIDUAL) follow(piece, origin, more, next);
            }
            ring.next();
        }
    }

    // The residual of the piece SLOTS - 1 further on, into the slot before this one, which is free.
    __device__ __forceinline__ void follow(int piece, int2 origin, bool more, int2 next) {
        const int ahead = piece + SLOTS - 1, before = (ring.at + SLOTS - 1) % SLOTS;
        if (ahead < PIECES) fetch_residual(before, origin, ahead);
        else if (more) fetch_residual(before, next, ahead - PIECES);
    }
};

__device__ __forceinline__ void consume(const TensorMap& y, const TensorMap& residual, char* memory,
                                        Barriers barriers, const Tiles& tiles, const T* bias, const T* up_bias,
                                        const T* scale, float alpha, float beta, int n, int k) {
    const u32 shared = hopper::shared_address(memory);
    const int consumer = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, lane = thread % 32;
    u32* vectors = reinterpret_cast<u32*>(memory + VECTORS_AT) + consumer * VECTORS * TILE_N / 2;
    const int row = thread / 32 * 16 + lane % 16;
    Output output{y, residual, shared + PIECES_AT + consumer * SLOTS * PIECE_BYTES,
                  u32(row * ROW_BYTES + ((lane / 16 ^ row % 8) << 4)), vectors,
                  Barriers{barriers.first + 8 * SLOTS * consumer}, thread, 1 + consumer};
    const int steps = (k + K_STEP - 1) / K_STEP, stride = tiles.step() * (PINGPONG ? CONSUMERS : 1);
    const int above = PINGPONG ? 0 : consumer * GROUP_ROWS;
    Ring<STAGES> ring;
    int tile = tiles.first();
    if (PINGPONG && consumer > 0) {
        tile += tiles.step();
        ring.skip(steps);
        hopper::named_barrier_arrive(turn(0), 256);
    }
    int2 origin = tiles.origin(tile);
    origin.x += above;
    if (RESIDUAL && thread == 0 && tile < tiles.count())
        for (int piece = 0; piece < SLOTS - 1; ++piece) output.fetch_residual(piece, origin, piece);
    for (; tile < tiles.count(); tile += stride) {
        Vectors fetched;
        if (VECTORS > 0 && thread < TILE_N / 2) fetched.fetch(bias, up_bias, scale, origin.y + 2 * thread, n);
        float d[ATOMS][COLUMNS / 2];
        multiply(d, ring, barriers, shared, above, steps, consumer, tile + tiles.step() < tiles.count());
        if (PINGPONG) ring.skip(steps);
        if constexpr (VECTORS > 0) {
            if (thread < TILE_N / 2)
                for (int i = 0; i < VECTORS; ++i) vectors[i * TILE_N / 2 + thread] = fetched.words[i];
            hopper::named_barrier(output.named, 128);
        }
        int2 next = tiles.origin(tile + stride);
        next.x += above;
        output.finish(d, origin, tile + stride < tiles.count(), next, alpha, beta);
        origin = next;
    }
    if (thread == 0) hopper::store_wait_read<0>();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128 * (1 + CONSUMERS), 1)
    gemm_hopper(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
#if GATED
                const __grid_constant__ TensorMap up,
#endif
                const __grid_constant__ TensorMap y,
#if RESIDUAL
                const __grid_constant__ TensorMap residual,
#endif
                const T* bias, const T* up_bias, const T* scale, float alpha, float beta, int m, int n, int k,
                int group) {
#if !GATED
    const TensorMap& up = w;
#endif
#if !RESIDUAL
    const TensorMap& residual = y;
#endif
    extern __shared__ __align__(1024) char memory[];
    const u32 shared = hopper::shared_address(memory);
    const Barriers barriers{shared + BARRIERS_AT};
    if (threadIdx.x == 0) {
        hopper::prefetch(x);
        hopper::prefetch(w);
        if constexpr (GATED) hopper::prefetch(up);
        if constexpr (RESIDUAL) hopper::prefetch(residual);
        hopper::prefetch(y);
        for (int i = 0; i < STAGES; ++i) {
            hopper::barrier_init(barriers.full(i), 1);
            hopper::barrier_init(barriers.empty(i), CLUSTER * (PINGPONG ? 1 : CONSUMERS));
        }
        for (int i = 0; i < CONSUMERS * SLOTS; ++i) hopper::barrier_init(barriers.residual(i), 1);
        hopper::barrier_init_fence();
    }
    __syncthreads();
    if constexpr (CLUSTER > 1) hopper::cluster_barrier();
    const Tiles tiles(m, n, group);
    if (threadIdx.x < 128) {
        hopper::give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) produce(x, w, up, shared, barriers, tiles, k);
        __syncwarp();
    } else {
        hopper::take_registers<CONSUMER_REGISTERS>();
        consume(y, residual, memory, barriers, tiles, bias, up_bias, scale, alpha, beta, n, k);
    }
    if constexpr (CLUSTER > 1) hopper::cluster_barrier();  // none leaves while another may arrive at its barriers
}
