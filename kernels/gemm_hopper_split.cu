// gemm_hopper.cu for products of few tiles and long k: the SPLIT blocks of a cluster share a tile, and each sums over a
// part of k. Then each finishes a part of the columns, with the others' sums of them in its shared memory.
//
// Constants: those of gemm_hopper.cuh, without PINGPONG. Every block has a step of k or more.
#include "gemm_hopper.cuh"

namespace {

constexpr int THREADS = CONSUMERS * 128;
constexpr int EIGHTS = ATOMS * TILE_N / 8;  // a thread's columns of y, in eights, of all atoms
constexpr int OWN = (EIGHTS + SPLIT - 1) / SPLIT;  // those that a block finishes, the last one maybe fewer
constexpr int SUMS_AT = STAGES * STAGE_BYTES;
constexpr int SUMS_BYTES = (SPLIT - 1) * OWN * (1 + GATED) * THREADS * 16;
constexpr int BARRIERS_AT = SUMS_AT + SUMS_BYTES;

static_assert(SPLIT > 1 && !PINGPONG);

// The sums that other blocks have of the columns that this one finishes.
struct Exchange {
    float4* sums;  // shared memory: SPLIT - 1 blocks x OWN x products x THREADS
    int thread;    // of THREADS
    int rank;

    __device__ __forceinline__ float4* place(int source, int eight, int product) const {
        return sums + ((source * OWN + eight) * (1 + GATED) + product) * THREADS + thread;
    }

    __device__ __forceinline__ void send(int to, int eight, int product, const float* d) const {
        const int source = rank < to ? rank : rank - 1;  // of the blocks that are not `to`
        hopper::store_at(hopper::shared_address(place(source, eight, product)), to, {d[0], d[1], d[2], d[3]});
    }

    __device__ __forceinline__ void receive(int eight, int product, float* d) const {
#pragma unroll
        for (int source = 0; source < SPLIT - 1; ++source) {
            const float4 more = *place(source, eight, product);
            d[0] += more.x;
            d[1] += more.y;
            d[2] += more.z;
            d[3] += more.w;
        }
    }
};

struct Operands {
    const T *bias, *up_bias, *scale, *residual;
    T* y;
    float alpha, beta;
    int m, n;
};

// A thread's part of eight columns: two neighbours in each of two rows, and what is added to them.
struct Eight {
    int row, column;
    u32 bias, up_bias, scale, residual[2];

    // Columns that are left of a row.
    __device__ __forceinline__ int left(const Operands& of, int i) const {
        return row + 8 * i < of.m ? of.n - column : 0;
    }
    __device__ __forceinline__ size_t at(const Operands& of, int i) const {
        return size_t(row + 8 * i) * of.n + column;
    }

    __device__ __forceinline__ void fetch(const Operands& of) {
        if constexpr (BIAS) bias = load_two(of.bias + column, of.n - column);
        if constexpr (UP_BIAS) up_bias = load_two(of.up_bias + column, of.n - column);
        if constexpr (COLUMN_SCALE) scale = load_two(of.scale + column, of.n - column);
        if constexpr (RESIDUAL)
#pragma unroll
            for (int i = 0; i < 2; ++i) residual[i] = load_two(of.residual + at(of, i), left(of, i));
    }

    __device__ __forceinline__ void finish(const float* d, const float* up, const Operands& of) const {
        Added added;
        if constexpr (BIAS) added.bias = widen_two(bias);
        if constexpr (UP_BIAS) added.up_bias = widen_two(up_bias);
        if constexpr (COLUMN_SCALE) added.scale = widen_two(scale);
        float results[4];
        activate_four(d, up, added, of.alpha, of.beta, results);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (left(of, i) <= 0) continue;
            float both[2] = {results[2 * i], results[2 * i + 1]};
            if constexpr (RESIDUAL) {
                float more[2];
                widen(T(), residual[i], more);
                both[0] += more[0];
                both[1] += more[1];
            }
            T* to = of.y + at(of, i);
            if constexpr (DIRECT) {
                const float first[1] = {both[0]}, second[1] = {both[1]};
                store<false>(to, first);
                if (left(of, i) > 1) store<false>(to + 1, second);
            } else {
                store<false>(to, both);
            }
        }
    }
};

