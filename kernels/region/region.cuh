// Functions for the generated kernels of regions: accesses of all dtypes, operators, and accumulators of reductions.
//
//   PRECISE  1: some value is fp32, so activations need fp32 accuracy; 0: all floats are stored in 16 bits
#pragma once
#include "float8.cuh"

#define INFINITE __uint_as_float(0x7f800000u)
#define NOT_A_NUMBER __uint_as_float(0x7fffffffu)
#define ARGUMENT(number) number  // a number that some kernels take as an argument (arguments.py)

template <bool, class Yes, class> struct Either { using Type = Yes; };
template <class Yes, class No> struct Either<false, Yes, No> { using Type = No; };

// ---- loads and stores of N neighbouring elements -----------------------------------------------------------------

template <int N>
__device__ __forceinline__ void load(const f32* from, float (&to)[N]) {
    unpack(load_cached<N>(from), to);
}
template <int N>
__device__ __forceinline__ void load(const f16* from, float (&to)[N]) {
    unpack(load_cached<N>(from), to);
}
template <int N>
__device__ __forceinline__ void load(const bf16* from, float (&to)[N]) {
    unpack(load_cached<N>(from), to);
}

template <class T, int N>
__device__ __forceinline__ void copy_elements(const T* from, T* to) {  // in accesses of up to 16 bytes
    constexpr int BYTES = N * sizeof(T) < 16 ? N * sizeof(T) : 16;
    using Chunk = typename Either<
        BYTES == 16, uint4,
        typename Either<
            BYTES == 8, u64,
            typename Either<BYTES == 4, u32,
                            typename Either<BYTES == 2, unsigned short, unsigned char>::Type>::Type>::Type>::Type;
#pragma unroll
    for (int i = 0; i < int(N * sizeof(T)) / BYTES; ++i)
        reinterpret_cast<Chunk*>(to)[i] = reinterpret_cast<const Chunk*>(from)[i];
}

template <int N, class T>
__device__ __forceinline__ void load(const T* from, T (&to)[N]) {
    alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) T aligned[N];
    copy_elements<T, N>(from, aligned);
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = aligned[i];
}

template <class T>
struct Number {
    using Type = T;
};  // the type in which an element is computed
template <> struct Number<f32> { using Type = float; };
template <> struct Number<f16> { using Type = float; };
template <> struct Number<bf16> { using Type = float; };

template <class T>
__device__ __forceinline__ typename Number<T>::Type load_one(const T* from) {
    typename Number<T>::Type values[1];
    load(from, values);
    return values[0];
}

// Reads a pack of elements without conversion; its address is a multiple of the pack's size, or of 16 for larger packs.
template <class T, int N>
__device__ __forceinline__ Pack<T, N> read_packed(const Pack<T, N>& from) {
    alignas(16) Pack<T, N> found;
    copy_elements<u32, N* int(sizeof(T)) / 4>(from.words, found.words);
    return found;
}
template <class T, int N>
__device__ __forceinline__ void put_packed(T* to, const Pack<T, N>& packed) {
    alignas(16) const Pack<T, N> aligned = packed;
    copy_elements<u32, N* int(sizeof(T)) / 4>(aligned.words, reinterpret_cast<u32*>(to));
}

// Makes one group of all asynchronous copies to shared memory since the last call; wait_for_copies_but waits for whole
// groups.
__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int LATEST>
__device__ __forceinline__ void wait_for_copies_but() {  // waits for all groups of copies except the latest ones
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(LATEST) : "memory");
#endif
}

template <int N>
__device__ __forceinline__ void put(bool leaving, f32* to, const float (&values)[N]) {
    store_as(leaving, to, values);
}
template <int N>
__device__ __forceinline__ void put(bool leaving, f16* to, const float (&values)[N]) {
    store_as(leaving, to, values);
}
template <int N>
__device__ __forceinline__ void put(bool leaving, bf16* to, const float (&values)[N]) {
    store_as(leaving, to, values);
}
template <class T>
__device__ __forceinline__ u32 byte(T value) {
    return static_cast<unsigned char>(value);
}
template <int N, class T>
__device__ __forceinline__ void put(bool, T* to, const T (&values)[N]) {
    if constexpr (sizeof(T) == 1 && N % 4 == 0) {  // packs 4 bytes a word; the compiler would use 64-bit words
        alignas(N < 16 ? N : 16) u32 words[N / 4];
#pragma unroll
        for (int i = 0; i < N; i += 4)
            words[i / 4] = byte(values[i]) | byte(values[i + 1]) << 8 | byte(values[i + 2]) << 16 |
                           byte(values[i + 3]) << 24;
        copy_elements<u32, N / 4>(words, reinterpret_cast<u32*>(to));
    } else {
        alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) T aligned[N];
#pragma unroll
        for (int i = 0; i < N; ++i) aligned[i] = values[i];
        copy_elements<T, N>(aligned, to);
    }
}

