// y = activation(x w + bias) [* (x up + up_bias)] * column_scale + residual, with wgmma and TMA (sm_90a).
//
// A block has a producer warpgroup, of which one thread issues all loads, and consumers; it stays and takes every
// gridDim.x-th tile. Results go to memory by TMA, through shared memory, and residuals come the same way, during the
// multiplications before. DIRECT: threads store results from shared memory.
#include "gemm_hopper.cuh"

// y as the kernel gets it, and as it is passed on.
#if DIRECT
#define RESULT T*
#define PASSED_ON
using Result = T*;
#else
#define RESULT const __grid_constant__ TensorMap
#define PASSED_ON &
using Result = const TensorMap*;
#endif

namespace {

constexpr int PIECE_COLUMNS = TILE_N / 64;
constexpr int PIECES = ATOMS * PIECE_COLUMNS;  // of 64 x 64 elements of y
constexpr int VECTORS = BIAS + UP_BIAS + COLUMN_SCALE;

constexpr int PIECE_BYTES = 64 * ROW_BYTES;
constexpr int PIECES_AT = STAGES * STAGE_BYTES;
constexpr int VECTORS_AT = PIECES_AT + CONSUMERS * PIECES * PIECE_BYTES;
constexpr int BARRIERS_AT = VECTORS_AT + CONSUMERS * VECTORS * TILE_N * 4;

// What is added to or multiplied with columns, on its way to shared memory: two elements of each vector a thread.
struct Vectors {
    u32 words[VECTORS > 0 ? VECTORS : 1];

    __device__ __forceinline__ void fetch(const T* bias, const T* up_bias, const T* scale, int column, int n) {
        int i = 0;
        if constexpr (BIAS) words[i++] = PRODUCTS == 1 || bias ? load_two(bias + column, n - column) : 0;
        if constexpr (UP_BIAS) words[i++] = load_two(up_bias + column, n - column);
        if constexpr (COLUMN_SCALE) words[i++] = load_two(scale + column, n - column);
    }

    __device__ __forceinline__ void put(float2* vectors) const {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) vectors[i * TILE_N / 2] = widen_two(words[i]);
    }
};

// A thread's part of the vectors for a piece: two columns of every eight. Read before the first store_matrices, which
// later reads would have to wait for.
__device__ __forceinline__ void read_added(const float2* vectors, int column, Added (&added)[8]) {
    const float2* at = vectors + column / 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if constexpr (BIAS) added[i].bias = at[4 * i];
        if constexpr (UP_BIAS) added[i].up_bias = at[BIAS * TILE_N / 2 + 4 * i];
        if constexpr (COLUMN_SCALE) added[i].scale = at[(BIAS + UP_BIAS) * TILE_N / 2 + 4 * i];
    }
}

// What the results of each product need.
struct Results {
    Result y[PRODUCTS];
    const T* bias[PRODUCTS];  // PRODUCTS > 1: may be null
};

// By a warp: a row of a piece, of which y has `left` elements, `word` is a lane's two and `before` those of the lane before,
// in a ring. They are stored in pairs that begin at multiples of 4 bytes: where those are not the lanes' own, the first
// lane has the elements of both ends.
[[maybe_unused]] __device__ __forceinline__ void store_row(u32 word, u32 before, T* to, int left) {
    const int lane = threadIdx.x % 32, odd = size_t(to) / sizeof(T) % 2;
    const u32 both = odd ? word << 16 | before >> 16 : word, high = both >> 16;
    const int first = (2 * lane - odd) & 63, second = 2 * lane + 1 - odd;
    const bool pair = first < second && second < left;
    if (pair) store_bytes<false, 4>(reinterpret_cast<char*>(to + first), &both);
    if (!pair && first < left) store_bytes<false, 2>(reinterpret_cast<char*>(to + first), &both);
    if (!pair && second < left) store_bytes<false, 2>(reinterpret_cast<char*>(to + second), &high);
}

// One consumer's way from accumulators to memory.
struct Output {
    const TensorMap& residual;
    const char* results;  // shared memory, in pieces as TMA swizzles them
    u32 pieces;          // where that is
    u32 lane_at;         // where in a piece this lane's row of matrices begins
    const float2* vectors;  // shared memory
    u32 residual_full;   // barrier: the tile's residual has arrived
    int thread, named;   // of the warpgroup; its barrier
    u32 parity;

