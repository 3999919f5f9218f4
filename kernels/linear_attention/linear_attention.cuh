// Sizes, scratch memory and fragments of both kernels of linear attention by chunks of tokens.
//
// Within a chunk, b is the sum of the logarithms of decays up to a token. The new rows u of a chunk after a state S are
//
//     u = T diag(beta) (v - diag(exp(b)) K S),  T = (I + A)^-1,  A[t][j] = beta[t] exp(b[t] - b[j]) k[t] k[j] for j < t
//
// or u = v without beta, so that y = scale (diag(exp(b)) Q S + P u), where P[t][j] = exp(b[t] - b[j]) q[t] k[j] for
// j <= t, and S becomes exp(b[last]) S + K^T diag(exp(b[last] - b)) u (Yang et al. 2024, arXiv:2412.06464).
//
// linear_attention_chunks.cu computes for all chunks at once the tensors that do not depend on S:
//   rows      (states, chunks, VALUE_SIZE, CHUNK) of T: (T diag(beta) v)^T, or v^T
//   weights   (states, chunks, SIZE, CHUNK) of T: (-T diag(beta exp(b)) K)^T
//   scores    (results, chunks, CHUNK, CHUNK) of T: P
//   factors   (states, chunks, CHUNK, 2): exp(b), exp(b[last] - b)
// where `states` counts batches and heads of states, and `results` batches and heads of results.
//
// Macros: T, GATE_T, SIZE, VALUE_SIZE, STATE_HEADS, Q_HEADS, K_HEADS, HEADS, BETA, and DECAY of 0 or 1, as in
// linear_attention_tokens.cu.
#pragma once
#include "gemm_multiply.cuh"

constexpr int CHUNK = 64;
constexpr int PITCH = 2 * SIZE + 16, TOKEN_PITCH = 2 * CHUNK + 16;  // bytes of rows in shared memory: no bank conflicts
constexpr int GROUP = HEADS / STATE_HEADS;                          // heads of results that read one state

__device__ __forceinline__ char* shared_memory() {
    extern __shared__ __align__(128) char memory[];
    return memory;
}

template <class T>
__device__ __forceinline__ float element(const T* from) {
    float value[1];
    unpack(load_cached<1>(from), value);
    return value[0];
}
__device__ __forceinline__ float exponential(float x) { return exp2_fast(x * LOG2_E); }

struct Operands {
    const T *query, *key, *value;
    const GATE_T *decay, *beta;
};
struct Scratch {
    T *rows, *weights, *scores;
    f32* factors;
};

// Copies tokens of one head to shared memory, 64 rows of COLUMNS elements; rows from `count` on become 0.
template <int COLUMNS, int ROW_BYTES, int THREADS>
__device__ __forceinline__ void copy_rows(u32 to, const T* from, int stride, int count) {
    constexpr int PARTS = COLUMNS / 8;
    for (int i = threadIdx.x; i < CHUNK * PARTS; i += THREADS) {
        const int row = i / PARTS, part = i % PARTS;
        const bool inside = row < count;
        copy_async<16>(to + row * ROW_BYTES + part * 16,
                       reinterpret_cast<const char*>(from + (inside ? (i64)row * stride + part * 8 : 0)),
                       inside ? 16 : 0);
    }
}

// The words of two 16 x 8 operands B, from 16 rows of 16 elements.
__device__ __forceinline__ void load_right(u32 (&b)[4], u32 tile, int pitch, int step, int column) {
    const int lane = threadIdx.x % 32;
    load_matrices<true>(b, tile + (step * 16 + lane / 8 % 2 * 8 + lane % 8) * pitch + column * 2 + lane / 16 * 16);
}
// The words of a 16 x 16 operand A, from 16 rows of 16 elements.
__device__ __forceinline__ void load_left(u32 (&a)[4], u32 tile, int pitch, int row, int step) {
    const int lane = threadIdx.x % 32;
    load_matrices<false>(a, tile + (row + lane % 16) * pitch + step * 32 + lane / 16 * 16);
}

// Calls `multiply` with COUNT operands for each step. The next step's operands are loaded before, because a warp's
// instructions are issued in order, and a load takes as long as several products.
template <int STEPS, int COUNT, class Load, class Multiply>
__device__ __forceinline__ void pipeline(Load load, Multiply multiply) {
    u32 words[2][COUNT][4];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) load(words[0][i], 0, i);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (step + 1 < STEPS) load(words[(step + 1) % 2][i], step + 1, i);
        multiply(words[step % 2], step);
    }
}