template <int N>
__device__ __forceinline__ void put_shared(f32* to, const float (&values)[N]) {
    put_packed(to, pack<f32, N>(values));
}
template <int N>
__device__ __forceinline__ void put_shared(f16* to, const float (&values)[N]) {
    put_packed(to, pack<f16, N>(values));
}
template <int N>
__device__ __forceinline__ void put_shared(bf16* to, const float (&values)[N]) {
    put_packed(to, pack<bf16, N>(values));
}
template <int N, class T>
__device__ __forceinline__ void put_shared(T* to, const T (&values)[N]) {
    put(false, to, values);
}

// Stores the elements of a block of N threads; each thread has COUNT contiguous elements.  Threads exchange chunks of
// CHUNK elements, so that neighbouring threads store neighbouring chunks; the output has `left` chunks from `to` on.
template <int CHUNK, int N, int COUNT, class T>
__device__ __forceinline__ void put_by_block(bool leaving, T* to, const typename Number<T>::Type (&values)[COUNT],
                                             int left, u64* memory) {
    constexpr int EACH_HAS = COUNT / CHUNK;
    T* slots = reinterpret_cast<T*>(memory);  // every ninth slot is unused, so that bank conflicts are few
#pragma unroll
    for (int i = 0; i < EACH_HAS; ++i) {
        typename Number<T>::Type chunk[CHUNK];
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) chunk[j] = values[i * CHUNK + j];
        const int at = threadIdx.x * EACH_HAS + i;
        put_shared(slots + (at + at / 8) * CHUNK, chunk);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH_HAS; ++i) {
        const int at = i * N + threadIdx.x;
        if (at >= left) continue;
        const T* from = slots + (at + at / 8) * CHUNK;
        store_pack_as(leaving, to + at * CHUNK, read_packed(*reinterpret_cast<const Pack<T, CHUNK>*>(from)));
    }
}

template <class T>
__device__ __forceinline__ void put_one(bool leaving, T* to, typename Number<T>::Type value) {
    const typename Number<T>::Type values[1] = {value};
    put(leaving, to, values);
}

// The value rounded to the 16-bit float type T.
template <class T>
__device__ __forceinline__ float rounded(float value) {
    const float before[1] = {value};
    float after[1];
    unpack(pack<T, 1>(before), after);
    return after[0];
}

// ---- operators ---------------------------------------------------------------------------------------------------

// Maximum and minimum; if one input is NaN, so is the result.
template <class T>
__device__ __forceinline__ T larger(T a, T b) {
    return a > b || a != a ? a : b;
}
template <class T>
__device__ __forceinline__ T smaller(T a, T b) {
    return a < b || a != a ? a : b;
}

