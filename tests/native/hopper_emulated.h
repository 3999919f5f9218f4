// An emulation of Hopper's instructions under the names of hopper.cuh, so that the source of a kernel compiles with this
// header in its place. The threads of a cluster take turns on one thread of the CPU.
//
// A load happens at once; a store or a wgmma happens when something waits for it. These are the extremes that the
// hardware allows, so that a kernel that reuses memory too soon or reads it too early computes wrong results. A thread
// that arrives at a barrier without waiting is overtaken by all that this lets go on. A wait that never ends, a barrier
// with too many arrivals, unfinished work, and memory that changes while a store reads it abort the process.
#include "byte_perm_emulated.h"
#include "call_emulated.h"
#include "hopper_threads.h"
#include "packed_words_emulated.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct int2 { int x, y; };

// ---- types.cuh ---------------------------------------------------------------------------------------------------

inline int __ffsll(u64 value) { return __builtin_ffsll(value); }
inline float __int_as_float(int bits) { return __uint_as_float(bits); }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }

template <int N, bool CONSTANT = false, class T>
Pack<T, N> load_cached(const T* from) {
    Pack<T, N> loaded{};
    memcpy(&loaded, from, N * sizeof(T));
    return loaded;
}

template <class T>
T __ldg(const T* from) {
    return *from;
}

template <int N, class T>
Pack<T, N> load_once(const T* from) {
    return load_cached<N>(from);
}

template <bool LEAVING, int N, class T>
void store(T* to, const float (&values)[N]) {
    for (int i = 0; i < N; ++i) to[i] = narrowed(T(), values[i]);
}

template <int N, class T>
void store_as(bool, T* to, const float (&values)[N]) {
    store<false>(to, values);
}

enum class Use { ONCE, OFTEN, CONSTANT };

template <Use USE, int BYTES>
void load_bytes(const char* from, u32* to) {
    memcpy(to, from, BYTES);
}

template <bool LEAVING, int BYTES>
void store_bytes(char* to, const u32* from) {
    memcpy(to, from, BYTES);
}

// ---- blocks and their threads ------------------------------------------------------------------------------------

struct TensorMap { const Map* map; };

namespace emulated {

constexpr int THREADS = BLOCK_THREADS;
#ifdef OPERAND  // 8 bits
constexpr int ITEM = 1;
#elif defined(ELEMENT)
constexpr int ITEM = sizeof(ELEMENT);
#elif defined(T)
constexpr int ITEM = sizeof(T);
#else
constexpr int ITEM = 2;
#endif

// Returns element `k` of row `row` (of m or n) of a wgmma operand.
template <class T>
auto element(u64 descriptor, bool along_rows, int row, int k) {
    const u32 start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
    const u32 stride = (descriptor >> 32 & 0x3fff) << 4;
    require(descriptor >> 62 == 1, "a descriptor without the 128-byte swizzle");
    const u32 address = along_rows ? start + row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2
                              : start + row / 8 * stride + row % 8 * 128 + k * int(sizeof(T));
    T value;
    memcpy(&value, memory + swizzled(address), sizeof(T));
    if constexpr (sizeof(T) == 4) value.bits &= 0xffffe000u;  // TF32
    return widened(value);
}

}  // namespace emulated

