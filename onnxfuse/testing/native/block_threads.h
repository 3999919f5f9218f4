// The threads of emulated blocks, as the source of a kernel sees them; block_threads.cc runs them.
#pragma once
#include <cstddef>

using u32 = unsigned;
struct Index { u32 x, y, z; };
extern Index threadIdx, blockIdx, gridDim;

namespace emulated {

enum class Wait { None, Warp, Block, Cluster, Change, Done };

// Lets other threads run until all threads of the warp, block or cluster wait for the same.
void wait(Wait kind);

// Lets other threads run until one of them has changed the word.
void wait_for_change(const u32& word);

// Waits until each lane of the warp has passed a word, and returns the words of the 32 lanes. They can be read until
// the next wait for the warp.
const u32* exchange(u32 word);
u32 lane();

u32 rank();                // of the block in its cluster
char* memory();            // the shared memory of the block
char* memory(u32 rank);    // the shared memory of that block of the cluster
size_t memory_bytes();

// Runs all blocks of a grid in clusters of `cluster` blocks; each thread calls `kernel` with the arguments.
void launch(Index grid, Index threads, u32 cluster, int shared, void (*kernel)(const void* const*),
            const void* const* arguments);

}  // namespace emulated
