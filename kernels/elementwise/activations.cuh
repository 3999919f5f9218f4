// The activation functions of onnxfuse/activations.py, in fp32, as accurate as the storage type of the result can show.
//
//   PRECISE  1: results are stored as fp32; 0: results are stored in 16 bits
//
// A NaN stays a NaN, and an infinity gives the result of the function's formula. Costs matter: while an H200 reads and
// writes fp16 at 4 TB/s, it can run about 28 instructions per element. With more, arithmetic is the limit, not memory.
#pragma once

namespace activate {

__device__ __forceinline__ float none(float x, float, float) { return x; }

// max(x, 0); fmaxf would return 0 for a NaN.
__device__ __forceinline__ float positive(float x) {
#if __CUDA_ARCH__ >= 800
    asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(x));
    return x;
#else
    return x < 0.0f ? 0.0f : x;
#endif
}

__device__ __forceinline__ float relu(float x, float, float) { return positive(x); }

__device__ __forceinline__ float sigmoid(float x, float, float) { return reciprocal(1.0f + exp2_fast(-LOG2_E * x)); }

__device__ __forceinline__ float silu(float x, float, float) { return x * reciprocal(1.0f + exp2_fast(-LOG2_E * x)); }

__device__ __forceinline__ float quick_gelu(float x, float, float) {
    return x * reciprocal(1.0f + exp2_fast(-1.702f * LOG2_E * x));
}

// x Phi(x) = max(x, 0) - |x| Q(|x|), where Q(u) = erfc(u / sqrt 2) / 2 keeps its relative accuracy for large u, unlike
// 1 + erf (at x = -4 the textbook form in fp32 is off by 1e-3).
__device__ __forceinline__ float gelu_from_tail(float x, float u, float tail) { return fmaf(-u, tail, positive(x)); }

// For 16-bit results: log2 Q as a polynomial. Its relative error is 2e-5 for x > -5.7, below which the result
// underflows in fp16, and 7e-4 down to -9.
__device__ __forceinline__ float gelu_16(float x) {
    const float u = fminf(fabsf(x), 9.0f);
    float p = -1.30570254e-06f;
    p = fmaf(p, u, 4.96352913e-05f);
    p = fmaf(p, u, -8.24523566e-04f);
    p = fmaf(p, u, 8.04241467e-03f);
    p = fmaf(p, u, -5.29083051e-02f);
    p = fmaf(p, u, -4.59605426e-01f);
    p = fmaf(p, u, -1.15077603e+00f);
    p = fmaf(p, u, -1.00003040e+00f);
    return gelu_from_tail(x, u, exp2_normal(p));
}

// For fp32 results: Q(u) = exp(-u^2 / 2) P(1 / (1 + 0.225 u)), fitted to a relative error of 5e-8. With rounding the
// error is 7e-7 for x > -3, and 2e-6 down to -5, where the result is 1e-6.
__device__ __forceinline__ float gelu_32(float x) {
    const float u = fminf(fabsf(x), 13.0f);
    const float t = reciprocal(fmaf(0.225f, u, 1.0f));
    float p = -9.28687751e-02f;
    p = fmaf(p, t, 3.80768657e-01f);
    p = fmaf(p, t, -4.40230340e-01f);
    p = fmaf(p, t, 4.61327165e-01f);
    p = fmaf(p, t, -1.29370093e-01f);
    p = fmaf(p, t, 1.53376967e-01f);
    p = fmaf(p, t, 7.56633431e-02f);
    p = fmaf(p, t, 9.14172977e-02f);
    p = fmaf(p, t, -8.41813890e-05f);
    return gelu_from_tail(x, u, p * exp2_fast(-0.5f * LOG2_E * u * u));
}

__device__ __forceinline__ float gelu(float x, float, float) { return PRECISE ? gelu_32(x) : gelu_16(x); }

// (1 + tanh z) / 2 = sigmoid(2 z), which does not cancel where tanh is near -1.
__device__ __forceinline__ float gelu_tanh(float x, float, float) {
    const float z = x * fmaf(0.044715f * 0.7978845608f, x * x, 0.7978845608f);
    return x * reciprocal(1.0f + exp2_fast(-2.0f * LOG2_E * z));
}

__device__ __forceinline__ float hard_swish(float x, float, float) {
    const float gate = fmaf(x, 1.0f / 6.0f, 0.5f);
    return x * (gate < 0.0f ? 0.0f : gate > 1.0f ? 1.0f : gate);
}

__device__ __forceinline__ float scaled_hard_swish(float x, float alpha, float beta) {
    const float gate = fmaf(alpha, x, beta);
    return x * (gate < 0.0f ? 0.0f : gate > 1.0f ? 1.0f : gate);
}

// tanh(log(1 + e)) = n / (n + 2) with n = e (e + 2), which does not cancel. For x above 20 this quotient is 1.
__device__ __forceinline__ float mish(float x, float, float) {
    const float e = exp2_fast(LOG2_E * fminf(x, 20.0f));
    const float n = e * (e + 2.0f);
    return x != x ? x : x * (n * reciprocal(n + 2.0f));
}

// For 16-bit results: x itself near 0, and elsewhere 1 - 2 / (1 + exp(2 x)) with an error of 2e-7. The relative error
// is at most 4e-5.
__device__ __forceinline__ float tanh_16(float x) {
    const float y = fmaf(-2.0f, reciprocal(1.0f + exp2_fast(2.0f * LOG2_E * x)), 1.0f);
    return fabsf(x) < 0.01f ? x : y;
}

__device__ __forceinline__ float tanh(float x, float, float) { return PRECISE ? tanhf(x) : tanh_16(x); }

__device__ __forceinline__ float softplus(float x, float, float) {
    return positive(x) + log1pf(exp2_fast(-LOG2_E * fabsf(x)));
}

__device__ __forceinline__ float clip(float x, float alpha, float beta) {
    const float y = x < alpha ? alpha : x;
    return y > beta ? beta : y;
}

__device__ __forceinline__ float leaky_relu(float x, float alpha, float) { return x < 0.0f ? alpha * x : x; }

__device__ __forceinline__ float elu(float x, float alpha, float) { return x < 0.0f ? alpha * expm1f(x) : x; }

__device__ __forceinline__ float hard_sigmoid(float x, float alpha, float beta) {
    const float y = fmaf(alpha, x, beta);
    return y < 0.0f ? 0.0f : y > 1.0f ? 1.0f : y;
}

}  // namespace activate
