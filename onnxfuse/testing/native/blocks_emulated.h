// An emulation of a GPU's blocks on one thread of the CPU, under the names of types.cuh and cluster.cuh, so that the
// source of a kernel compiles with this header in their place. block_threads.cc runs the threads.
#include "block_threads.h"
#include "byte_perm_emulated.h"
#include "call_emulated.h"
#include "packed_words_emulated.h"
#include "types_emulated.h"

// Kernels declare these types of fixed width themselves.
#define int32_t kernel_int32_t
#define int64_t kernel_int64_t
#define uint32_t kernel_uint32_t
#define uint64_t kernel_uint64_t
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define CLUSTER_DIMS

#ifndef CLUSTER
#define CLUSTER 1
#endif

// ---- types.cuh ---------------------------------------------------------------------------------------------------

template <int N, bool CONSTANT = false, class T>
static Pack<T, N> load_cached(const T* from) {
    if (reinterpret_cast<u64>(from) % (min(N * int(sizeof(T)), 16))) abort();  // misaligned
    Pack<T, N> loaded{};
    memcpy(&loaded, from, N * sizeof(T));
    return loaded;
}

template <class T>
static T __ldg(const T* from) {
    if (reinterpret_cast<u64>(from) % sizeof(T)) abort();  // misaligned
    return *from;
}

template <int N, class T>
static Pack<T, N> load_once(const T* from) { return load_cached<N>(from); }

template <int N, class T>
static void copy_to_shared(Pack<T, N>& to, const T* from) { to = load_cached<N>(from); }

template <bool LEAVING, int N, class T>
static void store_pack(T* to, const Pack<T, N>& packed) {
    if (reinterpret_cast<u64>(to) % (min(N * int(sizeof(T)), 16))) abort();
    memcpy(to, &packed, N * sizeof(T));
}

template <bool LEAVING, int N, class T>
static void store(T* to, const float (&values)[N]) { store_pack<LEAVING>(to, pack<T, N>(values)); }

template <int N, class T>
static void store_pack_as(bool, T* to, const Pack<T, N>& packed) { store_pack<false>(to, packed); }

template <int N, class T>
static void store_as(bool, T* to, const float (&values)[N]) { store<false>(to, values); }

struct Divisor {
    u32 value;
    u64 multiplier;
};
static u32 operator/(u32 n, Divisor d) { return u32((static_cast<unsigned __int128>(n) << 2) * d.multiplier >> 64); }
static int operator/(int n, Divisor d) { return int(u32(n) / d); }
static u32 operator%(u32 n, Divisor d) { return n - n / d * d.value; }
static int operator%(int n, Divisor d) { return int(u32(n) % d); }

static void wait_for_copies() {}
#define __sinf sinf  // the C library declares a function of that name
static float __fdiv_rn(float a, float b) { return a / b; }
static u64 __umul64hi(u64 a, u64 b) { return u64(static_cast<unsigned __int128>(a) * b >> 64); }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsqrt_rn(float a) { return sqrtf(a); }
static float __fdividef(float a, float b) { return a / b; }

// ---- blocks and their threads ------------------------------------------------------------------------------------

static void __syncthreads() { emulated::wait(emulated::Wait::Block); }

static int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 32; i += 8) sum += int(static_cast<signed char>(a >> i)) * static_cast<signed char>(b >> i);
    return sum;
}

template <class T>
static T __shfl_xor_sync(unsigned, T value, int mask) {
    const u32 other = emulated::exchange(bits_as<u32>(value))[emulated::lane() ^ mask];
    emulated::wait(emulated::Wait::Warp);
    return bits_as<T>(other);
}

// ---- cluster.cuh -------------------------------------------------------------------------------------------------

static unsigned cluster_rank() { return emulated::rank(); }
// One extreme: what a block does between arriving and waiting happens before any block passes the barrier. If
// late_after_arrival is set, the other one: it happens after other blocks have passed the barrier.
extern "C" bool late_after_arrival;
bool late_after_arrival = false;
static void cluster_arrive() {
    if (CLUSTER > 1 && late_after_arrival) emulated::wait(emulated::Wait::Cluster);
}
static void cluster_wait() {
    if (CLUSTER == 1) __syncthreads();
    else if (!late_after_arrival) emulated::wait(emulated::Wait::Cluster);
}
static void store_peer(float* address, unsigned rank, float value) {
    memcpy(emulated::memory(rank) + (reinterpret_cast<char*>(address) - emulated::memory()), &value, 4);
}

struct alignas(8) Inbox {
    int missing;     // bytes
    unsigned phase;  // twice its number, plus 1 if bytes are expected
    void end_phase() {
        if (phase % 2 && missing == 0) ++phase;
    }
};
static void open_inbox(Inbox& inbox) { inbox = {}; }
static void expect(Inbox& inbox, unsigned bytes) {
    if (inbox.phase % 2) abort();  // expected twice
    inbox.missing += bytes, ++inbox.phase, inbox.end_phase();
}
static void receive(Inbox& inbox, unsigned phase) {
    if (CLUSTER == 1) return __syncthreads();
    if (inbox.phase / 2 != phase && inbox.phase / 2 != phase + 1) abort();  // the parity would be another phase's
    while (inbox.phase / 2 == phase) emulated::wait_for_change(inbox.phase);
}
static void send_peer(float* address, unsigned rank, float value, Inbox& inbox) {
    store_peer(address, rank, value);
    auto& own = *reinterpret_cast<Inbox*>(emulated::memory(rank) + (reinterpret_cast<char*>(&inbox) - emulated::memory()));
    own.missing -= 4, own.end_phase();
}
