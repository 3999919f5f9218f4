// Products with few tiles of y and long k, by wgmma and TMA on Hopper (sm_90a): blocks of a cluster share a tile.
//
// Each of the SPLIT_K blocks sums over a slice of k, with the producer and the multiplication of gemm_hopper.cuh. Then
// each block computes an equal part of the columns of y, its own columns. Every consumer thread sends its accumulators
// of the other columns to the shared memory of the blocks that own them. After a barrier of the cluster, each block
// adds the received sums to its own accumulators in a fixed order. Then the block applies the epilogue, "by fragment"
// (see epilogue.cuh): threads load the column vectors and the residual before the exchange, and store y.
//
// Macros: those of gemm_hopper.cuh; PINGPONG is 0. Every block has at least one step of k.
#pragma once
#include "gemm_hopper_fragments.cuh"
#include "gemm_hopper_gate.cuh"

namespace {

constexpr int THREADS = CONSUMERS * 128;
constexpr int EIGHTS = ATOMS * TILE_N / 8;                    // groups of eight columns per thread
constexpr int OWN_EIGHTS = (EIGHTS + SPLIT_K - 1) / SPLIT_K;  // groups that a block owns; the last can have fewer
constexpr int SUMS_AT = STAGES * STAGE_BYTES;
constexpr int SUMS_BYTES = (SPLIT_K - 1) * OWN_EIGHTS * (1 + GATED) * THREADS * 16;
constexpr int BARRIERS_AT = SUMS_AT + SUMS_BYTES;

static_assert(SPLIT_K > 1 && !PINGPONG);

// The exchange of sums between blocks: the other blocks' sums of the columns of y that this block stores.
struct Exchange {
    float4* sums;  // in shared memory: (SPLIT_K - 1 other blocks, OWN_EIGHTS, products, THREADS)
    int thread;    // index of the thread among the THREADS threads of all consumers
    int rank;

    __device__ __forceinline__ float4* slot(int source, int eight, int product) const {
        return sums + ((source * OWN_EIGHTS + eight) * (1 + GATED) + product) * THREADS + thread;
    }

    __device__ __forceinline__ void send(int to, int eight, int product, const float* d) const {
        const int source = rank < to ? rank : rank - 1;  // index of this block among the blocks other than `to`
        hopper::store_at(hopper::shared_address(slot(source, eight, product)), to, {d[0], d[1], d[2], d[3]});
    }

    __device__ __forceinline__ void receive(int eight, int product, float* d) const {
#pragma unroll
        for (int source = 0; source < SPLIT_K - 1; ++source) {
            const float4 more = *slot(source, eight, product);
            d[0] += more.x;
            d[1] += more.y;
            d[2] += more.z;
            d[3] += more.w;
        }
    }
};

__device__ __forceinline__ void consume(char* memory, const Barriers& barriers, const Tiles& tiles, int blocks,
                                        const FragmentOutput& of, const Gate& gate) {
    const int consumer = warpgroup() - 1, thread = threadIdx.x % 128, rank = blockIdx.x % SPLIT_K;
    const int above = consumer * CONSUMER_ROWS;
    Ring<STAGES> ring;
    float d[ATOMS][COLUMNS / 2];
    const int2 origin = tiles.origin(tiles.first());
#if X_GATE
    multiply_gated(d, ring, barriers, hopper::shared_address(memory), above, blocks, consumer, false, gate.pixels,
                   origin.x);
#else
    multiply(d, ring, barriers, hopper::shared_address(memory), above, blocks, consumer, false);
#endif
    const Exchange exchange{reinterpret_cast<float4*>(memory + SUMS_AT), int(threadIdx.x) - 128, rank};
    Fragment own[OWN_EIGHTS];
#pragma unroll
    for (int i = 0; i < OWN_EIGHTS; ++i) {
        const int eight = rank * OWN_EIGHTS + i;
        own[i].row = origin.x + above + eight / (TILE_N / 8) * 64 + thread / 32 * 16 + thread % 32 / 4;
        own[i].column = origin.y + eight % (TILE_N / 8) * 8 + thread % 4 * 2;
        own[i].fetch(of);
    }
#pragma unroll
    for (int eight = 0; eight < EIGHTS; ++eight) {
        float* sums = &d[eight / (TILE_N / 8)][eight % (TILE_N / 8) * 4];
        if (eight / OWN_EIGHTS == rank) continue;
        exchange.send(eight / OWN_EIGHTS, eight % OWN_EIGHTS, 0, sums);
        if constexpr (GATED) exchange.send(eight / OWN_EIGHTS, eight % OWN_EIGHTS, 1, sums + TILE_N / 2);
    }
    hopper::cluster_barrier();
#pragma unroll
    for (int eight = 0; eight < EIGHTS; ++eight) {
        float* sums = &d[eight / (TILE_N / 8)][eight % (TILE_N / 8) * 4];
        if (eight / OWN_EIGHTS != rank) continue;
        exchange.receive(eight % OWN_EIGHTS, 0, sums);
        if constexpr (GATED) exchange.receive(eight % OWN_EIGHTS, 1, sums + TILE_N / 2);
        own[eight % OWN_EIGHTS].finish(sums, sums + (GATED ? TILE_N / 2 : 0), of);
    }
}

// The body of the kernel, which all threads run: y = epilogue(x w) over `blocks` blocks of k.
template <class Operands>
__device__ __forceinline__ void run_split(Operands operands, const Weights& weights, const FragmentOutput& output,
                                          int blocks, int group_m, const Gate& gate = {}) {
    extern __shared__ __align__(1024) char memory[];
    const u32 shared = hopper::shared_address(memory);
    const Barriers barriers{shared + BARRIERS_AT};
    if (threadIdx.x == 0) {
        hopper::prefetch(operands.x);
        hopper::prefetch(*weights.maps[0]);
        if constexpr (GATED) hopper::prefetch(operands.up);
        if constexpr (X_GATE > 0) hopper::prefetch(*gate.factors);
    }
    init_barriers(barriers, 0);
    sync_blocks();
    const Tiles tiles(output.m, weights.columns(), group_m);
    release_successor();
    const int steps = steps_of(blocks), rank = blockIdx.x % SPLIT_K;
    const int2 range{steps * rank / SPLIT_K, steps * (rank + 1) / SPLIT_K};
    if (warpgroup() == 0) {
        hopper::give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) produce(operands, shared, barriers, tiles, range);
        __syncwarp();
        hopper::cluster_barrier();  // the consumers arrive at the same barrier
    } else {
        hopper::take_registers<CONSUMER_REGISTERS>();
        wait_for_predecessor();
        const int first = range.x * BLOCKS;
        consume(memory, barriers, tiles, min(blocks, range.y * BLOCKS) - first, output, gate);
    }
}

}  // namespace
