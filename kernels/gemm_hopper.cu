// y = activation(x w + bias) [* (x up + up_bias)] * column_scale + residual, with wgmma and TMA (sm_90a).
//
// Constants beside those of gemm_hopper.cuh:
//   SLOTS  pieces of y, 64 x 64, that a consumer may have between registers and memory: 2 or more, and where there is
//          a RESIDUAL at most one more than a tile has
//
// A block has a producer warpgroup, of which one thread issues all loads, and two consumers; it stays and takes every
// gridDim.x-th tile. Results go to memory by TMA, through slots of shared memory, and residuals come the same way.
#include "gemm_hopper.cuh"

namespace {

constexpr int PIECE_COLUMNS = TILE_N / 64;
constexpr int PIECES = ATOMS * PIECE_COLUMNS;  // of 64 x 64 elements of y
constexpr int VECTORS = BIAS + UP_BIAS + COLUMN_SCALE;

constexpr int PIECE_BYTES = 64 * ROW_BYTES;
constexpr int PIECES_AT = STAGES * STAGE_BYTES;
constexpr int VECTORS_AT = PIECES_AT + CONSUMERS * SLOTS * PIECE_BYTES;
constexpr int BARRIERS_AT = VECTORS_AT + CONSUMERS * VECTORS * TILE_N * 2;

static_assert(SLOTS >= 2 && (!RESIDUAL || SLOTS <= PIECES + 1));

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

// A thread's part of the vectors for a piece: two columns of every eight. Read before the first store_matrices, which
// later reads would have to wait for.
__device__ __forceinline__ void read_added(const u32* vectors, int column, Added (&added)[8]) {
    const u32* at = vectors + column / 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if constexpr (BIAS) added[i].bias = at[4 * i];
        if constexpr (UP_BIAS) added[i].up_bias = at[BIAS * TILE_N / 2 + 4 * i];
        if constexpr (COLUMN_SCALE) added[i].scale = at[(BIAS + UP_BIAS) * TILE_N / 2 + 4 * i];
    }
}

// One consumer's way from accumulators to memory, through its slots.
struct Output {
    const TensorMap& y;
    const TensorMap& residual;
    u32 slots;           // shared memory
    u32 lane_at;         // where in a slot this lane's row of matrices begins
    const u32* vectors;  // shared memory, T
    u32 residual_full;   // barriers of its slots
    int thread, named;   // of the warpgroup; its barrier
    Ring<SLOTS> ring;

    __device__ __forceinline__ u32 slot(int index) const { return slots + index * PIECE_BYTES; }

    __device__ __forceinline__ void fetch_residual(int index, int2 origin, int piece) {
        const u32 full = residual_full + 8 * index;
        hopper::barrier_arrive_expect(full, PIECE_BYTES);
        hopper::load(residual, slot(index), full, origin.y + piece % PIECE_COLUMNS * 64,
                     origin.x + piece / PIECE_COLUMNS * 64);
    }

    // 16 rows and 64 columns a warp: `d` and `up` are the thread's accumulators of the piece.
    __device__ __forceinline__ void fill(const float* d, const float* up, int column, float alpha, float beta) {
        Added added[8];
        read_added(vectors, column, added);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 place = (slot(ring.at) + lane_at) ^ i << 5;  // 16 columns on, in swizzled rows
            float results[2][4];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int at = 4 * (2 * i + j);
                activate_four(d + at, up + at, added[2 * i + j], alpha, beta, results[j]);
            }
            u32 words[4];
            if constexpr (RESIDUAL) {
                hopper::load_matrices(place, words);
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
            hopper::store_matrices(place, words);
        }
    }

    // `next`: this consumer's next tile, if there is one.
    __device__ __forceinline__ void finish(float (&d)[ATOMS][COLUMNS / 2], int2 origin, bool more, int2 next,
                                           float alpha, float beta) {
        const int column = thread % 4 * 2;
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            const int atom = piece / PIECE_COLUMNS, right = piece % PIECE_COLUMNS;
            if constexpr (RESIDUAL) hopper::barrier_wait(residual_full + 8 * ring.at, ring.parity);
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
                                        const T* scale, float alpha, float beta, int n, int steps) {
    const u32 shared = hopper::shared_address(memory);
    const int consumer = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, lane = thread % 32;
    u32* vectors = reinterpret_cast<u32*>(memory + VECTORS_AT) + consumer * VECTORS * TILE_N / 2;
    const int row = thread / 32 * 16 + lane % 16;
    Output output{y, residual, shared + PIECES_AT + consumer * SLOTS * PIECE_BYTES,
                  u32(row * ROW_BYTES + ((lane / 16 ^ row % 8) << 4)), vectors,
                  barriers.first + 8 * (2 * STAGES + SLOTS * consumer), thread, 1 + consumer};
    const int stride = tiles.step() * (PINGPONG ? CONSUMERS : 1);
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
    }
    init_barriers(barriers, CONSUMERS * SLOTS);
    __syncthreads();
    if constexpr (CLUSTER > 1) hopper::cluster_barrier();
    const Tiles tiles(m, n, group);
    const int steps = (k + K_STEP - 1) / K_STEP;
    if (threadIdx.x < 128) {
        hopper::give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) produce(x, w, up, shared, barriers, tiles, int2{0, steps});
        __syncwarp();
    } else {
        hopper::take_registers<CONSUMER_REGISTERS>();
        consume(y, residual, memory, barriers, tiles, bias, up_bias, scale, alpha, beta, n, steps);
    }
    if constexpr (CLUSTER > 1) hopper::cluster_barrier();  // none leaves while another may arrive at its barriers
}
