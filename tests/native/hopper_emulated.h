// An emulation of Hopper's instructions under the names of hopper.cuh, so that the source of a kernel compiles with this
// header in its place. The threads of a cluster take turns on one thread of the CPU.
//
// A load happens at once; a store or a wgmma happens when something waits for it. These are the extremes that the
// hardware allows, so that a kernel that reuses memory too soon or reads it too early computes wrong results. A thread
// that arrives at a barrier without waiting is overtaken by all that this lets go on. A wait that never ends, a barrier
// with too many arrivals, unfinished work, and memory that changes while a store reads it abort the process.
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "call_emulated.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)

using std::max;
using std::min;
using s8 = signed char;
using u8 = unsigned char;
using u32 = unsigned;
using u64 = unsigned long long;

struct int2 { int x, y; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct Index { int x, y, z; };
static Index threadIdx, blockIdx;  // of the thread that runs
static Index gridDim;

// ---- types.cuh ---------------------------------------------------------------------------------------------------

struct f32 { u32 bits; };
struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };

constexpr float LARGEST = 3.402823466e38f;
constexpr float LOG2_E = 1.442695041f;

static float widened(f16 value) {
    _Float16 half;
    memcpy(&half, &value, 2);
    return float(half);
}

static float widened(bf16 value) {
    const u32 bits = u32(value.bits) << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

static unsigned short narrowed(f16, float value) {
    const _Float16 half = _Float16(value);
    unsigned short bits;
    memcpy(&bits, &half, 2);
    return bits;
}

static unsigned short narrowed(bf16, float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static float __uint_as_float(u32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static int widened(s8 value) { return value; }
static int widened(u8 value) { return value; }

static float widened(f32 value) {
    float wide;
    memcpy(&wide, &value, 4);
    return wide;
}

static u32 narrowed(f32, float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static void widen(f32, u32 word, float* to) { to[0] = __uint_as_float(word); }
static u32 narrow(f32 type, const float* from) { return narrowed(type, from[0]); }

template <class T>
void widen(T, u32 word, float* to) {
    to[0] = widened(T{static_cast<unsigned short>(word)});
    to[1] = widened(T{static_cast<unsigned short>(word >> 16)});
}

template <class T>
u32 narrow(T type, const float* from) {
    return narrowed(type, from[0]) | u32(narrowed(type, from[1])) << 16;
}

inline int __ffsll(u64 value) { return __builtin_ffsll(value); }
inline void wait_for_predecessor() {}
inline void release_successor() {}

inline float __int_as_float(int bits) { return __uint_as_float(bits); }
inline u32 __float_as_uint(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return bits;
}
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
static float exp2_fast(float x) { return exp2f(x); }
static float reciprocal(float x) { return 1 / x; }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }

template <class T, int N>
struct Pack { u32 words[(N * sizeof(T) + 3) / 4]; };

enum class Use { ONCE, OFTEN, CONSTANT };

template <Use USE, int BYTES>
void load_bytes(const char* from, u32* to) {
    memcpy(to, from, BYTES);
}

// Products of the elements of two words, each rounded to T.
template <class T>
u32 multiply_words(T type, u32 a, u32 b) {
    float first[2] = {}, second[2] = {};
    widen(type, a, first);
    widen(type, b, second);
    const float products[2] = {first[0] * second[0], first[1] * second[1]};
    return narrow(type, products);
}

template <int N, bool CONSTANT = false, class T>
Pack<T, N> load_cached(const T* from) {
    Pack<T, N> loaded{};
    memcpy(&loaded, from, N * sizeof(T));
    return loaded;
}

template <int N, class T>
Pack<T, N> load_once(const T* from) {
    return load_cached<N>(from);
}

template <class T, int N>
void unpack(const Pack<T, N>& packed, float (&to)[N]) {
    for (int i = 0; i < N; ++i) {
        T value;
        memcpy(&value, reinterpret_cast<const char*>(packed.words) + i * sizeof(T), sizeof(T));
        to[i] = widened(value);
    }
}

template <class T, int N>
Pack<T, N> pack(const float (&from)[N]) {
    Pack<T, N> packed{};
    for (int i = 0; i < N; ++i) {
        const auto bits = narrowed(T(), from[i]);
        memcpy(reinterpret_cast<char*>(packed.words) + i * sizeof(T), &bits, sizeof(T));
    }
    return packed;
}

template <bool LEAVING, int N, class T>
void store(T* to, const float (&values)[N]) {
    for (int i = 0; i < N; ++i) to[i].bits = narrowed(T(), values[i]);
}

template <int N, class T>
void store_as(bool, T* to, const float (&values)[N]) {
    store<false>(to, values);
}

template <bool LEAVING, int BYTES>
void store_bytes(char* to, const u32* from) {
    memcpy(to, from, BYTES);
}

// ---- blocks and their threads ------------------------------------------------------------------------------------

// A tensor of the kernel's elements in memory, and the box that a copy moves; the innermost dimension is the first.
// Missing dimensions have size 1. With `walks`, a box is channels and pixels, and lower and upper are those of
// cuTensorMapEncodeIm2col along W and H, at unit steps. With `rounds`, loads round fp32 to TF32.
struct Map {
    char* start;
    long sizes[5], strides[5];
    int box[5];
    int walks, lower[2], upper[2], rounds;
};
struct TensorMap { const Map* map; };

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
    u32 address[32];
};

struct Block {
    char* memory;
    std::map<u32, Barrier> barriers;
    ThreadBarrier named[16], warpgroups[4];
    Warp warps[16];
};

struct Corner { int c[5]; };  // coordinates of a box

struct Stored {
    const Map* map;
    u32 from;
    Corner at;
    std::vector<char> values;  // that shared memory had when the store began
};

constexpr int THREADS = BLOCK_THREADS;
#ifdef OPERAND  // integers
constexpr int ITEM = 1;
#elif defined(ELEMENT)
constexpr int ITEM = sizeof(ELEMENT);
#else
constexpr int ITEM = 2;
#endif
constexpr size_t STACK_BYTES = 256 << 10;

struct Thread {
    ucontext_t state;
    std::unique_ptr<char[]> stack;
    int rank, index;
    bool ended;
    std::function<bool()> ready;
    std::deque<std::vector<Stored>> stores;  // groups, the last of which is not committed yet
    std::deque<std::vector<std::function<void()>>> products;
};

static std::vector<Block*> cluster;
static ThreadBarrier cluster_threads;
static ucontext_t scheduler;
static std::function<void()> body;
static long rounds;  // in each of which every warp ran as far as it could
static Thread* running;
static Block* here;  // of the thread that runs

static void fail(const char* what) {
    fprintf(stderr, "%s: block %d, thread %d\n", what, blockIdx.x, threadIdx.x);
    abort();
}

static void require(bool condition, const char* what) {
    if (!condition) fail(what);
}

template <class Condition>
void wait(Condition condition) {
    if (condition()) return;
    running->ready = condition;
    swapcontext(&running->state, &scheduler);
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

static void count(Block* block, u32 address, int arrivals, long bytes) {
    Barrier& barrier = block->barriers[address];
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

static u32 swizzled(u32 address) { return address ^ ((address >> 7 & 7) << 4); }

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
            move(element_at(map, at), swizzled(to + row * 128 + column * ITEM));
        }
}

static std::vector<char> values_of(const Map& map, u32 from, const Corner& at) {
    std::vector<char> values;
    each_element(map, from, at, [&](char* element, u32 address) {
        if (element) values.insert(values.end(), here->memory + address, here->memory + address + ITEM);
    });
    return values;
}

static void perform(const Stored& stored) {
    require(values_of(*stored.map, stored.from, stored.at) == stored.values, "memory changes while a store reads it");
    each_element(*stored.map, stored.from, stored.at, [](char* element, u32 address) {
        if (element) memcpy(element, here->memory + address, ITEM);
    });
}

static void load_element(Block* block, const Map& map, const char* element, u32 address) {
    u32 bits = 0;
    if (element) memcpy(&bits, element, ITEM);
    if (map.rounds) bits += 0x1000;  // the last 13 bits are ignored
    memcpy(block->memory + address, &bits, ITEM);
}

static void load_into(Block* block, const Map& map, u32 to, u32 barrier, const Corner& corner) {
    require(to % 1024 == 0, "a load to an address that is no multiple of 1024");
    require(!map.walks, "a box of a map that walks");
    each_element(map, to, corner,
                 [&](const char* element, u32 address) { load_element(block, map, element, address); });
    count(block, barrier, 0, -long(ITEM) * map.box[0] * map.box[1] * map.box[2] * map.box[3] * map.box[4]);
}

// The pixels of a walk from the one at w, h, n on, moved by the offsets.
static void walk_into(Block* block, const Map& map, u32 to, u32 barrier, int c, int w, int h, int n, int offset_w,
                      int offset_h) {
    require(to % 1024 == 0 && map.walks, "a walk");
    require(offset_w >= 0 && offset_w < 256 && offset_h >= 0 && offset_h < 256, "offsets of a walk");
    const long end_w = map.sizes[1] + map.upper[0], end_h = map.sizes[2] + map.upper[1];
    require(w >= map.lower[0] && w < end_w && h >= map.lower[1] && h < end_h, "a walk begins in its box");
    for (int row = 0; row < map.box[1]; ++row) {
        for (int column = 0; column < map.box[0]; ++column) {
            const long at[5] = {c + column, w + offset_w, h + offset_h, n, 0};
            load_element(block, map, element_at(map, at), swizzled(to + row * 128 + column * ITEM));
        }
        if (++w < end_w) continue;
        w = map.lower[0];
        if (++h < end_h) continue;
        h = map.lower[1];
        ++n;
    }
    count(block, barrier, 0, -long(ITEM) * map.box[0] * map.box[1]);
}

// All four warps execute a wgmma together.
static void sync_warpgroup() { arrive(here->warpgroups[threadIdx.x / 128], 128, true); }

// Returns the addresses that the 32 lanes of this thread's warp pass.
static const u32* exchange(u32 address) {
    Warp& warp = here->warps[threadIdx.x / 32];
    warp.address[threadIdx.x % 32] = address;
    arrive(warp.barrier, 32, true);
    return warp.address;
}

static void end_exchange() { arrive(here->warps[threadIdx.x / 32].barrier, 32, true); }

// Returns element `k` of row `row` (of m or n) of a wgmma operand.
template <class T>
auto element(u64 descriptor, bool along_rows, int row, int k) {
    const u32 start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
    const u32 stride = (descriptor >> 32 & 0x3fff) << 4;
    require(descriptor >> 62 == 1, "a descriptor without the 128-byte swizzle");
    const u32 address = along_rows ? start + row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2
                              : start + row / 8 * stride + row % 8 * 128 + k * int(sizeof(T));
    T value;
    memcpy(&value, here->memory + swizzled(address), sizeof(T));
    if constexpr (sizeof(T) == 4) value.bits &= 0xffffe000u;  // TF32
    return widened(value);
}

static void run_thread() {
    body();
    for (const auto& group : running->stores)
        require(group.empty(), "ends with stores that may not have read their memory");
    for (const auto& group : running->products) require(group.empty(), "ends with products that nothing waited for");
    running->ended = true;
    swapcontext(&running->state, &scheduler);
}

static void begin(Thread& thread, int rank, int index) {
    if (!thread.stack) thread.stack.reset(new char[STACK_BYTES]);
    thread.rank = rank;
    thread.index = index;
    thread.ended = false;
    thread.ready = [] { return true; };
    thread.stores.clear();
    thread.products.clear();
    getcontext(&thread.state);
    thread.state.uc_stack.ss_sp = thread.stack.get();
    thread.state.uc_stack.ss_size = STACK_BYTES;
    makecontext(&thread.state, run_thread, 0);
}

static void resume(Thread& thread, int first_block) {
    running = &thread;
    here = cluster[thread.rank];
    threadIdx.x = thread.index;
    blockIdx.x = first_block + thread.rank;
    swapcontext(&scheduler, &thread.state);
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

// Runs the kernel's clusters of `size` blocks, one after another.
template <class Kernel>
void launch(int grid, int size, int shared_bytes, Kernel kernel) {
    body = kernel;
    gridDim.x = grid;
    std::vector<Thread> threads(size * THREADS);
    for (int first = 0; first < grid; first += size) {
        cluster.clear();
        cluster_threads = ThreadBarrier();
        std::vector<std::vector<char>> memories(size, std::vector<char>(shared_bytes, char(0xff)));  // NaN
        std::vector<Block> blocks(size);
        for (int i = 0; i < size; ++i) {
            blocks[i].memory = memories[i].data();
            cluster.push_back(&blocks[i]);
        }
        for (int i = 0; i < size * THREADS; ++i) begin(threads[i], i / THREADS, i % THREADS);
        run_cluster(threads, first);
        for (const Block& block : blocks)
            for (const ThreadBarrier& named : block.named) require(named.arrived == 0, "leaves a barrier half full");
    }
}

}  // namespace emulated

template <class Word>
Word __shfl_sync(unsigned, Word value, int lane) {
    const Word found = emulated::exchange(value)[lane];
    emulated::end_exchange();
    return found;
}
inline float __shfl_xor_sync(unsigned, float value, int mask) {
    u32 word;
    memcpy(&word, &value, 4);
    const float found = __uint_as_float(emulated::exchange(word)[threadIdx.x % 32 ^ mask]);
    emulated::end_exchange();
    return found;
}
inline u32 __ballot_sync(unsigned, bool mine) {
    const u32* all = emulated::exchange(mine);
    u32 found = 0;
    for (int i = 0; i < 32; ++i) found |= all[i] << i;
    emulated::end_exchange();
    return found;
}
inline bool __all_sync(unsigned threads, bool mine) { return __ballot_sync(threads, mine) == 0xffffffffu; }
inline bool __any_sync(unsigned threads, bool mine) { return __ballot_sync(threads, mine) != 0; }
inline void __syncwarp() { emulated::arrive(emulated::here->warps[threadIdx.x / 32].barrier, 32, true); }
inline void __syncthreads() { emulated::arrive(emulated::here->named[0], emulated::THREADS, true); }

// ---- hopper.cuh --------------------------------------------------------------------------------------------------

namespace hopper {
using namespace emulated;

inline u32 shared_address(const void* pointer) { return u32(static_cast<const char*>(pointer) - here->memory); }
inline void named_barrier(int barrier, int threads) { arrive(here->named[barrier], threads, true); }
inline void named_barrier_arrive(int barrier, int threads) { arrive(here->named[barrier], threads, false); }
inline u32 cluster_rank() { return running->rank; }
inline void cluster_barrier() { arrive(cluster_threads, THREADS * int(cluster.size()), true); }
inline void cluster_barrier_relaxed() { cluster_barrier(); }
template <int COUNT> void give_registers() {}
template <int COUNT> void take_registers() {}

inline void barrier_init(u32 barrier, u32 arrivals) {
    require(barrier % 8 == 0 && here->barriers.count(barrier) == 0, "a barrier that cannot be there");
    here->barriers[barrier].arrivals = here->barriers[barrier].pending = arrivals;
}
inline void barrier_init_fence() {}
inline void barrier_arrive(u32 barrier) { count(here, barrier, 1, 0); }
inline void barrier_arrive_expect(u32 barrier, u32 bytes) { count(here, barrier, 1, bytes); }
inline void barrier_wait(u32 barrier, u32 parity) {
    const Barrier& waited = here->barriers[barrier];
    require(waited.arrivals > 0, "waits where no barrier is");
    wait([&waited, parity] { return waited.phase != parity; });
}

inline void store_at(u32 address, u32 block, const float (&values)[4]) {
    memcpy(cluster[block]->memory + address, values, 16);
}

inline void prefetch(const TensorMap&) {}
template <class... Coordinates>
void load(const TensorMap& map, u32 to, u32 barrier, Coordinates... at) {
    load_into(here, *map.map, to, barrier, Corner{at...});
}
inline void load_im2col(const TensorMap& map, u32 to, u32 barrier, int c, int w, int h, int n, int offset_w,
                        int offset_h) {
    walk_into(here, *map.map, to, barrier, c, w, h, n, offset_w, offset_h);
}
inline void load_im2col(const TensorMap&, u32, u32, int, int, int, int) { fail("a walk over one axis"); }
inline void load_im2col(const TensorMap&, u32, u32, int, int, int, int, int, int, int, int) { fail("one over three"); }
template <class... Coordinates>
void store(const TensorMap& map, u32 from, Coordinates... at) {
    auto& stores = running->stores;
    if (stores.empty()) stores.emplace_back();
    const Corner corner{at...};
    stores.back().push_back({map.map, from, corner, values_of(*map.map, from, corner)});
}
inline void store_commit() { running->stores.emplace_back(); }
inline void store_fence() {}
template <int PENDING>
void store_wait_read() {
    auto& stores = running->stores;
    if (stores.size() > PENDING + 1) let_others_run();
    for (; stores.size() > PENDING + 1; stores.pop_front())
        for (const Stored& stored : stores.front()) perform(stored);
}

inline void store_word(u32 to, u32 word) { memcpy(here->memory + to, &word, 4); }
inline void load_words(u32 from, float& first, float& second) {
    memcpy(&first, here->memory + from, 4);
    memcpy(&second, here->memory + from + 4, 4);
}

inline void store_matrices(u32 to, const u32 (&words)[4]) {
    const u32* rows = exchange(to);
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; ++i) memcpy(here->memory + rows[8 * i + lane / 4] + lane % 4 * 4, &words[i], 4);
    end_exchange();
}
inline void load_matrices(u32 from, u32 (&words)[4]) {
    const u32* rows = exchange(from);
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; ++i) memcpy(&words[i], here->memory + rows[8 * i + lane / 4] + lane % 4 * 4, 4);
    end_exchange();
}

template <int SWIZZLE>
u64 matrix_descriptor(u32 address, u32 leading, u32 stride) {
    static_assert(SWIZZLE == 128);
    return u64(1) << 62 | u64(stride >> 4) << 32 | u64(leading >> 4) << 16 | u64((address & 0x3ffff) >> 4);
}
inline u64 moved(u64 descriptor, u32 bytes) { return (descriptor >> 32 << 32) + u32(u32(descriptor) + (bytes >> 4)); }
inline void wgmma_fence() { sync_warpgroup(); }
inline void wgmma_commit() { running->products.emplace_back(); }
template <int PENDING>
void wgmma_wait() {
    auto& products = running->products;
    if (products.size() > PENDING + 1) let_others_run();
    for (; products.size() > PENDING + 1; products.pop_front())
        for (const auto& product : products.front()) product();
    sync_warpgroup();
}
template <class Sum, int COUNT> void settle(Sum (&)[COUNT]) {}
template <class E> void settle(const E*&) {}

template <class T> struct Weight { using Type = T; };
template <> struct Weight<u8> { using Type = s8; };

template <bool ALONG_N, class T, class Sum, int COUNT>
void wgmma(T, Sum (&d)[COUNT], u64 a, u64 b, bool accumulate) {
    auto& products = running->products;
    if (products.empty()) products.emplace_back();
    Sum* sums = d;
    products.back().push_back([=] {
        const int thread = threadIdx.x % 128;
        for (int i = 0; i < COUNT; ++i) {
            const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
            const int column = i / 4 * 8 + thread % 4 * 2 + i % 2;
            Sum sum = 0;
            for (int k = 0; k < 32 / int(sizeof(T)); ++k)
                sum += element<T>(a, false, row, k) * element<typename Weight<T>::Type>(b, ALONG_N, column, k);
            sums[i] = accumulate ? sums[i] + sum : sum;
        }
    });
}

// The same with `a` in registers, which are read when something waits.
template <bool ALONG_N, class T, int COUNT>
void wgmma(T, float (&d)[COUNT], const u32 (&a)[4], u64 b, bool accumulate) {
    auto& products = running->products;
    if (products.empty()) products.emplace_back();
    float* sums = d;
    const u32* words = a;
    products.back().push_back([=] {
        float rows[2][16];  // of the two rows of this thread: its lanes pass two words each at a time
        const int thread = threadIdx.x % 128;
        for (int word = 0; word < 4; ++word) {
            const u32* all = exchange(words[word]);
            for (int lane = 0; lane < 4; ++lane)
                widen(T(), all[thread % 32 / 4 * 4 + lane], rows[word % 2] + word / 2 * 8 + lane * 2);
            end_exchange();
        }
        for (int i = 0; i < COUNT; ++i) {
            float sum = 0;
            for (int k = 0; k < 16; ++k)
                sum += rows[i / 2 % 2][k] * element<T>(b, ALONG_N, i / 4 * 8 + thread % 4 * 2 + i % 2, k);
            sums[i] = accumulate ? sums[i] + sum : sum;
        }
    });
}

}  // namespace hopper