__device__ __forceinline__ void consume(char* memory, const Barriers& barriers, const Tiles& tiles, int steps,
                                        const Operands& of) {
    const int consumer = warpgroup() - 1, thread = threadIdx.x % 128, rank = blockIdx.x % SPLIT;
    const int above = consumer * GROUP_ROWS;
    Ring<STAGES> ring;
    float d[ATOMS][COLUMNS / 2];
    multiply(d, ring, barriers, hopper::shared_address(memory), above, steps, consumer, false);
    const Exchange exchange{reinterpret_cast<float4*>(memory + SUMS_AT), int(threadIdx.x) - 128, rank};
    const int2 origin = tiles.origin(tiles.first());
    Eight own[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int eight = rank * OWN + i;
        own[i].row = origin.x + above + eight / (TILE_N / 8) * 64 + thread / 32 * 16 + thread % 32 / 4;
        own[i].column = origin.y + eight % (TILE_N / 8) * 8 + thread % 4 * 2;
        own[i].fetch(of);
    }
#pragma unroll
    for (int eight = 0; eight < EIGHTS; ++eight) {
        float* sums = &d[eight / (TILE_N / 8)][eight % (TILE_N / 8) * 4];
        if (eight / OWN == rank) continue;
        exchange.send(eight / OWN, eight % OWN, 0, sums);
        if constexpr (GATED) exchange.send(eight / OWN, eight % OWN, 1, sums + TILE_N / 2);
    }
    hopper::cluster_barrier();
#pragma unroll
    for (int eight = 0; eight < EIGHTS; ++eight) {
        float* sums = &d[eight / (TILE_N / 8)][eight % (TILE_N / 8) * 4];
        if (eight / OWN != rank) continue;
        exchange.receive(eight % OWN, 0, sums);
        if constexpr (GATED) exchange.receive(eight % OWN, 1, sums + TILE_N / 2);
        own[eight % OWN].finish(sums, sums + (GATED ? TILE_N / 2 : 0), of);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128 * (1 + CONSUMERS), 1)
    gemm_hopper_split(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
#if GATED
                      const __grid_constant__ TensorMap up,
#endif
                      T* y, const T* residual, const T* bias, const T* up_bias, const T* scale, float alpha,
                      float beta, int m, int n, int k, int group) {
#if !GATED
    const TensorMap& up = w;
#endif
    extern __shared__ __align__(1024) char memory[];
    const u32 shared = hopper::shared_address(memory);
    const Barriers barriers{shared + BARRIERS_AT};
    if (threadIdx.x == 0) {
        hopper::prefetch(x);
        hopper::prefetch(w);
        if constexpr (GATED) hopper::prefetch(up);
    }
    init_barriers(barriers, 0);
    sync_blocks();
    const Weights weights{{&w}, {n}};
    const Tiles tiles(m, weights.columns(), group);
    release_successor();
    const int steps = (k + K_STEP - 1) / K_STEP, rank = blockIdx.x % SPLIT;
    const int2 range{steps * rank / SPLIT, steps * (rank + 1) / SPLIT};
    if (warpgroup() == 0) {
        hopper::give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) produce(x, weights, up, shared, barriers, tiles, range);
        __syncwarp();
        hopper::cluster_barrier();  // with the consumers
    } else {
        hopper::take_registers<CONSUMER_REGISTERS>();
        wait_for_predecessor();
        consume(memory, barriers, tiles, range.y - range.x, {bias, up_bias, scale, residual, y, alpha, beta, m, n});
    }
}
