// Storage types, vectors of them, their loads and stores, and programmatic dependent launch.
//
// Arithmetic is in fp32; f32, f16 and bf16 are types of storage. Conversions are PTX, so that a kernel needs no
// header of the CUDA toolkit and compiles in under 0.1 s.
#pragma once

struct f32 { unsigned bits; };
struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };

// Integers of 8 bits are storage types, too; a number is stored as the nearest integer.
using s8 = signed char;
using u8 = unsigned char;
// A float8 number: a sign, 4 exponent bits, 3 fraction bits, and NaN but no infinities (e4m3fn in ONNX).
enum e4m3 : unsigned char {};
// One with 5 exponent bits and 2 fraction bits: the upper byte of an fp16 number (e5m2 in ONNX).
enum e5m2 : unsigned char {};
using u32 = unsigned;
using u64 = unsigned long long;

constexpr float LARGEST = 3.402823466e38f;

// Kernels with fp32 results (PRECISE) keep subnormal numbers, so that the logarithm of a small probability is finite. In
// others, approximations take 2 to 3 instructions less by flushing subnormal operands and results to 0.
#if PRECISE
#define FLUSH ""
#else
#define FLUSH ".ftz"
#endif

__device__ __forceinline__ float exp2_fast(float x) {  // relative error 2^-22
    float y;
    asm("ex2.approx" FLUSH ".f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float exp2_normal(float x) {  // the same; the result must not be subnormal
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal(float x) {  // error of 1 ulp; 0 for infinity
    float y;
    asm("rcp.approx" FLUSH ".f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

constexpr float LOG2_E = 1.442695041f;

// A divisor below 2^31 for numbers below 2^31, passed as a kernel argument; the host computes `multiplier` as
// 2^62 / value + 1. A macro for a size is a Divisor if the size is dynamic, and a number otherwise.
struct Divisor {
    u32 value;
    u64 multiplier;
};

__device__ __forceinline__ u32 operator/(u32 n, Divisor d) {
    return static_cast<u32>(__umul64hi(static_cast<u64>(n) << 2, d.multiplier));
}
__device__ __forceinline__ int operator/(int n, Divisor d) { return static_cast<int>(static_cast<u32>(n) / d); }
__device__ __forceinline__ u32 operator%(u32 n, Divisor d) { return n - n / d * d.value; }
__device__ __forceinline__ int operator%(int n, Divisor d) { return static_cast<int>(static_cast<u32>(n) % d); }

// ---- programmatic dependent launch -------------------------------------------------------------------------------

// A launch with Launch.pdl may start before its predecessor has ended. This function then returns when all earlier
// kernels have ended and their writes are visible; until then, the kernel may read only constants and write nothing. In
// any other launch it returns at once.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Allows the next kernel, if its launch has Launch.pdl, to start once all blocks have called this or ended.
__device__ __forceinline__ void release_successor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// ---- one 32-bit word <-> the one or two floats in it -------------------------------------------------------------

__device__ __forceinline__ void widen(f32, unsigned word, float* to) { to[0] = __uint_as_float(word); }

__device__ __forceinline__ void widen(bf16, unsigned word, float* to) {
    to[0] = __uint_as_float(word << 16);
    to[1] = __uint_as_float(word & 0xffff0000u);
}

__device__ __forceinline__ void widen(f16, unsigned word, float* to) {
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
        : "=f"(to[0]), "=f"(to[1])
        : "r"(word));
}

__device__ __forceinline__ void widen(s8, unsigned word, float* to) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = float(int(word << (24 - 8 * i)) >> 24);
}

__device__ __forceinline__ void widen(u8, unsigned word, float* to) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = float(word >> 8 * i & 0xffu);
}

__device__ __forceinline__ unsigned narrow(f32, const float* from) { return __float_as_uint(from[0]); }

__device__ __forceinline__ unsigned narrow(f16, const float* from) {
    unsigned word;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(from[0]), "f"(from[1]));
#else
    asm("{ .reg .b16 low, high; cvt.rn.f16.f32 low, %1; cvt.rn.f16.f32 high, %2; mov.b32 %0, {low, high}; }"
        : "=r"(word)
        : "f"(from[0]), "f"(from[1]));
#endif
    return word;
}

__device__ __forceinline__ unsigned nearest_bf16(float value) {  // sm_75 has no instruction for this rounding
    const unsigned bits = __float_as_uint(value);
    return value != value ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}

