// Runs the threads of emulated blocks on one thread of the CPU.
//
// Each thread of a block is a coroutine that runs until it waits. A block runs alone until all its threads wait for
// the other blocks of its cluster, an extreme that the hardware allows; a wait that never ends aborts the process.
#include "block_threads.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "coroutine.h"

Index threadIdx, blockIdx, gridDim;

namespace emulated {

struct Thread {
    Coroutine coroutine;
    Wait wait;
    const u32* word;  // for Wait::Change, and its value before
    u32 value;
    Index index;
    u32 number;  // in the block
};

struct Block {
    u32 rank;
    std::vector<Thread> threads;
    std::vector<u32> exchanged;  // the word that each thread passed last
    std::vector<char> memory;
    Index index;
};

static constexpr size_t STACK_BYTES = 128 << 10;
static std::vector<Block> blocks;  // of the cluster that runs
static Block* here;
static Thread* running;
static void (*entry)(const void* const*);
static const void* const* passed;

void wait(Wait kind) {
    running->wait = kind;
    running->coroutine.pause();
}

void wait_for_change(const u32& word) {
    running->word = &word, running->value = word;
    wait(Wait::Change);
}

const u32* exchange(u32 word) {
    const u32 own = running->number;
    here->exchanged[own] = word;
    wait(Wait::Warp);
    return &here->exchanged[own / 32 * 32];
}

u32 lane() { return running->number % 32; }
u32 rank() { return here->rank; }
char* memory(u32 rank) {
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(blocks[rank].memory.data()) + 15) / 16 * 16);
}
char* memory() { return memory(here->rank); }
size_t memory_bytes() { return here->memory.size(); }

static void run_thread() {
    entry(passed);
    wait(Wait::Done);
}

static void resume(Block& block, Thread& thread) {
    here = &block;
    running = &thread;
    thread.wait = Wait::None;
    threadIdx = thread.index;
    blockIdx = block.index;
    thread.coroutine.resume();
}

// Whether all threads of [first, end) that have not ended wait for the same.
static bool all_wait(const Block& block, size_t first, size_t end, Wait kind) {
    bool some = false;
    for (size_t i = first; i < end && i < block.threads.size(); ++i) {
        if (block.threads[i].wait == Wait::Done) continue;
        if (block.threads[i].wait != kind) return false;
        some = true;
    }
    return some;
}

// Runs the threads of a block until all have ended or wait for other blocks; returns whether any of them ran.
static bool run_block(Block& block) {
    bool ran = false;
    const size_t count = block.threads.size();
    for (bool more = true; more;) {
        more = false;
        for (Thread& thread : block.threads)
            if (thread.wait == Wait::None || (thread.wait == Wait::Change && *thread.word != thread.value))
                resume(block, thread), more = ran = true;
        for (size_t first = 0; first < count; first += 32)
            if (all_wait(block, first, first + 32, Wait::Warp)) {
                for (size_t i = first; i < first + 32 && i < count; ++i)
                    if (block.threads[i].wait == Wait::Warp) block.threads[i].wait = Wait::None;
                more = true;
            }
        if (all_wait(block, 0, count, Wait::Block)) {
            for (Thread& thread : block.threads)
                if (thread.wait == Wait::Block) thread.wait = Wait::None;
            more = true;
        }
    }
    return ran;
}

static void begin(Block& block, u32 rank, u32 number, Index threads, int shared) {
    const u32 count = threads.x * threads.y * threads.z;
    block.rank = rank;
    block.index = {number % gridDim.x, number / gridDim.x, 0};
    block.memory.assign(shared + 16, char(0xff));
    block.threads.resize(count);
    block.exchanged.resize((count + 31) / 32 * 32);
    for (u32 i = 0; i < count; ++i) {
        Thread& thread = block.threads[i];
        thread.number = i;
        thread.index = {i % threads.x, i / threads.x % threads.y, i / (threads.x * threads.y)};
        thread.wait = Wait::None;
        thread.coroutine.start(STACK_BYTES, run_thread);
    }
}

static void run_cluster() {
    while (true) {
        bool ran = false, waits = false, ended = true;
        for (Block& block : blocks) ran |= run_block(block);
        if (ran) continue;
        for (Block& block : blocks) {
            for (Thread& thread : block.threads) {
                if (thread.wait != Wait::Done) ended = false;
                if (thread.wait == Wait::Cluster) waits = true;
            }
        }
        if (ended) return;
        if (!waits) fprintf(stderr, "a wait that never ends\n"), abort();
        for (Block& block : blocks) {
            for (Thread& thread : block.threads) {
                if (thread.wait != Wait::Cluster) {
                    fprintf(stderr, "a thread of block %u does not reach the cluster's barrier\n", block.rank);
                    abort();
                }
                thread.wait = Wait::None;
            }
        }
    }
}

void launch(Index grid, Index threads, u32 cluster, int shared, void (*kernel)(const void* const*),
            const void* const* arguments) {
    gridDim = grid;
    entry = kernel;
    passed = arguments;
    blocks.resize(cluster);
    for (u32 first = 0; first < grid.x * grid.y; first += cluster) {
        for (u32 rank = 0; rank < cluster; ++rank) begin(blocks[rank], rank, first + rank, threads, shared);
        run_cluster();
    }
}

}  // namespace emulated