template <class Word>
Word __shfl_sync(unsigned, Word value, int lane) {
    const Word found = emulated::exchange(value)[lane];
    emulated::end_exchange();
    return found;
}
template <class Word>
Word __shfl_xor_sync(unsigned, Word value, int mask) {
    static_assert(sizeof(Word) == 4);
    u32 word;
    memcpy(&word, &value, 4);
    word = emulated::exchange(word)[threadIdx.x % 32 ^ mask];
    emulated::end_exchange();
    memcpy(&value, &word, 4);
    return value;
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
inline void __syncwarp() { emulated::sync_warp(); }
inline void __syncthreads() { emulated::arrive(0, emulated::THREADS, true); }

// ---- hopper.cuh --------------------------------------------------------------------------------------------------

namespace hopper {
using namespace emulated;

inline u32 shared_address(const void* pointer) { return u32(static_cast<const char*>(pointer) - memory); }
inline void named_barrier(int barrier, int threads) { arrive(barrier, threads, true); }
inline void named_barrier_arrive(int barrier, int threads) { arrive(barrier, threads, false); }
inline u32 cluster_rank() { return rank(); }
inline void cluster_barrier() { sync_cluster(); }
inline void cluster_barrier_relaxed() { cluster_barrier(); }
template <int COUNT> void give_registers() {}
template <int COUNT> void take_registers() {}

inline void barrier_init(u32 barrier, u32 arrivals) { init_barrier(barrier, arrivals); }
inline void barrier_init_fence() {}
inline void barrier_arrive(u32 barrier) { count(rank(), barrier, 1, 0); }
inline void barrier_arrive_expect(u32 barrier, u32 bytes) { count(rank(), barrier, 1, bytes); }
inline void barrier_wait(u32 barrier, u32 parity) { wait_for_phase(barrier, parity); }

inline void store_at(u32 address, u32 block, const float (&values)[4]) {
    memcpy(memory_of(block) + address, values, 16);
}

template <int COUNT>
void load_at(u32 address, u32 block, float (&values)[COUNT]) {
    memcpy(values, memory_of(block) + address, COUNT * 4);
}

inline void prefetch(const TensorMap&) {}
template <class... Coordinates>
void load(const TensorMap& map, u32 to, u32 barrier, Coordinates... at) {
    load_into(*map.map, to, barrier, Corner{at...});
}
inline void load_im2col(const TensorMap& map, u32 to, u32 barrier, int c, int w, int h, int n, int offset_w,
                        int offset_h) {
    walk_into(*map.map, to, barrier, c, w, h, n, offset_w, offset_h);
}
inline void load_im2col(const TensorMap&, u32, u32, int, int, int, int) { fail("a walk over one axis"); }
inline void load_im2col(const TensorMap&, u32, u32, int, int, int, int, int, int, int, int) { fail("one over three"); }
template <class... Coordinates>
void store(const TensorMap& map, u32 from, Coordinates... at) {
    begin_store(*map.map, from, Corner{at...});
}
inline void store_commit() { commit_stores(); }
inline void store_fence() {}
template <int PENDING>
void store_wait_read() {
    wait_for_stores(PENDING);
}

inline void store_word(u32 to, u32 word) { memcpy(memory + to, &word, 4); }
inline void load_vector(u32 from, u32 (&words)[4]) { memcpy(words, memory + from, 16); }
inline void load_words(u32 from, float& first, float& second) {
    memcpy(&first, memory + from, 4);
    memcpy(&second, memory + from + 4, 4);
}

inline void load_words(u32 from, u32& first, u32& second) {
    memcpy(&first, memory + from, 4);
    memcpy(&second, memory + from + 4, 4);
}

inline void store_matrices(u32 to, const u32 (&words)[4]) {
    const u32* rows = exchange(to);
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; ++i) memcpy(memory + rows[8 * i + lane / 4] + lane % 4 * 4, &words[i], 4);
    end_exchange();
}
inline void load_matrices(u32 from, u32 (&words)[4]) {
    const u32* rows = exchange(from);
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; ++i) memcpy(&words[i], memory + rows[8 * i + lane / 4] + lane % 4 * 4, 4);
    end_exchange();
}

template <int SWIZZLE>
u64 matrix_descriptor(u32 address, u32 leading, u32 stride) {
    static_assert(SWIZZLE == 128);
    return u64(1) << 62 | u64(stride >> 4) << 32 | u64(leading >> 4) << 16 | u64((address & 0x3ffff) >> 4);
}
inline u64 moved(u64 descriptor, u32 bytes) { return (descriptor >> 32 << 32) + u32(u32(descriptor) + (bytes >> 4)); }
inline void wgmma_fence() { sync_warpgroup(); }
inline void wgmma_commit() { commit_products(); }
template <int PENDING>
void wgmma_wait() {
    wait_for_products(PENDING);
    sync_warpgroup();
}
template <class Sum, int COUNT> void settle(Sum (&)[COUNT]) {}
inline void settle(int&) {}
template <class E> void settle(const E*&) {}

template <class T> struct Weight { using Type = T; };
template <> struct Weight<u8> { using Type = s8; };

template <bool ALONG_N, class T, class Sum, int COUNT>
void wgmma(T, Sum (&d)[COUNT], u64 a, u64 b, bool accumulate) {
    Sum* sums = d;
    begin_product([=] {
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
    float* sums = d;
    const u32* words = a;
    begin_product([=] {
        constexpr int PER_WORD = 4 / sizeof(T);
        float rows[2][8 * PER_WORD];  // of the two rows of this thread: its lanes pass words one at a time
        const int thread = threadIdx.x % 128;
        for (int word = 0; word < 4; ++word) {
            const u32* all = exchange(sizeof(T) == 4 ? words[word] & 0xffffe000u : words[word]);  // TF32
            for (int lane = 0; lane < 4; ++lane)
                widen(T(), all[thread % 32 / 4 * 4 + lane], rows[word % 2] + (word / 2 * 4 + lane) * PER_WORD);
            end_exchange();
        }
        for (int i = 0; i < COUNT; ++i) {
            float sum = 0;
            for (int k = 0; k < 8 * PER_WORD; ++k)
                sum += rows[i / 2 % 2][k] * element<T>(b, ALONG_N, i / 4 * 8 + thread % 4 * 2 + i % 2, k);
            sums[i] = accumulate ? sums[i] + sum : sum;
        }
    });
}

}  // namespace hopper
