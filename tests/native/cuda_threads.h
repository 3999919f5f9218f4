// The threads of a block on an emulated GPU, as cuda_emulated.h sees them; cuda_threads.cc runs them.
#pragma once
#include <cstddef>

using u32 = unsigned;
struct Index { int x, y, z; };
extern Index threadIdx, blockIdx, gridDim;

namespace emulated {

void fail(const char* what);

void allow(const char* start, size_t bytes);  // names an array in global memory
void check(const void* at, size_t bytes);     // an access to global memory
void check_shared(const void* at, size_t bytes);

extern char* memory;  // the shared memory of the block

void sync_block();
void sync_warp();

// Shares up to eight words of each lane of the warp; all lanes take part. Ends with finish_exchange.
u32 (&exchange(const u32* words, int count))[32][8];
inline void finish_exchange() { sync_warp(); }

// A copy happens when something waits until at most `pending` committed groups are left.
void begin_copy(char* to, const char* from, int bytes);
void commit_copies();
void wait_for_copy_groups(size_t pending);

// Calls `run` with `kernel` in each thread.
void launch(int grid_x, int grid_y, int count, int shared_bytes, void (*run)(const void*), const void* kernel);
template <class Kernel>
void launch(int grid_x, int grid_y, int count, int shared_bytes, Kernel kernel) {
    launch(grid_x, grid_y, count, shared_bytes, [](const void* found) { (*static_cast<const Kernel*>(found))(); }, &kernel);
}

}  // namespace emulated
