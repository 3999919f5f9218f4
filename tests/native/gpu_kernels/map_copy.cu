// Tile (x, y) of a matrix, as its tensor map loads it, into tile (x, y) of a list of dense tiles.
//
//   ELEMENT  bytes of one    WIDE, HIGH  the box in elements    LANES  the swizzle's bytes / 16; 0 for none
#include "hopper.cuh"

extern "C" __global__ void map_copy(const __grid_constant__ TensorMap map, unsigned char* tiles) {
    constexpr int SIZE = WIDE * ELEMENT * HIGH;
    __shared__ alignas(1024) unsigned char box[SIZE];
    __shared__ alignas(8) u64 barrier;
    const u32 arrived = hopper::shared_address(&barrier);
    if (threadIdx.x == 0) {
        hopper::barrier_init(arrived, 1);
        hopper::barrier_init_fence();
        hopper::barrier_arrive_expect(arrived, SIZE);
        hopper::load(map, hopper::shared_address(box), arrived, int(blockIdx.x) * WIDE, int(blockIdx.y) * HIGH);
    }
    __syncthreads();
    hopper::barrier_wait(arrived, 0);
    unsigned char* tile = tiles + (blockIdx.y * gridDim.x + blockIdx.x) * SIZE;
    for (int i = threadIdx.x; i < SIZE; i += blockDim.x) {
        // Of its address, a piece of 16 bytes has bits 4 and up exchanged by bits 7 and up.
        const int piece = i / 16 ^ (LANES ? i / 128 % LANES : 0);
        tile[i] = box[piece * 16 + i % 16];
    }
}
