// y = x + sin(alpha * x)^2 * gain, or / gain with QUOTIENT, for x (batch, CHANNELS, length) and alpha and gain of
// CHANNELS elements. With CHANNELS_LAST, x is (pixels, CHANNELS), and `length` is 1.
//
// The kernel moves each element of x and y once and computes in fp32; alpha and gain come from L1. Vectors may cross
// the end of a row, so that rows of any length are read at full width. elementwise.cuh, which onnxfuse brings, divides
// the elements among threads.
#include "types.cuh"
#include "elementwise.cuh"

// Return sin(z)^2, whose period is pi.
__device__ __forceinline__ float squared_sine(float z) {
    if constexpr (PRECISE) {
        const float sine = sinf(z);
        return sine * sine;
    }
    // For an output of 16 bits the hardware's sine is enough, whose absolute error is 2^-21 from -pi to pi. The nearest
    // multiple of pi is taken off z, in two parts; more than pi is left only of a z beyond 2^22, whose sine could be
    // any number.
    const float turns = rintf(z * 0.318309886f);
    const float rest = fmaf(turns, 8.74227766e-8f, fmaf(turns, -3.14159274f, z));
    const float sine = __sinf(fabsf(rest) > 3.14159274f ? 3.14159274f : rest);  // NaN stays
    return sine * sine;
}

// Load the values of the channels of W neighbouring elements of x.
template <int W, class T>
__device__ __forceinline__ void load_by_channel(const T* from, INDEX at, INDEX length, float (&values)[W]) {
    if constexpr (CHANNELS_LAST && CHANNELS % W == 0) {
        unpack(load_cached<W>(from + at % CHANNELS), values);
    } else {
        const INDEX row = at / length;
        unsigned channel = unsigned(row % CHANNELS);
        INDEX left = length - (at - row * length);  // elements of this row from here on
        float value[1];
        unpack(load_cached<1>(from + channel), value);
#pragma unroll
        for (int i = 0; i < W; ++i) {
            if (left == 0) {
                channel = channel + 1 == CHANNELS ? 0 : channel + 1;
                unpack(load_cached<1>(from + channel), value);
                left = length;
            }
            values[i] = value[0];
            --left;
        }
    }
}

struct Snake {
    template <int W>
    struct Raw {
        Pack<X_T, W> x;
        float alpha[W], gain[W];
    };

    const X_T* x;
    const ALPHA_T* alpha;
    const GAIN_T* gain;
    Y_T* y;
    INDEX length;
    bool streamed;

    template <int W>
    __device__ __forceinline__ Raw<W> fetch(INDEX at) const {
        Raw<W> raw;
        raw.x = load_once<W>(x + at);
        load_by_channel(alpha, at, length, raw.alpha);
        load_by_channel(gain, at, length, raw.gain);
        return raw;
    }

    template <int W>
    __device__ __forceinline__ void finish(INDEX at, const Raw<W>& raw) const {
        float values[W];
        unpack(raw.x, values);
#pragma unroll
        for (int i = 0; i < W; ++i) {
            const float wave = squared_sine(raw.alpha[i] * values[i]);
            values[i] = QUOTIENT ? values[i] + __fdiv_rn(wave, raw.gain[i]) : fmaf(wave, raw.gain[i], values[i]);
        }
        store_as(streamed, y + at, values);
    }
};

ELEMENT_KERNEL snake(const X_T* x, const ALPHA_T* alpha, const GAIN_T* gain, Y_T* y, long long length,
                     long long count) {
    each_element(Snake{x, alpha, gain, y, INDEX(length), STREAMED}, INDEX(count));
}