__device__ __forceinline__ unsigned narrow(bf16, const float* from) {
#if __CUDA_ARCH__ >= 800
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(from[0]), "f"(from[1]));
    return word;
#else
    return nearest_bf16(from[0]) | nearest_bf16(from[1]) << 16;
#endif
}

__device__ __forceinline__ unsigned bytes_of(const float* from, int lowest) {
    unsigned word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        word |= (unsigned(min(max(__float2int_rn(from[i]), lowest), lowest + 255)) & 0xffu) << 8 * i;
    return word;
}

__device__ __forceinline__ unsigned narrow(s8, const float* from) { return bytes_of(from, -128); }
__device__ __forceinline__ unsigned narrow(u8, const float* from) { return bytes_of(from, 0); }

// ---- vectors -----------------------------------------------------------------------------------------------------

// N neighbouring elements as stored in memory.
template <class T, int N>
struct Pack {
    static constexpr int BYTES = N * sizeof(T);
    unsigned words[(BYTES + 3) / 4];
};

template <class T, int N>
__device__ __forceinline__ void unpack(const Pack<T, N>& pack, float (&to)[N]) {
    constexpr int EACH = 4 / sizeof(T);
    if constexpr (N < EACH) {
        float all[EACH];
        widen(T(), pack.words[0], all);
#pragma unroll
        for (int i = 0; i < N; ++i) to[i] = all[i];
    } else {
#pragma unroll
        for (int i = 0; i < N / EACH; ++i) widen(T(), pack.words[i], to + i * EACH);
    }
}

template <class T, int N>
__device__ __forceinline__ Pack<T, N> pack(const float (&from)[N]) {
    constexpr int EACH = 4 / sizeof(T);
    Pack<T, N> packed;
    if constexpr (N < EACH) {
        float all[EACH] = {};
#pragma unroll
        for (int i = 0; i < N; ++i) all[i] = from[i];
        packed.words[0] = narrow(T(), all);
    } else {
#pragma unroll
        for (int i = 0; i < N / EACH; ++i) packed.words[i] = narrow(T(), from + i * EACH);
    }
    return packed;
}

// ---- loads and stores --------------------------------------------------------------------------------------------

// The loads are volatile, because the compiler would otherwise move them to their first use.
//   ONCE      no other thread of this kernel reads the data, so it should not evict weights from L1
//   CONSTANT  no kernel writes the data, so the read-only path (.nc) can load it. Other data can still be written by
//             the predecessor when a launch with Launch.pdl starts
enum class Use { ONCE, OFTEN, CONSTANT };

#define LOAD(size, operands, ...)                                                                   \
    if constexpr (USE == Use::ONCE)                                                                 \
        asm volatile("ld.global.L1::no_allocate." size " " operands ";" : __VA_ARGS__ : "l"(from)); \
    else if constexpr (USE == Use::CONSTANT)                                                        \
        asm volatile("ld.global.nc." size " " operands ";" : __VA_ARGS__ : "l"(from));              \
    else asm volatile("ld.global." size " " operands ";" : __VA_ARGS__ : "l"(from))

template <Use USE, int BYTES>
__device__ __forceinline__ void load_bytes(const char* from, unsigned* to) {
    if constexpr (BYTES > 16) {
        load_bytes<USE, 16>(from, to);
        load_bytes<USE, BYTES - 16>(from + 16, to + 4);
    } else if constexpr (BYTES == 16) {
        LOAD("v4.u32", "{%0, %1, %2, %3}, [%4]", "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]));
    } else if constexpr (BYTES == 8) {
        LOAD("v2.u32", "{%0, %1}, [%2]", "=r"(to[0]), "=r"(to[1]));
    } else if constexpr (BYTES == 4) {
        LOAD("u32", "%0, [%1]", "=r"(to[0]));
    } else if constexpr (BYTES == 1) {
        LOAD("u8", "%0, [%1]", "=r"(to[0]));
    } else {
        unsigned short half;
        LOAD("u16", "%0, [%1]", "=h"(half));
        to[0] = half;
    }
}

#undef LOAD

// Outputs stay in L2 for the next operator to read. LEAVING: the outputs are too large to stay, and are evicted first.
#define STORE(size, operands, ...)                                                                       \
    if constexpr (LEAVING) asm volatile("st.global.cs." size " " operands ";" ::__VA_ARGS__ : "memory"); \
    else asm volatile("st.global." size " " operands ";" ::__VA_ARGS__ : "memory")

template <bool LEAVING, int BYTES>
__device__ __forceinline__ void store_bytes(char* to, const unsigned* from) {
    if constexpr (BYTES > 16) {
        store_bytes<LEAVING, 16>(to, from);
        store_bytes<LEAVING, BYTES - 16>(to + 16, from + 4);
    } else if constexpr (BYTES == 16) {
        STORE("v4.u32", "[%0], {%1, %2, %3, %4}", "l"(to), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]));
    } else if constexpr (BYTES == 8) {
        STORE("v2.u32", "[%0], {%1, %2}", "l"(to), "r"(from[0]), "r"(from[1]));
    } else if constexpr (BYTES == 4) {
        STORE("u32", "[%0], %1", "l"(to), "r"(from[0]));
    } else if constexpr (BYTES == 1) {
        STORE("u8", "[%0], %1", "l"(to), "r"(from[0]));
    } else {
        STORE("u16", "[%0], %1", "l"(to), "h"((unsigned short)from[0]));
    }
}

