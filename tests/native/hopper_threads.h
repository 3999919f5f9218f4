// The threads of a cluster on an emulated Hopper, as hopper_emulated.h sees them; hopper_threads.cc runs them.
#pragma once
#include <cstddef>

using u32 = unsigned;
struct Index { int x, y, z; };
extern Index threadIdx, blockIdx;  // of the thread that runs
extern Index gridDim;

// A tensor of the kernel's elements in memory, and the box that a copy moves; the innermost dimension is the first.
// Missing dimensions have size 1. With `walks`, a box is channels and pixels, and lower and upper are those of
// cuTensorMapEncodeIm2col along W and H, at unit steps. With `rounds`, loads round fp32 to TF32.
struct Map {
    char* start;
    long sizes[5], strides[5];
    int box[5];
    int walks, lower[2], upper[2], rounds;
};

namespace emulated {

struct Corner { int c[5]; };  // coordinates of a box

void fail(const char* what);
inline void require(bool condition, const char* what) {
    if (!condition) fail(what);
}

extern char* memory;  // the shared memory of the block that runs
char* memory_of(u32 block);
u32 rank();  // of the block in its cluster
inline u32 swizzled(u32 address) { return address ^ ((address >> 7 & 7) << 4); }

// Waits for all threads of the warp, of the four warps that execute a wgmma together, or of the cluster.
void sync_warp();
void sync_warpgroup();
void sync_cluster();
// Arrives at a barrier of the block as one of so many threads, and waits for the others if it stays.
void arrive(int named, int threads, bool stay);

// Returns the words that the 32 lanes of this thread's warp pass.
const u32* exchange(u32 word);
inline void end_exchange() { sync_warp(); }

// mbarriers, by their address in shared memory; `count` counts at that of a block of the cluster
void init_barrier(u32 barrier, u32 arrivals);
void count(u32 block, u32 barrier, int arrivals, long bytes);
void wait_for_phase(u32 barrier, u32 parity);

void load_into(const Map& map, u32 to, u32 barrier, const Corner& corner);
// The pixels of a walk from the one at w, h, n on, moved by the offsets.
void walk_into(const Map& map, u32 to, u32 barrier, int c, int w, int h, int n, int offset_w, int offset_h);

// Stores and products are done when something waits until at most `pending` committed groups are left.
void begin_store(const Map& map, u32 from, const Corner& corner);
void commit_stores();
void wait_for_stores(size_t pending);
struct Product {
    virtual void run() = 0;
    virtual ~Product() = default;
};
void begin_product(Product* product);  // which is deleted when it is done
template <class Function>
void begin_product(Function function) {
    struct Done : Product {
        Function function;
        Done(Function function) : function(function) {}
        void run() override { function(); }
    };
    begin_product(static_cast<Product*>(new Done(function)));
}
void commit_products();
void wait_for_products(size_t pending);

// Runs clusters of `size` blocks, one after another, and calls `run` with `kernel` in each thread; an element of a map
// has `item` bytes.
void launch(int grid, int size, int threads, int item, int shared_bytes, void (*run)(const void*), const void* kernel);
template <class Kernel>
void launch(int grid, int size, int threads, int item, int shared_bytes, Kernel kernel) {
    launch(grid, size, threads, item, shared_bytes, [](const void* found) { (*static_cast<const Kernel*>(found))(); }, &kernel);
}

}  // namespace emulated
