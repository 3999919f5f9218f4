// Operands and products of linear_attention_products.cu and linear_attention_tf32.cu, in fp32 on tensor cores.
//
// An operand of a product is rounded to TF32 if TF32 is 1. Otherwise it is split into two TF32 numbers, which keep 22
// of its 24 bits; the product of both smaller ones is left out.
//
// Macros: SIZE, VALUE_SIZE, STATE_HEADS, Q_HEADS, K_HEADS, HEADS, DECAY of 0 or 1, PRESENT as in
// linear_attention_tokens.cu; COLUMNS of a state in a block, PART (tokens that are computed at once), THREADS, TF32.
#pragma once
#include "gemm_multiply.cuh"

constexpr int WARPS = THREADS / 32, TILES = VALUE_SIZE / COLUMNS;
constexpr int V_PITCH = COLUMNS + 8, P_PITCH = PART + 4;  // elements of rows in shared memory: no bank conflicts
constexpr float LOWEST_DECAY = -1000.0f;  // a decay by exp(-1000) is 0 in fp32, and sums of such logarithms are finite

struct Operands {
    const f32 *query, *key, *value, *decay, *beta, *past;
    f32 *present, *y, *factors;
};

__device__ __forceinline__ float* shared_memory() {
    extern __shared__ __align__(128) char memory[];
    return reinterpret_cast<float*>(memory);
}
__device__ __forceinline__ float element(const f32* from) { return __uint_as_float(load_cached<1>(from).words[0]); }
__device__ __forceinline__ float exponential(float x) { return exp2_fast(x * LOG2_E); }

// N words of an operand: the larger and the smaller TF32 number of each, or the nearest one. mma ignores the bits that
// TF32 lacks. To round by cvt.rna.tf32 would cost more than the products.
template <int N>
struct Halves {
    unsigned large[N], small[N];

    __device__ __forceinline__ void set(int i, float x) {
        if constexpr (TF32) {  // the nearest TF32 number; infinity or NaN if a product overflows
            large[i] = __float_as_uint(fmaf(x, -8192.0f, x * 8193.0f));
            return;
        }
        large[i] = __float_as_uint(x) & 0xffffe000u;
        small[i] = __float_as_uint(x - __uint_as_float(large[i]));
    }
};

// Adds the products of 16 rows `left(row, k)` and 8 N columns `right(k, column)` for all k less than `depth`.
template <int N, class Left, class Right>
__device__ __forceinline__ void add_products(float (&sums)[N][4], int depth, Left left, Right right) {
    const int row = threadIdx.x % 32 / 4, place = threadIdx.x % 4;
#pragma unroll 4
    for (int k = place; k < depth; k += 8) {
        Halves<4> a;
#pragma unroll
        for (int i = 0; i < 4; ++i) a.set(i, left(row + i % 2 * 8, k + i / 2 * 4));
#pragma unroll
        for (int n = 0; n < N; ++n) {
            Halves<2> b;
#pragma unroll
            for (int i = 0; i < 2; ++i) b.set(i, right(k + i * 4, n * 8 + row));
            if constexpr (!TF32) {
                multiply(f32(), sums[n], a.small, b.large[0], b.large[1]);
                multiply(f32(), sums[n], a.large, b.small[0], b.small[1]);
            }
            multiply(f32(), sums[n], a.large, b.large[0], b.large[1]);
        }
    }
}

// Calls `visit` with the row and the first of two neighbouring columns of each pair of a thread's sums.
template <int N, class Visit>
__device__ __forceinline__ void each_pair(float (&sums)[N][4], Visit visit) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            visit(threadIdx.x % 32 / 4 + half * 8, n * 8 + threadIdx.x % 4 * 2, sums[n] + 2 * half);
}

// Writes a warp's part of P to shared memory from `to` on: products of queries and keys times their decays, by the sums
// `b` of logarithms; 0 for keys of later tokens.
template <int N>
__device__ __forceinline__ void write_scores(float (&products)[N][4], int rows, int columns, const double* b, int to) {
    float* const p = shared_memory() + to;
    each_pair(products, [=](int row, int column, const float* pair) {
        const int t = rows + row, j = columns + column;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float decay = DECAY ? exponential(float(b[t] - b[j + i])) : 1.0f;
            p[t * P_PITCH + j + i] = j + i <= t ? pair[i] * decay : 0.0f;
        }
    });
}

// Starts to copy `rows` rows of WIDTH elements to shared memory; rows from `count` on become 0.
template <int WIDTH, int PITCH>
__device__ __forceinline__ void copy_rows(int to, const f32* from, int stride, int rows, int count) {
    const u32 address = shared_address(shared_memory() + to);
    for (int i = threadIdx.x; i < rows * (WIDTH / 4); i += THREADS) {
        const int row = i / (WIDTH / 4), part = i % (WIDTH / 4) * 4;
        const bool inside = row < count;
        copy_async<16>(address + (row * PITCH + part) * 4,
                       reinterpret_cast<const char*>(from + (inside ? (i64)row * stride + part : 0)), inside ? 16 : 0);
    }
}

// A part of one head: its first token in all sequences, its tokens, and its heads of states, keys, queries and results.
struct Part {
    const Operands& p;
    i64 first;
    int count, state_head, key_head, query_head, head, column;

    __device__ __forceinline__ const f32* key(int t = 0) const {
        return p.key + ((first + t) * K_HEADS + key_head) * SIZE;
    }
    __device__ __forceinline__ const f32* query(int t = 0) const {
        return p.query + ((first + t) * Q_HEADS + query_head) * SIZE;
    }
    __device__ __forceinline__ const f32* value(int t = 0) const {
        return p.value + ((first + t) * STATE_HEADS + state_head) * VALUE_SIZE + column;
    }
    __device__ __forceinline__ float logarithm(int t) const {
        return DECAY ? element(p.decay + (first + t) * STATE_HEADS + state_head) : 0.0f;
    }
    __device__ __forceinline__ f32* result(int t) const {
        return p.y + ((first + t) * HEADS + head) * VALUE_SIZE + column;
    }
};

// The logarithm of a decay as it is added up. A factor above 1 becomes NaN, and so does all that depends on it.
__device__ __forceinline__ double summand(float decay) {
    return decay < LOWEST_DECAY ? LOWEST_DECAY : decay <= 0.0f ? decay : __uint_as_float(0x7fffffffu);
}

// Computes the results token after token from the state in shared memory. Threads that share a column add up `partial`.
__device__ __noinline__ void by_tokens(const Part& part, float* state, float* partial, float scale) {
    constexpr int EACH = THREADS / COLUMNS;
    const int column = threadIdx.x % COLUMNS, first = threadIdx.x / COLUMNS;
    for (int t = 0; t < part.count; ++t) {
        const float factor = exponential(part.logarithm(t)), value = element(part.value(t) + column);
        float sum = 0.0f;
        for (int row = first; row < SIZE; row += EACH) {
            float& own = state[row * V_PITCH + column];
            own = fmaf(element(part.key(t) + row), value, own * factor);
            sum = fmaf(own, element(part.query(t) + row), sum);
        }
        partial[threadIdx.x] = sum;
        __syncthreads();
        if (first == 0) {
            for (int i = 1; i < EACH; ++i) sum += partial[i * COLUMNS + column];
            const float own[1] = {sum * scale};
            store<false>(part.result(t) + column, own);
        }
        __syncthreads();
    }
}
