// Runs the threads of emulated blocks in turns on one thread of the CPU; cuda_emulated.h says what they see.
#include "cuda_threads.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

#include "coroutine.h"

Index threadIdx, blockIdx, gridDim;

namespace emulated {

struct Range { const char* start; const char* end; };
struct Copy { char* to; const char* from; int bytes; };
struct Thread {
    Coroutine coroutine;
    bool ended = false;
    std::deque<std::vector<Copy>> copies;  // groups, the last of which is not committed yet
};
struct Barrier { int arrived = 0; u32 generation = 0; };
struct Warp {
    Barrier barrier;
    u32 words[32][8];
};

static std::vector<Range> ranges;
static std::vector<char> storage;
char* memory;
static size_t shared_size;
static std::vector<Thread> threads;
static std::vector<Warp> warps;
static Barrier block;
static int alive;
static void (*body)(const void*);
static const void* passed;

void fail(const char* what) {
    fprintf(stderr, "%s: block %d, %d, thread %d\n", what, blockIdx.x, blockIdx.y, threadIdx.x);
    abort();
}

void allow(const char* start, size_t bytes) { ranges.push_back({start, start + bytes}); }

void check(const void* at, size_t bytes) {
    const char* start = static_cast<const char*>(at);
    if (start >= memory && start + bytes <= memory + shared_size) fail("shared memory as global memory");
    if (reinterpret_cast<uintptr_t>(at) % bytes) fail("a misaligned access");
    for (const Range& range : ranges)
        if (start >= range.start && start + bytes <= range.end) return;
    fail("an access outside the operands");
}

void check_shared(const void* at, size_t bytes) {
    const char* start = static_cast<const char*>(at);
    if (start < memory || start + bytes > memory + shared_size) fail("an access outside shared memory");
    if (reinterpret_cast<uintptr_t>(at) % bytes) fail("a misaligned access to shared memory");
}

static void pause() { threads[threadIdx.x].coroutine.pause(); }

static void arrive(Barrier& barrier, int count) {
    const u32 generation = barrier.generation;
    if (++barrier.arrived == count) {
        barrier.arrived = 0;
        ++barrier.generation;
    } else {
        while (barrier.generation == generation) pause();
    }
}

static Warp& warp() { return warps[threadIdx.x / 32]; }

void sync_block() { arrive(block, int(threads.size())); }
void sync_warp() { arrive(warp().barrier, 32); }

u32 (&exchange(const u32* words, int count))[32][8] {
    memcpy(warp().words[threadIdx.x % 32], words, 4 * count);
    sync_warp();
    return warp().words;
}

static std::deque<std::vector<Copy>>& copies() { return threads[threadIdx.x].copies; }
void begin_copy(char* to, const char* from, int bytes) { copies().back().push_back({to, from, bytes}); }
void commit_copies() { copies().emplace_back(); }
void wait_for_copy_groups(size_t pending) {
    for (auto& groups = copies(); groups.size() > pending + 1; groups.pop_front())
        for (const Copy& copy : groups.front()) memcpy(copy.to, copy.from, copy.bytes);
}

static void run_thread() {
    body(passed);
    threads[threadIdx.x].ended = true;
    for (;;) pause();
}

void launch(int grid_x, int grid_y, int count, int shared_bytes, void (*run)(const void*), const void* kernel) {
    body = run;
    passed = kernel;
    gridDim = {grid_x, grid_y, 1};
    shared_size = shared_bytes;
    storage.assign(shared_bytes + 1024, char(0xff));
    memory = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(storage.data()) + 1023) / 1024 * 1024);
    threads = std::vector<Thread>(count);
    for (int y = 0; y < grid_y; ++y)
        for (int x = 0; x < grid_x; ++x) {
            blockIdx = {x, y, 0};
            storage.assign(storage.size(), char(0xff));
            warps.assign((count + 31) / 32, Warp());
            block = Barrier();
            for (Thread& thread : threads) {
                thread.ended = false;
                thread.copies.assign(1, {});
                thread.coroutine.start(1 << 17, run_thread);
            }
            alive = count;
            while (alive) {
                alive = 0;
                for (int i = 0; i < count; ++i) {
                    if (threads[i].ended) continue;
                    threadIdx = {i, 0, 0};
                    threads[i].coroutine.resume();
                    alive += !threads[i].ended;
                }
            }
        }
}

}  // namespace emulated
