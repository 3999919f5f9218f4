// The types of types.cuh on a CPU, their conversions, and functions of CUDA.
#pragma once
#include <cmath>
#include <cstdlib>
#include <cstring>

using s8 = signed char;
using u8 = unsigned char;
enum e4m3 : unsigned char {};
enum e5m2 : unsigned char {};
using u32 = unsigned;
using u64 = unsigned long long;

// Aligned as on a GPU, so that -fsanitize=alignment stops at accesses through misaligned pointers to them.
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static float2 make_float2(float x, float y) { return {x, y}; }

// The headers of the standard library that declare min and max take long to compile.
template <class A, class B>
constexpr auto min(A a, B b) { return b < a ? b : a; }
template <class A, class B>
constexpr auto max(A a, B b) { return a < b ? b : a; }

struct f32 { u32 bits; };
struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };

constexpr float LARGEST = 3.402823466e38f;
constexpr float LOG2_E = 1.442695041f;

template <class To, class From>
static To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}

static float widened(f32 value) { return bits_as<float>(value.bits); }
static float widened(f16 value) { return float(bits_as<_Float16>(value.bits)); }
static float widened(bf16 value) { return bits_as<float>(u32(value.bits) << 16); }

static int widened(s8 value) { return value; }
static int widened(u8 value) { return value; }
static float widened(e4m3 value) {
    const int exponent = value >> 3 & 15, fraction = value & 7;
    const float size = exponent ? ldexpf(8 + fraction, exponent - 10) : ldexpf(fraction, -9);
    return (value & 127) == 127 ? NAN : value < 128 ? size : -size;
}

static s8 narrowed(s8, float value) { return s8(lrintf(min(max(value, -128.0f), 127.0f))); }
static u8 narrowed(u8, float value) { return u8(lrintf(min(max(value, 0.0f), 255.0f))); }
static f32 narrowed(f32, float value) { return {bits_as<u32>(value)}; }
static f16 narrowed(f16, float value) { return bits_as<f16>(_Float16(value)); }
static bf16 narrowed(bf16, float value) {
    const u32 bits = bits_as<u32>(value);
    return {static_cast<unsigned short>(value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

static void widen(f32, u32 word, float* to) { to[0] = widened(f32{word}); }
static u32 narrow(f32 type, const float* from) { return narrowed(type, from[0]).bits; }

template <class T>
void widen(T, u32 word, float* to) {
    to[0] = widened(T{static_cast<unsigned short>(word)});
    to[1] = widened(T{static_cast<unsigned short>(word >> 16)});
}

template <class T>
u32 narrow(T type, const float* from) {
    return narrowed(type, from[0]).bits | u32(narrowed(type, from[1]).bits) << 16;
}

template <class T, int N>
struct Pack { u32 words[(N * sizeof(T) + 3) / 4]; };

template <class T, int N>
static void unpack(const Pack<T, N>& packed, float (&to)[N]) {
    T values[N];
    memcpy(values, &packed, sizeof(values));
    for (int i = 0; i < N; ++i) to[i] = widened(values[i]);
}

template <class T, int N>
static Pack<T, N> pack(const float (&from)[N]) {
    T values[N];
    for (int i = 0; i < N; ++i) values[i] = narrowed(T(), from[i]);
    Pack<T, N> packed{};
    memcpy(&packed, values, sizeof(values));
    return packed;
}

static void wait_for_predecessor() {}
static void release_successor() {}
static float exp2_fast(float x) { return exp2f(x); }
static float exp2_normal(float x) { return exp2f(x); }
static float reciprocal(float x) { return 1 / x; }
static float rsqrtf(float x) { return 1 / sqrtf(x); }
static float __fmul_rn(float a, float b) { return a * b; }
static double __dmul_rn(double a, double b) { return a * b; }
static float __uint_as_float(u32 bits) { return bits_as<float>(bits); }
static u32 __float_as_uint(float value) { return bits_as<u32>(value); }
