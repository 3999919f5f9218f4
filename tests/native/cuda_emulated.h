// An emulation of CUDA for kernels that use mma.sync and shared memory, under the names of types.cuh and
// gemm_multiply.cuh, so that the source of a kernel compiles with this header in their place.
//
// The threads of a block take turns on one thread of the CPU: each runs until it waits for others. What is read or
// written in global memory must lie in one of the arrays that `allow` has named. Shared memory is NaN at the beginning
// of each block. Asynchronous copies happen when something waits for them, at the latest possible time.
#include "byte_perm_emulated.h"
#include "call_emulated.h"
#include "cuda_threads.h"
#include "types_emulated.h"
#include "packed_words_emulated.h"

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)

using i64 = long long;

inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }

inline void __syncthreads() { emulated::sync_block(); }
inline void __syncwarp() { emulated::sync_warp(); }
inline bool __any_sync(u32, bool value) {
    const u32 own = value;
    auto& words = emulated::exchange(&own, 1);
    bool any = false;
    for (int i = 0; i < 32; ++i) any |= words[i][0] != 0;
    emulated::finish_exchange();
    return any;
}

template <class Word>
Word __shfl_xor_sync(unsigned, Word value, int mask) {
    constexpr int N = sizeof(Word) / 4;
    static_assert(sizeof(Word) % 4 == 0);
    u32 words[N];
    memcpy(words, &value, sizeof(Word));
    const auto& all = emulated::exchange(words, N);
    for (int i = 0; i < N; ++i) words[i] = all[threadIdx.x % 32 ^ mask][i];
    emulated::finish_exchange();
    memcpy(&value, words, sizeof(Word));
    return value;
}
inline int __syncthreads_or(int own) {
    static bool any;
    __syncthreads();
    any = false;
    __syncthreads();
    any |= own != 0;
    __syncthreads();
    return any;
}

// ---- types.cuh ---------------------------------------------------------------------------------------------------

template <int N, bool CONSTANT = false, class T>
Pack<T, N> load_cached(const T* from) {
    emulated::check(from, min(int(N * sizeof(T)), 16));
    Pack<T, N> loaded{};
    memcpy(&loaded, from, N * sizeof(T));
    return loaded;
}

template <int N, class T>
Pack<T, N> load_once(const T* from) {
    return load_cached<N>(from);
}

template <bool LEAVING, int N, class T>
void store(T* to, const float (&values)[N]) {
    emulated::check(to, min(int(N * sizeof(T)), 16));
    const Pack<T, N> packed = pack<T>(values);
    memcpy(to, &packed, N * sizeof(T));
}

template <int N, class T>
void store_as(bool, T* to, const float (&values)[N]) {
    store<false>(to, values);
}

template <bool LEAVING, int BYTES>
void store_bytes(char* to, const u32* from) {
    emulated::check(to, BYTES);
    memcpy(to, from, BYTES);
}

// A copy of less than 4 bytes goes through registers, so that it happens at once, and stores a whole word.
template <int BYTES>
void copy_bytes(char* to, const char* from) {
    emulated::check(from, BYTES);
    emulated::check_shared(to, max(BYTES, 4));
    if (BYTES < 4) {
        u32 word = 0;
        memcpy(&word, from, BYTES);
        memcpy(to, &word, 4);
    } else {
        emulated::begin_copy(to, from, BYTES);
    }
}

#ifndef COPIES_AT_ONCE  // conv_mma_emulated.h has its own
// Copies `read` bytes, all or none of BYTES, and zeroes the rest.
template <int BYTES>
void copy_async(unsigned to, const char* from, int read) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "the sizes that cp.async has");
    static const char zeros[16] = {};
    char* target = emulated::memory + to;
    emulated::check_shared(target, BYTES);
    if (read != 0 && read != BYTES) emulated::fail("a copy of a part");
    if (read) emulated::check(from, BYTES);
    emulated::begin_copy(target, read ? from : zeros, BYTES);
}
#endif

inline void commit_copies() { emulated::commit_copies(); }

template <int GROUPS>
void wait_for_copy_groups() {
    emulated::wait_for_copy_groups(GROUPS);
}

#ifndef COPIES_AT_ONCE
template <int PENDING>
void wait_for_groups() {
    wait_for_copy_groups<PENDING>();
}
#endif

inline void wait_for_copies() {
    commit_copies();
    wait_for_copy_groups<0>();
}

// ---- gemm_multiply.cuh -------------------------------------------------------------------------------------------

inline u32 shared_address(const void* pointer) { return u32(static_cast<const char*>(pointer) - emulated::memory); }

template <bool TRANSPOSE>
void load_matrices(unsigned (&to)[4], unsigned from) {
    static_assert(!TRANSPOSE, "not emulated");
    auto& addresses = emulated::exchange(&from, 1);
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; ++i) {
        const char* row = emulated::memory + addresses[i * 8 + lane / 4][0];
        emulated::check_shared(row, 16);
        memcpy(&to[i], row + lane % 4 * 4, 4);
    }
    emulated::finish_exchange();
}

inline float rounded_to_tf32(float value) { return __uint_as_float(__float_as_uint(value) & 0xffffe000u); }

// a and b as the lanes hold them: words along k, of one or two elements.
template <class T>
void multiply(T type, float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    constexpr int EACH = 4 / sizeof(T);
    const u32 own[6] = {a[0], a[1], a[2], a[3], b0, b1};
    auto& words = emulated::exchange(own, 6);
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int word = 0; word < 8; ++word) {
            float left[2], right[2];
            widen(type, words[row % 8 * 4 + word % 4][row / 8 + word / 4 * 2], left);
            widen(type, words[column * 4 + word % 4][4 + word / 4], right);
            for (int j = 0; j < EACH; ++j)
                sum[i] += EACH == 1 ? rounded_to_tf32(left[j]) * rounded_to_tf32(right[j]) : left[j] * right[j];
        }
    }
    emulated::finish_exchange();
}

inline unsigned nearest_tf32(unsigned bits) { return (bits + 0x1000u) & 0xffffe000u; }