#if __CUDA_ARCH__ >= 800
template <>
__device__ __forceinline__ float larger(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
template <>
__device__ __forceinline__ float smaller(float a, float b) {
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
#endif
#if __CUDA_ARCH__ >= 900
// The variants for int compare unsigned words, because ptxas of CUDA 13.0 loses the minus in max(max(a, -b), c) of
// signed words, for which it emits VIMNMX3.
constexpr u32 SIGN = 0x80000000u;
template <>
__device__ __forceinline__ int larger(int a, int b) {
    u32 y;
    asm("max.u32 %0, %1, %2;" : "=r"(y) : "r"(u32(a) ^ SIGN), "r"(u32(b) ^ SIGN));
    return int(y ^ SIGN);
}
template <>
__device__ __forceinline__ int smaller(int a, int b) {
    u32 y;
    asm("min.u32 %0, %1, %2;" : "=r"(y) : "r"(u32(a) ^ SIGN), "r"(u32(b) ^ SIGN));
    return int(y ^ SIGN);
}
#endif

// The rounded product; the compiler must not contract it with an addition into an FMA.
__device__ __forceinline__ float product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double product(double a, double b) { return __dmul_rn(a, b); }

// Approximations within 2 units in the last place. They take 3 to 4 instructions; a correctly rounded result takes
// about 12 and a branch. Inputs of discontinuous operators are correctly rounded instead.
__device__ __forceinline__ float quotient(float a, float b) {
#if __CUDA_ARCH__ >= 750
    float y;
    asm("div.full" FLUSH ".f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
#else
    return a / b;
#endif
}
__device__ __forceinline__ double quotient(double a, double b) { return a / b; }

// The nearest quotient, or in rare cases an adjacent number; exact if the quotient is representable. The code has no
// branch, and the part that depends only on b is computed once for many a.
__device__ __forceinline__ float nearest_quotient(float a, float b) {
#if __CUDA_ARCH__ >= 750
    const float near = reciprocal(b), size = fabsf(b);
    const bool is_normal = size > 1e-18f && size < 1e18f;
    const float inverse = is_normal ? fmaf(fmaf(-b, near, 1.0f), near, near) : near;
    const float q = a * inverse, better = fmaf(fmaf(-b, q, a), inverse, q);
    return is_normal && fabsf(q) < LARGEST ? better : q;
#else
    return a / b;
#endif
}
__device__ __forceinline__ double nearest_quotient(double a, double b) { return a / b; }

// The nearest quotient by a number whose reciprocal is known; number and reciprocal must neither over- nor underflow.
__device__ __forceinline__ float divided(float a, float by, float inverse) {
    const float q = a * inverse, better = fmaf(fmaf(-by, q, a), inverse, q);
    return fabsf(q) < LARGEST ? better : q;
}
__device__ __forceinline__ float root(float x) {  // approximates the square root within 1 unit in the last place
#if __CUDA_ARCH__ >= 750
    float y;
    asm("sqrt.approx" FLUSH ".f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return sqrtf(x);
#endif
}
__device__ __forceinline__ double root(double x) { return sqrt(x); }

__device__ __forceinline__ float exponential(float x) { return exp2_fast(LOG2_E * x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }

// The logarithm within 6e-7: near 1 by a series in (x - 1) / (x + 1), elsewhere by the hardware's log2.
__device__ __forceinline__ float logarithm(float x) {
#if __CUDA_ARCH__ >= 750
    float y;
    asm("lg2.approx" FLUSH ".f32 %0, %1;" : "=f"(y) : "f"(x));
    const float t = (x - 1.0f) * reciprocal(x + 1.0f), s = t * t;
    const float near = t * fmaf(s, fmaf(s, fmaf(s, 0.2857142857f, 0.4f), 0.6666666667f), 2.0f);
    return x > 0.72f && x < 1.39f ? near : 0.6931471806f * y;
#else
    return logf(x);
#endif
}
__device__ __forceinline__ double logarithm(double x) { return log(x); }

// A reduced angle: a remainder from -pi/4 to pi/4, and a number of quarter turns whose last two bits matter.
// Sin and Cos of one angle share it. For every float, both are within 1.53 units in the last place.
struct Angle {
    float rest;
    u32 quarters;
};

// Reduces an angle above 71476 by a multiplication with 2 / pi in 64 bits (Payne and Hanek). It is not inlined, because
// few angles need it and each lane would repeat its 60 instructions. Kernels with wgmma must inline all functions.
#ifdef HAS_PROGRAM
__device__ __forceinline__
#else
__device__ __noinline__
#endif
    Angle far_angle(float x) {
    constexpr u32 DIGITS[] = {// digits of 2 / pi
                              0u, 0x28be60dbu, 0x9391054au, 0x7f09d5f4u, 0x7d4d3770u, 0x36d8a566u, 0x4f10e410u};
    const u32 bits = __float_as_uint(x), exponent = (bits >> 23 & 0xff) - 126;
    const u32 from = exponent / 32, shift = exponent % 32;
    u32 digits[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        const u64 both = u64(DIGITS[from + i]) << 32 | DIGITS[from + i + 1];
        digits[i] = u32(both << shift >> 32);
    }
    const u64 size = bits << 8 | 0x80000000u;
    const u64 product = (size * digits[0] << 32) + size * digits[1] + (size * digits[2] >> 32);
    const long long rest = (long long)(product << 2) >> 2;
    const u32 quarters = u32(product >> 62) + (rest < 0);
    const float left = float(double(rest) * 3.4061215800304798e-19);  // pi / 2 / 2^62
    if ((bits & 0x7f800000u) == 0x7f800000u) return {NOT_A_NUMBER, 0};
    return x < 0.0f ? Angle{-left, 0 - quarters} : Angle{left, quarters};
}
__device__ __forceinline__ Angle angle(float x) {
    if (fabsf(x) > 71476.0f) return far_angle(x);
    const float shifted = fmaf(x, 0.636619747f, 12582912.0f), turns = shifted - 12582912.0f;
    const float rest = fmaf(turns, -3.13916473e-07f, fmaf(turns, -1.57079601f, x));
    return {fmaf(turns, -5.39030253e-15f, rest), __float_as_uint(shifted)};
}
__device__ __forceinline__ float sine(Angle x) {
    const bool is_cosine = x.quarters & 1;
    const float square = x.rest * x.rest, one = is_cosine ? 1.0f : x.rest;
    float p = is_cosine ? fmaf(2.44331571e-5f, square, -1.38873162e-3f) : -1.95152959e-4f;
    p = fmaf(p, square, is_cosine ? 4.16666456e-2f : 8.33216087e-3f);
    p = fmaf(p, square, is_cosine ? -0.5f : -1.66666546e-1f);
    const float y = fmaf(p, fmaf(square, one, 0.0f), one);
    return x.quarters & 2 ? -y : y;
}
__device__ __forceinline__ float cosine(Angle x) { return sine({x.rest, x.quarters + 1}); }

// 1.5 * 2^23: the last bits of ROUNDER + x, for a small x, are the integer nearest to x.
constexpr float ROUNDER = 12582912.0f;

// Converts an integer to float. If the compiler knew that 16 bits hold it, it would use an instruction that runs at a
// quarter of the rate.
__device__ __forceinline__ float converted(int x) {
#if __CUDA_ARCH__ >= 750
    return __int2float_rn(x);
#else
    return float(x);
#endif
}

template <class T>
__device__ __forceinline__ T integer_in(float sum_with_rounder, int zero) {
    return T(int(__float_as_uint(sum_with_rounder)) + zero);
}

// The lowest number of an integer type of 8 or 16 bits, and the number of steps to its highest number.
template <class T>
constexpr int STEPS_OF = sizeof(T) == 1 ? 255 : 65535;
template <class T>
__device__ __forceinline__ constexpr int lowest() {
    return T(-1) < T(0) ? -(STEPS_OF<T> + 1) / 2 : 0;
}

// The sum of 2^23 and an integer of 8 bits, counted from the lowest one: a mask gives it, so that a subtraction takes the
// place of a conversion.
template <class T>
__device__ __forceinline__ float byte_number(T x) {
    return __uint_as_float(0x4b000000u | (unsigned char)(x - lowest<T>()));
}

// Rounds x to the nearest integer k for which T holds k + zero, and returns ROUNDER + k. As for QuantizeLinear, ties are
// rounded to even; as on onnxruntime's CPU provider, NaN becomes the lowest integer.
template <class T>
__device__ __forceinline__ float step_of(float x, int zero) {
    const int low = lowest<T>() - zero;
    return fminf(fmaxf(x, float(low)), float(low + STEPS_OF<T>)) + ROUNDER;
}

// The nearest float8 number; ties are rounded to even, and numbers beyond 448 become 448. NaN stays NaN.
__device__ __forceinline__ e4m3 nearest_e4m3(float x) {
#if __CUDA_ARCH__ >= 890
    unsigned short two;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(0.0f), "f"(x));
    return e4m3(two);
#else
    const u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80u;
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return e4m3(sign | (is_nan ? 0x7fu : float8_bits(fminf(fabsf(x), 448.0f))));
#endif
}

// The same for e5m2, whose largest finite number is 57344.
__device__ __forceinline__ e5m2 nearest_e5m2(float x) {
#if __CUDA_ARCH__ >= 890
    unsigned short two;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(two) : "f"(0.0f), "f"(x));
    return e5m2(two);
#else
    const u32 sign = __float_as_uint(x) >> 24 & 0x80u;
    if (x != x) return e5m2(sign | 0x7fu);
    const float size = fminf(fabsf(x), 57344.0f);
    // The last bits of 2^7 + size, for a size below 2^-14, are the nearest multiple of 2^-16, the smallest number.
    if (size < 0x1p-14f) return e5m2(sign | (__float_as_uint(size + 128.0f) & 7u));
    const u32 kept = __float_as_uint(size) - (112u << 23);
    return e5m2(sign | (kept + 0xfffffu + (kept >> 21 & 1u)) >> 21);
#endif
}

// Quantizes x to 8 bits: returns ROUNDER + k, whose last byte is that of the nearest integer. x * factor + offset is the
// place of x between the lowest integer, 0, and the highest, 1; NaN becomes the lowest. Clamping to these two costs no
// instruction, but the place has an error of 2^-23, or 3e-5 steps.
template <class T>
__device__ __forceinline__ float step_in(float x, float factor, float offset) {
    static_assert(STEPS_OF<T> == 255);
#if __CUDA_ARCH__ >= 750
    float place;
    asm("fma.rn.ftz.sat.f32 %0, %1, %2, %3;" : "=f"(place) : "f"(x), "f"(factor), "f"(offset));
#else
    const float place = fminf(fmaxf(fmaf(x, factor, offset), 0.0f), 1.0f);
#endif
    return fmaf(place, 255.0f, ROUNDER - float(lowest<T>()));
}

// The same for a / scale. If CORRECT, the quotient is rounded correctly: the reciprocal, which is computed once for a
// scale, takes a step of Newton's method, and the quotient another. If the reciprocal kept its error of 1 unit in the
// last place, some quotients just beside a tie would be rounded to it. Otherwise the quotient is within 2 units. If a
// scale is near an end of float's range, a and scale are first multiplied by a power of two. Quotients by a scale of 0
// or infinity are products with its reciprocal: 0 / 0 is NaN.
template <class T, bool CORRECT>
__device__ __forceinline__ float step_of(float a, float scale, int zero) {
    constexpr float UPWARD = 1329227995784915872903807060280344576.0f;  // 2^120
    const float size = fabsf(scale);
    const bool has_quotients = size > 0.0f && size <= LARGEST;
    const float moved = size > 1e18f ? 1.0f / UPWARD : size < 1e-18f ? UPWARD : 1.0f;
    const float factor = has_quotients ? copysignf(moved, scale) : reciprocal(scale);
    const float b = has_quotients ? size * moved : 1.0f;
    // Quotients are clamped to a quarter beyond the range's ends, and later rounded to these ends.
    const int lowest_quotient = lowest<T>() - zero;
    const float low = (float(lowest_quotient) - 0.25f) * b, high = (float(lowest_quotient + STEPS_OF<T>) + 0.25f) * b;
    a = fminf(fmaxf(factor == 1.0f ? a : a * factor, low), high);
    float inverse = reciprocal(b);
    if constexpr (!CORRECT) return fmaf(a, inverse, ROUNDER);
    inverse = fmaf(fmaf(-inverse, b, 1.0f), inverse, inverse);
    const float y = a * inverse;
    return fmaf(fmaf(-y, b, a), inverse, y) + ROUNDER;
}

template <class T>
__device__ __forceinline__ T sign(T x) {
    return x > T(0) ? T(1) : x < T(0) ? T(-1) : x == x ? T(0) : x;
}

// A shift by at least as many bits as the type has gives 0.
__device__ __forceinline__ unsigned char shifted_left(unsigned char x, unsigned char by) {
    return by < 8 ? x << by : 0;
}
__device__ __forceinline__ unsigned char shifted_right(unsigned char x, unsigned char by) {
    return by < 8 ? x >> by : 0;
}

template <class T>
__device__ __forceinline__ T magnitude(T x) {
    return x < T(0) ? T(-x) : x;
}
__device__ __forceinline__ float magnitude(float x) { return fabsf(x); }
__device__ __forceinline__ double magnitude(double x) { return fabs(x); }

// The remainder with the sign of the divisor.
template <class T>
__device__ __forceinline__ T modulo(T a, T b) {
    const T rest = a % b;
    return rest != 0 && (rest < 0) != (b < 0) ? T(rest + b) : rest;
}

// 64-bit numbers that fit into 32 bits are divided in 32 bits. The compiler does this too, but
// only if neither is negative.
template <>
__device__ __forceinline__ long long modulo(long long a, long long b) {
    const u64 x = a < 0 ? 0 - u64(a) : u64(a), y = b < 0 ? 0 - u64(b) : u64(b);
    const u64 size = (x | y) >> 32 ? x % y : u64(u32(x) % u32(y));
    const long long rest = a < 0 ? -(long long)(size) : (long long)(size);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

// x to the power of TWICE / 2. As in pow, the square root of a negative number is NaN, but of -inf it is inf, and of -0
// it is 0.
template <int TWICE, class T>
__device__ __forceinline__ T power(T x) {
    if constexpr (TWICE < 0 && TWICE % 2 == 0) {
        return power<-TWICE>(quotient(T(1), x));
    } else if constexpr (TWICE % 2 != 0) {
        const float size = fabsf(x), one = TWICE < 0 ? rsqrtf(size) : root(size);
        const float y = TWICE < 0 ? one * power<-TWICE - 1>(one * one) : one * power<TWICE - 1>(size);
        return x < 0.0f && x >= -LARGEST ? NOT_A_NUMBER : y;
    } else if constexpr (TWICE == 0) {
        return T(1);
    } else if constexpr (TWICE % 4 == 0) {
        const T half = power<TWICE / 2>(x);
        return half * half;
    } else {
        return x * power<TWICE - 2>(x);
    }
}

template <class T>
__device__ __forceinline__ T power_of_integer(T base, double exponent) {
    return T(pow(double(base), exponent));
}

template <class T>
__device__ __forceinline__ T selu(T x, T alpha, T gamma) {
    return gamma * (x > T(0) ? x : alpha * T(expm1(x)));
}

// Returns an index of Gather, from -size to size - 1, as an index >= 0. Other indices, which are errors in the model,
// are clamped.
template <class T>
__device__ __forceinline__ T gathered(T at, T size) {
    if (at < 0) at += size;
    return at < 0 ? T(0) : at >= size ? T(size - 1) : at;
}

// The source index of reflect padding for an index before the first or after the last of `size` elements.
template <class T>
__device__ __forceinline__ T reflected(T at, T size) {
    if (size == 1) return 0;
    const T period = 2 * (size - 1), rest = modulo<T>(at, period);
    return rest < size ? rest : period - rest;
}
template <class T>
__device__ __forceinline__ T nearest(T at, T size) {
    return at < 0 ? T(0) : at >= size ? T(size - 1) : at;
}

#include "extreme.cuh"

#ifndef HAS_PROGRAM  // an epilogue's program has no other reductions, and its indices have 32 bits
// ---- quotients and remainders by sizes that are arguments, of numbers below 2^62 ----------------------------------

// The 64-bit variant of Divisor in types.cuh; `multiplier` is 2^62 / value + 1, so quotients are at most 1 too large.
struct WideDivisor { u64 value, multiplier; };

__device__ __forceinline__ long long operator/(long long n, WideDivisor d) {
    const u64 quotient = __umul64hi(u64(n) << 2, d.multiplier);
    return (long long)(quotient - (quotient * d.value > u64(n)));
}
__device__ __forceinline__ long long operator%(long long n, WideDivisor d) { return n - n / d * (long long)(d.value); }

// ---- accumulators ------------------------------------------------------------------------------------------------

// The sum clamped to int32, as in onnxruntime.
__device__ __forceinline__ int saturated(long long x) {
    return int(smaller<long long>(larger<long long>(x, -2147483647 - 1), 2147483647));
}

template <class T>
struct Sum {
    T total = T(0);
    __device__ __forceinline__ void add(T x) { total += x; }
    __device__ __forceinline__ void merge(const Sum& other) { total += other.total; }
};

template <class T>
struct Prod {
    T total = T(1);
    __device__ __forceinline__ void add(T x) { total *= x; }
    __device__ __forceinline__ void merge(const Prod& other) { total *= other.total; }
};

template <class T> struct Lowest;
template <> struct Lowest<float> {
    static __device__ __forceinline__ float value() { return -INFINITE; }
};
template <> struct Lowest<double> {
    static __device__ __forceinline__ double value() { return -INFINITE; }
};
template <> struct Lowest<int> {
    static __device__ __forceinline__ int value() { return -2147483647 - 1; }
};
template <> struct Lowest<long long> {
    static __device__ __forceinline__ long long value() { return -9223372036854775807ll - 1; }
};
template <class T>
struct Highest {
    static __device__ __forceinline__ T value() { return T(-1) - Lowest<T>::value(); }
};
template <> struct Highest<float> {
    static __device__ __forceinline__ float value() { return INFINITE; }
};
template <> struct Highest<double> {
    static __device__ __forceinline__ double value() { return INFINITE; }
};

template <class T>
struct Max {
    T total = Lowest<T>::value();
    __device__ __forceinline__ void add(T x) { total = larger(total, x); }
    __device__ __forceinline__ void merge(const Max& other) { add(other.total); }
};

template <class T>
struct Min {
    T total = Highest<T>::value();
    __device__ __forceinline__ void add(T x) { total = smaller(total, x); }
    __device__ __forceinline__ void merge(const Min& other) { add(other.total); }
};

// The maximum of numbers and the sum of exp(x - maximum), in one pass with one exponential per number. `top` is finite
// even if all numbers are -inf, and the sum is NaN if a number is inf or NaN.
template <class T>
struct Online {
    T top = T(-LARGEST), sum = T(0);
    __device__ __forceinline__ void add(T x) {
        const T distance = x - top, factor = exponential(distance > T(0) ? -distance : distance);
        sum = distance > T(0) ? sum * factor + (T(1) + (x - x)) : sum + factor;
        top = distance > T(0) ? x : top;
    }
    template <int N>
    __device__ __forceinline__ void add(const T (&x)[N]) {  // rescales the sum only once
        T largest = top;
#pragma unroll
        for (int i = 0; i < N; ++i) largest = larger(x[i], largest);
        T own = T(0);
#pragma unroll
        for (int i = 0; i < N; ++i) own += exponential(x[i] - largest);
        sum = sum * exponential(top - largest) + own;
        top = largest;
    }
    __device__ __forceinline__ void merge(const Online& other) {
        const T both = larger(top, other.top);
        sum = sum * exponential(top - both) + other.sum * exponential(other.top - both);
        top = both;
    }
};

template <class A, int THREADS>
__device__ __forceinline__ void merge_block(A& own, u64* memory) {
    A* slots = reinterpret_cast<A*>(memory);
    merge_warp(own);
    __syncthreads();  // the slots may still be read for another reduction
    if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = own;
    __syncthreads();
    own = slots[0];
#pragma unroll
    for (int i = 1; i < THREADS / 32; ++i) own.merge(slots[i]);
}

// Merges the accumulators of columns in a fixed order; each thread has the partial results of WIDTH columns.
template <class A, int WIDTH, int COLUMNS, int PARTS>
__device__ __forceinline__ void merge_columns(A* own, u64* memory, int column, int part) {
    A* slots = reinterpret_cast<A*>(memory) + column;
    __syncthreads();  // the slots may still be read for another reduction
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) slots[(part * WIDTH + j) * COLUMNS] = own[j];
    __syncthreads();
    for (int j = part; j < WIDTH; j += PARTS) {
        A total = slots[j * COLUMNS];
#pragma unroll
        for (int i = 1; i < PARTS; ++i) total.merge(slots[(i * WIDTH + j) * COLUMNS]);
        slots[j * COLUMNS] = total;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) own[j] = slots[j * COLUMNS];
}

// ---- accumulators in scratch memory, one for each block that shared a row ----------------------------------------

// Merges the accumulators of a row: the first one is at index `first`, each next one `step` further.
template <class A>
__device__ __forceinline__ A stored(const u64* memory, long long first, long long step, int shares) {
    const A* from = reinterpret_cast<const A*>(memory) + first;
    A own = from[0];
#pragma unroll 16
    for (int i = 1; i < shares; ++i) own.merge(from[i * step]);
    return own;
}

template <class A, int THREADS>
__device__ __forceinline__ A stored_by_block(const u64* memory, int shares, u64* slots) {
    A own;
#pragma unroll 4
    for (int i = threadIdx.x; i < shares; i += THREADS) own.merge(reinterpret_cast<const A*>(memory)[i]);
    merge_block<A, THREADS>(own, slots);
    return own;
}

template <class A>
__device__ __forceinline__ A stored_by_warp(const u64* memory, long long row, int shares, int lane) {
    A own;
#pragma unroll 4
    for (int i = lane; i < shares; i += 32) own.merge(reinterpret_cast<const A*>(memory)[row * shares + i]);
    merge_warp(own);
    return own;
}
#endif
