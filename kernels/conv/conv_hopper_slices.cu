// Convolutions of channels-last tensors by wgmma and TMA on Hopper (sm_90a), if y has few tiles and k is long: each
// block along z sums over a slice of k, and writes its sums to scratch memory. epilogue.cu then adds them up.
//
// Such slices keep the whole GPU busy, unlike clusters: blocks of conv_hopper_split.cu that share a tile must run at
// the same time in one part of the GPU, and clusters of more than two blocks leave multiprocessors idle.
//
// x is (n, d, h, w, CHANNELS), w is (m, KERNEL_D, KERNEL_H, KERNEL_W, CHANNELS), `partial` is (slices, pixels, m);
// `pixels` is n * y_d * y_h * y_w, and m is even. With two spatial axes there is no d, and with one neither d nor h.
//
// Macros: those of gemm_hopper.cuh and of conv_operands.cuh. TRANSPOSED is 1, GATED and PINGPONG are 0, and PRODUCTS
// is 1. There are at most as many slices as stages of k.
#include "gemm_hopper.cuh"
#include "conv_operands.cuh"

constexpr int BARRIERS_AT = STAGES * STAGE_BYTES;

static_assert(!PINGPONG && SPLIT_K == 1 && PRODUCTS == 1);

// Stores a thread's sums of an atom (the 64 rows of one wgmma). `origin` is the atom's first row and column in y.
__device__ __forceinline__ void store_atom(const float (&d)[COLUMNS / 2], f32* sums, int2 origin, int pixels, int m) {
    const int thread = threadIdx.x % 128;
    const int row = origin.x + thread / 32 * 16 + thread % 32 / 4, column = origin.y + thread % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        f32* to = sums + size_t(row + 8 * i) * m + column;
#pragma unroll
        for (int eight = 0; eight < TILE_N / 8; ++eight) {
            const float both[2] = {d[4 * eight + 2 * i], d[4 * eight + 2 * i + 1]};
            if (row + 8 * i < pixels && column + 8 * eight < m) store<false>(to + 8 * eight, both);
        }
    }
}

extern "C" __global__ void __launch_bounds__(128 * (1 + CONSUMERS), 1)
    conv_hopper_slices(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, f32* partial,
                       PixelSizes sizes) {
    extern __shared__ __align__(1024) char memory[];
    const u32 shared = hopper::shared_address(memory);
    const Barriers barriers{shared + BARRIERS_AT};
    if (threadIdx.x == 0) {
        hopper::prefetch(x);
        hopper::prefetch(w);
    }
    init_barriers(barriers, 0);
    sync_blocks();
    const Tiles tiles(sizes.pixels, Weights{{&w}, {sizes.filters}}.columns(), sizes.group_m);
    release_successor();
    const int steps = steps_of(ALL_BLOCKS), slices = gridDim.z, slice = blockIdx.z;
    const int2 range{steps * slice / slices, steps * (slice + 1) / slices};
    if (warpgroup() == 0) {
        hopper::give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) produce(PixelOperands{x, w, sizes}, shared, barriers, tiles, range);
        __syncwarp();
    } else {
        hopper::take_registers<CONSUMER_REGISTERS>();
        wait_for_predecessor();
        const int consumer = warpgroup() - 1, above = consumer * CONSUMER_ROWS;
        const int blocks = min(ALL_BLOCKS, range.y * BLOCKS) - range.x * BLOCKS;
        const int2 origin = tiles.origin(tiles.first());
        Ring<STAGES> ring;
        float d[ATOMS][COLUMNS / 2];
        multiply(d, ring, barriers, shared, above, blocks, consumer, false);
        f32* sums = partial + size_t(slice) * sizes.pixels * sizes.filters;
#pragma unroll
        for (int atom = 0; atom < ATOMS; ++atom)
            store_atom(d[atom], sums, {origin.x + above + 64 * atom, origin.y}, sizes.pixels, sizes.filters);
    }
}