    // By one thread: once the last tile's results have been read, their place takes the residual of this one.
    __device__ __forceinline__ void fetch_residual(int2 origin) const {
        hopper::store_wait_read<0>();
        hopper::barrier_arrive_expect(residual_full, PIECES * PIECE_BYTES);
#pragma unroll
        for (int i = 0; i < PIECES; ++i)
            hopper::load(residual, pieces + i * PIECE_BYTES, residual_full, origin.y + i % PIECE_COLUMNS * 64,
                         origin.x + i / PIECE_COLUMNS * 64);
    }

    // 16 rows and 64 columns a warp: `d` and `up` are the thread's accumulators of the piece.
    __device__ __forceinline__ void fill(u32 piece, const float* d, const float* up, int column, float alpha,
                                         float beta) const {
        Added added[8];
        read_added(vectors, column, added);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 place = (piece + lane_at) ^ i << 5;  // 16 columns on, in swizzled rows
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

    // What lies beyond y is not written.
    __device__ __forceinline__ void finish(const float (&d)[ATOMS][COLUMNS / 2], Result y, int2 origin, int m, int n,
                                           float alpha, float beta) {
        if constexpr (RESIDUAL) {
            hopper::barrier_wait(residual_full, parity);
            parity ^= 1;
        }
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const float* sums = &d[i / PIECE_COLUMNS][i % PIECE_COLUMNS * 32];
            fill(pieces + i * PIECE_BYTES, sums, sums + (GATED ? TILE_N / 2 : 0),
                 i % PIECE_COLUMNS * 64 + thread % 4 * 2, alpha, beta);
        }
        hopper::store_fence();
        hopper::named_barrier(named, 128);
        put(y, origin, m, n);
    }

    template <class Y>  // Result: so that only its own way compiles
    __device__ __forceinline__ void put(Y y, int2 origin, int m, int n) const {
        if constexpr (DIRECT) {
            const int lane = thread % 32, warp = thread / 32;
            const char* own = results + warp * ROW_BYTES + lane % 4 * 4;
#pragma unroll
            for (int i = 0; i < 2 * PIECES; ++i) {  // halves
                const int above = i / 2 / PIECE_COLUMNS * 64 + i % 2 * 32, row = origin.x + above + warp;
                const int column = origin.y + i / 2 % PIECE_COLUMNS * 64;
                u32 words[8], before[8];  // all are read before the first is stored, which no read may pass
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const int place = (i * 32 + 4 * j) * ROW_BYTES + ((lane / 4 ^ warp ^ j % 2 * 4) << 4);
                    words[j] = *reinterpret_cast<const u32*>(own + place);
                    before[j] = __shfl_sync(0xffffffff, words[j], (lane + 31) % 32);
                }
                T* to = y + size_t(row) * n + column;
#pragma unroll
                for (int j = 0; j < 8; ++j, to += 4 * size_t(n))
                    if (row + 4 * j < m) store_row(words[j], before[j], to, n - column);
            }
            if (!RESIDUAL) return;
            hopper::store_fence();
            hopper::named_barrier(named, 128);  // the next residual takes their place
        } else {
            if (thread > 0) return;
#pragma unroll
            for (int i = 0; i < PIECES; ++i)
                hopper::store(*y, pieces + i * PIECE_BYTES, origin.y + i % PIECE_COLUMNS * 64,
                              origin.x + i / PIECE_COLUMNS * 64);
            hopper::store_commit();
        }
    }
};

