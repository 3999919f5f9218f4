// Copy tile (x, y) of a matrix, as its tensor map loads it, to tile (x, y) of a list of dense tiles.
//
//   ELEMENT     bytes of an element
//   WIDE, HIGH  elements of the box
//   LANES       bytes of the swizzle / 16; 0 without one
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
        // The swizzle XORs the bits of the address from bit 4 with those from bit 7, in pieces of 16 bytes.
        const int piece = i / 16 ^ (LANES ? i / 128 % LANES : 0);
        tile[i] = box[piece * 16 + i % 16];
    }
}
