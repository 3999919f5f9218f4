// Runs the threads of an emulated cluster in turns on one thread of the CPU; hopper_emulated.h says what they see.
#include "hopper_threads.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "coroutine.h"

Index threadIdx, blockIdx, gridDim;

namespace emulated {

struct Barrier {  // an mbarrier
    u32 arrivals = 0, pending = 0, phase = 0;
    long bytes = 0;
};

struct ThreadBarrier {  // as __syncthreads and bar.sync
    int arrived = 0;
    u32 generation = 0;
};

struct Warp {
    ThreadBarrier barrier;
    u32 words[32];
};

struct Block {
    char* memory;
    std::map<u32, Barrier> barriers;
    ThreadBarrier named[16], warpgroups[4];
    Warp warps[16];
};

struct Stored {
    const Map* map;
    u32 from;
    Corner at;
    std::vector<char> values;  // that shared memory had when the store began
};

static constexpr size_t STACK_BYTES = 256 << 10;

struct Thread {
    Coroutine coroutine;
    int rank, index;
    bool ended;
    std::function<bool()> ready;
    std::deque<std::vector<Stored>> stores;  // groups, the last of which is not committed yet
    std::deque<std::vector<std::unique_ptr<Product>>> products;
};

static std::vector<Block*> cluster;
static ThreadBarrier cluster_threads;
static void (*body)(const void*);
static const void* passed;
static long rounds;  // in each of which every warp ran as far as it could
static Thread* running;
static Block* here;  // of the thread that runs
static int block_threads, item, shared_size;  // of the kernel
char* memory;

void fail(const char* what) {
    fprintf(stderr, "%s: block %d, thread %d\n", what, blockIdx.x, threadIdx.x);
    abort();
}

char* memory_of(u32 block) { return cluster[block]->memory; }
u32 rank() { return running->rank; }

template <class Condition>
void wait(Condition condition) {
    if (condition()) return;
    running->ready = condition;
    running->coroutine.pause();
}

// Lets every other warp run as far as it can, in whatever order the rounds have.
static void let_others_run() {
    const long until = rounds + 2;
    wait([=] { return rounds >= until; });
}

static void arrive(ThreadBarrier& barrier, int threads, bool stay) {
    const u32 generation = barrier.generation;
    if (++barrier.arrived == threads) {
        barrier.arrived = 0;
        ++barrier.generation;
    }
    if (stay) wait([&] { return barrier.generation != generation; });
    else let_others_run();
}

void init_barrier(u32 barrier, u32 arrivals) {
    const bool inside = barrier + 8 <= u32(shared_size);
    require(inside && barrier % 8 == 0 && here->barriers.count(barrier) == 0, "a barrier that cannot be there");
    here->barriers[barrier].arrivals = here->barriers[barrier].pending = arrivals;
}

void wait_for_phase(u32 barrier, u32 parity) {
    const Barrier& waited = here->barriers[barrier];
    require(waited.arrivals > 0, "waits where no barrier is");
    wait([&waited, parity] { return waited.phase != parity; });
}

void count(u32 block, u32 address, int arrivals, long bytes) {
    Barrier& barrier = cluster[block]->barriers[address];
    require(barrier.arrivals > 0, "no barrier there");
    require(barrier.pending >= u32(arrivals), "more arrivals than a phase has");
    barrier.pending -= arrivals;
    barrier.bytes += bytes;
    if (barrier.pending == 0 && barrier.bytes == 0) {
        barrier.phase ^= 1;
        barrier.pending = barrier.arrivals;
    }
    if (arrivals) let_others_run();
}

static char* element_at(const Map& map, const long (&at)[5]) {
    char* found = map.start;
    for (int i = 0; i < 5; ++i) {
        if (at[i] < 0 || at[i] >= map.sizes[i]) return nullptr;
        found += at[i] * map.strides[i];
    }
    return found;
}

// Calls `move` for each element of a map's box, with its address in memory, or null outside the tensor, and with its
// address in shared memory, where rows have 128 bytes.
template <class Move>
void each_element(const Map& map, u32 to, const Corner& corner, Move move) {
    const int rows = map.box[1] * map.box[2] * map.box[3] * map.box[4];
    for (int row = 0; row < rows; ++row)
        for (int column = 0; column < map.box[0]; ++column) {
            const long at[5] = {corner.c[0] + column, corner.c[1] + row % map.box[1],
                                corner.c[2] + row / map.box[1] % map.box[2],
                                corner.c[3] + row / map.box[1] / map.box[2] % map.box[3],
                                corner.c[4] + row / map.box[1] / map.box[2] / map.box[3]};
            move(element_at(map, at), swizzled(to + row * 128 + column * item));
        }
}

static std::vector<char> values_of(const Map& map, u32 from, const Corner& at) {
    std::vector<char> values;
    each_element(map, from, at, [&](char* element, u32 address) {
        if (element) values.insert(values.end(), memory + address, memory + address + item);
    });
    return values;
}

static void perform(const Stored& stored) {
    require(values_of(*stored.map, stored.from, stored.at) == stored.values, "memory changes while a store reads it");
    each_element(*stored.map, stored.from, stored.at, [](char* element, u32 address) {
        if (element) memcpy(element, memory + address, item);
    });
}

static void load_element(const Map& map, const char* element, u32 address) {
    u32 bits = 0;
    if (element) memcpy(&bits, element, item);
    if (map.rounds) bits += 0x1000;  // the last 13 bits are ignored
    memcpy(memory + address, &bits, item);
}

void load_into(const Map& map, u32 to, u32 barrier, const Corner& corner) {
    require(to % 1024 == 0, "a load to an address that is no multiple of 1024");
    require(!map.walks, "a box of a map that walks");
    each_element(map, to, corner, [&](const char* element, u32 address) { load_element(map, element, address); });
    count(rank(), barrier, 0, -long(item) * map.box[0] * map.box[1] * map.box[2] * map.box[3] * map.box[4]);
}

void walk_into(const Map& map, u32 to, u32 barrier, int c, int w, int h, int n, int offset_w, int offset_h) {
    require(to % 1024 == 0 && map.walks, "a walk");
    require(offset_w >= 0 && offset_w < 256 && offset_h >= 0 && offset_h < 256, "offsets of a walk");
    const long end_w = map.sizes[1] + map.upper[0], end_h = map.sizes[2] + map.upper[1];
    require(w >= map.lower[0] && w < end_w && h >= map.lower[1] && h < end_h, "a walk begins in its box");
    for (int row = 0; row < map.box[1]; ++row) {
        for (int column = 0; column < map.box[0]; ++column) {
            const long at[5] = {c + column, w + offset_w, h + offset_h, n, 0};
            load_element(map, element_at(map, at), swizzled(to + row * 128 + column * item));
        }
        if (++w < end_w) continue;
        w = map.lower[0];
        if (++h < end_h) continue;
        h = map.lower[1];
        ++n;
    }
    count(rank(), barrier, 0, -long(item) * map.box[0] * map.box[1]);
}

static Warp& warp() { return here->warps[threadIdx.x / 32]; }
void sync_warp() { arrive(warp().barrier, 32, true); }
void sync_warpgroup() { arrive(here->warpgroups[threadIdx.x / 128], 128, true); }
void sync_cluster() { arrive(cluster_threads, block_threads * int(cluster.size()), true); }
void arrive(int named, int threads, bool stay) { arrive(here->named[named], threads, stay); }

const u32* exchange(u32 word) {
    u32* words = warp().words;
    words[threadIdx.x % 32] = word;
    sync_warp();
    return words;
}

void begin_store(const Map& map, u32 from, const Corner& corner) {
    auto& stores = running->stores;
    if (stores.empty()) stores.emplace_back();
    stores.back().push_back({&map, from, corner, values_of(map, from, corner)});
}

void commit_stores() { running->stores.emplace_back(); }

void wait_for_stores(size_t pending) {
    auto& stores = running->stores;
    if (stores.size() > pending + 1) let_others_run();
    for (; stores.size() > pending + 1; stores.pop_front())
        for (const Stored& stored : stores.front()) perform(stored);
}

void begin_product(Product* product) {
    auto& products = running->products;
    if (products.empty()) products.emplace_back();
    products.back().emplace_back(product);
}

void commit_products() { running->products.emplace_back(); }

void wait_for_products(size_t pending) {
    auto& products = running->products;
    if (products.size() > pending + 1) let_others_run();
    for (; products.size() > pending + 1; products.pop_front())
        for (const auto& product : products.front()) product->run();
}

static void run_thread() {
    body(passed);
    for (const auto& group : running->stores)
        require(group.empty(), "ends with stores that may not have read their memory");
    for (const auto& group : running->products) require(group.empty(), "ends with products that nothing waited for");
    running->ended = true;
    running->coroutine.pause();
}

static void begin(Thread& thread, int rank, int index) {
    thread.rank = rank;
    thread.index = index;
    thread.ended = false;
    thread.ready = [] { return true; };
    thread.stores.clear();
    thread.products.clear();
    thread.coroutine.start(STACK_BYTES, run_thread);
}

static void resume(Thread& thread, int first_block) {
    running = &thread;
    here = cluster[thread.rank];
    memory = here->memory;
    threadIdx.x = thread.index;
    blockIdx.x = first_block + thread.rank;
    thread.coroutine.resume();
}

// Lets the threads of a warp run until all of them wait for others; returns whether any ran, and counts those that end.
static bool run_warp(Thread* warp, int first_block, int& ended) {
    bool ran = false;
    for (bool more = true; more; ran |= more) {
        more = false;
        for (Thread* thread = warp; thread < warp + 32; ++thread) {
            if (thread->ended || !thread->ready()) continue;
            resume(*thread, first_block);
            ended += thread->ended;
            more = true;
        }
    }
    return ran;
}

// Runs all threads in rounds, which take the warps in ascending or in descending order, without a period.
static void run_cluster(std::vector<Thread>& threads, int first_block) {
    const int count = int(threads.size());
    rounds = 0;
    long latest = 0;  // the round in which a thread last ran
    for (int ended = 0; ended < count; ++rounds) {
        for (int i = 0; i < count; i += 32)
            if (run_warp(&threads[__builtin_parityl(rounds) ? count - 32 - i : i], first_block, ended)) latest = rounds;
        require(rounds < latest + 3, "a wait that never ends");
    }
}

void launch(int grid, int size, int threads_of_block, int bytes_of_item, int shared_bytes, void (*run)(const void*),
            const void* kernel) {
    body = run;
    passed = kernel;
    block_threads = threads_of_block;
    item = bytes_of_item;
    shared_size = shared_bytes;
    gridDim.x = grid;
    std::vector<Thread> threads(size * block_threads);
    for (int first = 0; first < grid; first += size) {
        cluster.clear();
        cluster_threads = ThreadBarrier();
        std::vector<std::vector<char>> memories(size, std::vector<char>(shared_bytes, char(0xff)));  // NaN
        std::vector<Block> blocks(size);
        for (int i = 0; i < size; ++i) {
            blocks[i].memory = memories[i].data();
            cluster.push_back(&blocks[i]);
        }
        for (int i = 0; i < size * block_threads; ++i) begin(threads[i], i / block_threads, i % block_threads);
        run_cluster(threads, first);
        for (const Block& block : blocks)
            for (const ThreadBarrier& named : block.named) require(named.arrived == 0, "leaves a barrier half full");
    }
}

}  // namespace emulated