__device__ __forceinline__ void consume(const Results& results, const TensorMap& residual, char* memory,
                                        Barriers barriers, const Tiles& tiles, const Weights& weights,
                                        const T* up_bias, const T* scale, float alpha, float beta, int m, int steps) {
    const u32 shared = hopper::shared_address(memory);
    const int consumer = warpgroup() - 1, thread = threadIdx.x % 128, lane = thread % 32;
    float2* vectors = reinterpret_cast<float2*>(memory + VECTORS_AT) + consumer * VECTORS * TILE_N / 2;
    const int row = thread / 32 * 16 + lane % 16;
    const int pieces = PIECES_AT + consumer * PIECES * PIECE_BYTES;
    Output output{residual, memory + pieces, shared + pieces,
                  u32(row * ROW_BYTES + ((lane / 16 ^ row % 8) << 4)), vectors,
                  barriers.first + 8 * (2 * STAGES + consumer), thread, 1 + consumer, 0};
    const int stride = tiles.step() * (PINGPONG ? CONSUMERS : 1);
    const int above = PINGPONG ? 0 : consumer * GROUP_ROWS;
    Ring<STAGES> ring;
    int tile = tiles.first();
    if (PINGPONG && consumer > 0) {
        tile += tiles.step();
        ring.skip(steps);
        hopper::named_barrier_arrive(turn(0), 256);
    }
    for (; tile < tiles.count(); tile += stride) {
        int2 origin = tiles.origin(tile);
        origin.x += above;
        const int product = weights.find(origin.y);
        if (RESIDUAL && thread == 0) {
            if (!PINGPONG) hopper::barrier_wait(barriers.full(ring.at), ring.parity);  // operands are needed first
            output.fetch_residual(origin);
        }
        Vectors fetched;
        if (VECTORS > 0 && thread < TILE_N / 2)
            fetched.fetch(pick(results.bias, product), up_bias, scale, origin.y + 2 * thread, pick(weights.n, product));
        float d[ATOMS][COLUMNS / 2];
        multiply(d, ring, barriers, shared, above, steps, consumer, tile + tiles.step() < tiles.count());
        if (PINGPONG) ring.skip(steps);
        if (!RESIDUAL && thread == 0) hopper::store_wait_read<0>();  // the last tile's results have left
        if (VECTORS > 0 && thread < TILE_N / 2) fetched.put(vectors + thread);
        if (VECTORS > 0 || !RESIDUAL) hopper::named_barrier(output.named, 128);
        output.finish(d, pick(results.y, product), origin, m, pick(weights.n, product), alpha, beta);
    }
    if (thread == 0) hopper::store_wait_read<0>();
}

}  // namespace

#if PRODUCTS == 1
#define EACH(before, name) before name
#elif PRODUCTS == 2
#define EACH(before, name) before name, before name##_2
#else
#define EACH(before, name) before name, before name##_2, before name##_3
#endif

extern "C" __global__ void __launch_bounds__(128 * (1 + CONSUMERS), 1)
    gemm_hopper(const __grid_constant__ TensorMap x, EACH(const __grid_constant__ TensorMap, w),
#if GATED
                const __grid_constant__ TensorMap up,
#endif
                EACH(RESULT, y),
#if RESIDUAL
                const __grid_constant__ TensorMap residual,
#endif
                EACH(const T*, bias), const T* up_bias, const T* scale, float alpha, float beta, int m, EACH(int, n),
                int k, int group) {
#if !GATED
    const TensorMap& up = w;
#endif
#if !RESIDUAL
    const TensorMap& residual = x;
#endif
    extern __shared__ __align__(1024) char memory[];
    const u32 shared = hopper::shared_address(memory);
    const Barriers barriers{shared + BARRIERS_AT};
    const Weights weights{{EACH(&, w)}, {EACH(, n)}};
    const Results results{{EACH(PASSED_ON, y)}, {EACH(, bias)}};
    if (threadIdx.x == 0) {
        hopper::prefetch(x);
        for (const TensorMap* map : weights.maps) hopper::prefetch(*map);
        if constexpr (GATED) hopper::prefetch(up);
        if constexpr (RESIDUAL) hopper::prefetch(residual);
#if !DIRECT
        for (Result each : results.y) hopper::prefetch(*each);
#endif
    }
    init_barriers(barriers, CONSUMERS);
    sync_blocks();
    const Tiles tiles(m, weights.columns(), group);
    release_successor();
    const int steps = (k + K_STEP - 1) / K_STEP;
    if (warpgroup() == 0) {
        hopper::give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) produce(x, weights, up, shared, barriers, tiles, int2{0, steps});
        __syncwarp();
    } else {
        hopper::take_registers<CONSUMER_REGISTERS>();
        wait_for_predecessor();
        consume(results, residual, memory, barriers, tiles, weights, up_bias, scale, alpha, beta, m, steps);
    }
}