#undef STORE

template <int N, class T>
__device__ __forceinline__ Pack<T, N> load_once(const T* from) {
    Pack<T, N> loaded;
    load_bytes<Use::ONCE, N * sizeof(T)>(reinterpret_cast<const char*>(from), loaded.words);
    return loaded;
}

// Loads data that several rows or threads read; CONSTANT: no kernel writes the data.
template <int N, bool CONSTANT = false, class T>
__device__ __forceinline__ Pack<T, N> load_cached(const T* from) {
    Pack<T, N> loaded;
    constexpr Use USE = CONSTANT ? Use::CONSTANT : Use::OFTEN;
    load_bytes<USE, N * sizeof(T)>(reinterpret_cast<const char*>(from), loaded.words);
    return loaded;
}

template <bool LEAVING, int N, class T>
__device__ __forceinline__ void store_pack(T* to, const Pack<T, N>& packed) {
    store_bytes<LEAVING, N * sizeof(T)>(reinterpret_cast<char*>(to), packed.words);
}

template <bool LEAVING, int N, class T>
__device__ __forceinline__ void store(T* to, const float (&values)[N]) {
    store_pack<LEAVING>(to, pack<T, N>(values));
}

// Calls store_pack with LEAVING equal to `leaving`, which is known at run time only. All threads of a warp must pass
// the same `leaving`.
template <int N, class T>
__device__ __forceinline__ void store_pack_as(bool leaving, T* to, const Pack<T, N>& packed) {
    if (leaving) store_pack<true>(to, packed);
    else store_pack<false>(to, packed);
}

template <int N, class T>
__device__ __forceinline__ void store_as(bool leaving, T* to, const float (&values)[N]) {
    store_pack_as(leaving, to, pack<T, N>(values));
}

// ---- copies to shared memory -------------------------------------------------------------------------------------

// Starts a copy to shared memory; this thread may read the data once wait_for_copies has returned. From sm_80 on,
// copies of 4 bytes or more are asynchronous and take no registers.
template <int BYTES>
__device__ __forceinline__ void copy_bytes(char* to, const char* from) {
#if __CUDA_ARCH__ >= 800
    constexpr bool DIRECT = BYTES == 4 || BYTES == 8 || BYTES >= 16;
#else
    constexpr bool DIRECT = false;
#endif
    if constexpr (!DIRECT) {
        unsigned words[(BYTES + 3) / 4];
        load_bytes<Use::ONCE, BYTES>(from, words);
        if constexpr (BYTES == 2) {
            *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(words[0]);
        } else {
#pragma unroll
            for (int i = 0; i < BYTES / 4; ++i) reinterpret_cast<unsigned*>(to)[i] = words[i];
        }
    } else if constexpr (BYTES > 16) {
        copy_bytes<16>(to, from);
        copy_bytes<BYTES - 16>(to + 16, from + 16);
    } else {
        const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
        if constexpr (BYTES == 16)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
        else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(BYTES) : "memory");
    }
}

template <int N, class T>
__device__ __forceinline__ void copy_to_shared(Pack<T, N>& to, const T* from) {
    copy_bytes<N * sizeof(T)>(reinterpret_cast<char*>(to.words), reinterpret_cast<const char*>(from));
}

__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
