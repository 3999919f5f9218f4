// Parts of 64 tokens of linear attention in fp32, on tensor cores. linear_attention_parts.cu runs between two launches of
// this kernel, and says why sequences have parts.
//
// Within a part, b is the sum of the logarithms of decays up to a token. Without RESULTS, a block computes what the
// tokens add to a state, K^T diag(exp(b[last] - b)) V. With RESULTS, it computes scale (diag(exp(b)) Q S + P V), where
// S is the state before the part, and P[t][j] = exp(b[t] - b[j]) q[t] k[j] for j <= t.
//
// Each operand of a product is split into two TF32 numbers, which keep 22 of its 24 bits; the product of both smaller
// ones is left out. A result that is not finite may overflow in P alone: then the block computes its results token after
// token.
//
// Macros: SIZE, VALUE_SIZE, STATE_HEADS, Q_HEADS, K_HEADS, HEADS, DECAY of 0 or 1, PRESENT, RESULTS as in
// linear_attention_tokens.cu; COLUMNS of a state in a block.
#include "gemm_multiply.cuh"

constexpr int PART = 64, THREADS = 256, WARPS = THREADS / 32, TILES = VALUE_SIZE / COLUMNS;
// Elements of rows in shared memory: the lanes of a warp read different banks.
constexpr int K_PITCH = SIZE + (RESULTS ? 4 : 8), V_PITCH = COLUMNS + 8, P_PITCH = PART + 4;
// Offsets in shared memory, in elements. The state takes the place of K once P is computed.
constexpr int S_ELEMENTS = SIZE * V_PITCH, K_ELEMENTS = PART * K_PITCH;
constexpr int V_TILE = RESULTS && S_ELEMENTS > K_ELEMENTS ? S_ELEMENTS : K_ELEMENTS, Q_TILE = V_TILE + PART * V_PITCH;
constexpr int P_TILE = Q_TILE + RESULTS * K_ELEMENTS, FACTORS = P_TILE + RESULTS * PART * P_PITCH;
constexpr int SUMS = FACTORS + PART;  // of PART doubles
static_assert(THREADS <= PART * P_PITCH, "the partial sums of by_tokens take the place of P");
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

// N words of an operand: the larger and the smaller TF32 number of each. mma ignores the bits that TF32 lacks. To round
// by cvt.rna.tf32 would cost more than the products.
template <int N>
struct Halves {
    unsigned large[N], small[N];

    __device__ __forceinline__ void set(int i, float x) {
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
            multiply(f32(), sums[n], a.small, b.large[0], b.large[1]);
            multiply(f32(), sums[n], a.large, b.small[0], b.small[1]);
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

// Sums up the logarithms of decays, and computes the decays after each token. A factor above 1 becomes NaN, and so does
// all that depends on it. The sums are doubles, because a difference of two of them may be much smaller than both.
__device__ __forceinline__ void sum_decays(const Part& part) {
    float* const factors = shared_memory() + FACTORS;
    double *const sums = reinterpret_cast<double*>(shared_memory() + SUMS), *const decays = sums + PART;
    const int t = threadIdx.x;
    if (t < PART) {
        const float own = t < part.count ? part.logarithm(t) : 0.0f;
        decays[t] = own < LOWEST_DECAY ? LOWEST_DECAY : own <= 0.0f ? own : __uint_as_float(0x7fffffffu);
    }
    __syncthreads();
    double parts[4] = {};
#pragma unroll
    for (int i = 0; i < PART; ++i) parts[i % 4] += i <= t && t < PART ? decays[i] : 0.0;
    const double sum = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    if (t < PART) sums[t] = sum;
    __syncthreads();
    if (t < PART) factors[t] = exponential(float(sums[PART - 1] - sum));
}

// Computes what the tokens add to columns of a state, and the product of their decays.
__device__ __forceinline__ void compute_state(const Part& part, f32* state, f32* factor) {
    const float* const memory = shared_memory();
    const float* const factors = memory + FACTORS;
    for (int tile = threadIdx.x / 32; tile < SIZE / 16; tile += WARPS) {
        float sums[COLUMNS / 8][4] = {};
        add_products(
            sums, PART,
            [=](int row, int t) { return memory[t * K_PITCH + tile * 16 + row] * (DECAY ? factors[t] : 1.0f); },
            [=](int t, int column) { return memory[V_TILE + t * V_PITCH + column]; });
        each_pair(sums, [=](int row, int column, const float* pair) {
            const float own[2] = {pair[0], pair[1]};
            store<false>(state + (tile * 16 + row) * VALUE_SIZE + column, own);
        });
    }
    if (!DECAY || threadIdx.x || part.column) return;
    const float whole[1] = {exponential(float(reinterpret_cast<const double*>(memory + SUMS)[PART - 1]))};
    store<false>(factor, whole);
}

// Writes P. A warp computes 16 rows of 32 columns of it.
__device__ __forceinline__ void compute_scores(int rows, int columns) {
    float* const memory = shared_memory();
    const double* const b = reinterpret_cast<const double*>(memory + SUMS);
    if (columns > rows) return;
    float sums[PART / 16][4] = {};
    add_products(
        sums, SIZE, [=](int row, int k) { return memory[Q_TILE + (rows + row) * K_PITCH + k]; },
        [=](int k, int column) { return memory[(columns + column) * K_PITCH + k]; });
    each_pair(sums, [=](int row, int column, const float* pair) {
        const int t = rows + row, j = columns + column;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float decay = DECAY ? exponential(float(b[t] - b[j + i])) : 1.0f;
            memory[P_TILE + t * P_PITCH + j + i] = j + i <= t ? pair[i] * decay : 0.0f;
        }
    });
}

// Computes the results token after token from the state in shared memory; threads share columns.
__device__ __noinline__ void by_tokens(const Part& part, float scale) {
    constexpr int EACH = THREADS / COLUMNS;
    float *const state = shared_memory(), *const partial = state + P_TILE;
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

__device__ __forceinline__ void compute_results(const Part& part, const f32* state, float scale) {
    const float* const memory = shared_memory();
    const double* const b = reinterpret_cast<const double*>(memory + SUMS);
    const int warp = threadIdx.x / 32, rows = warp % 4 * 16, columns = warp / 4 * (COLUMNS / 2);
    compute_scores(rows, warp / 4 * (PART / 2));
    __syncthreads();
    copy_rows<COLUMNS, V_PITCH>(0, state, VALUE_SIZE, SIZE, SIZE);
    commit_copies();
    float sums[COLUMNS / 16][4] = {};
    add_products(
        sums, rows + 16, [=](int row, int j) { return memory[P_TILE + (rows + row) * P_PITCH + j]; },
        [=](int j, int column) { return memory[V_TILE + j * V_PITCH + columns + column]; });
    wait_for_groups<0>();
    __syncthreads();
    const int first = rows + threadIdx.x % 32 / 4;
    const float decays[2] = {DECAY ? exponential(float(b[first])) : 1.0f,
                             DECAY ? exponential(float(b[first + 8])) : 1.0f};
    add_products(
        sums, SIZE, [=](int row, int k) { return memory[Q_TILE + (rows + row) * K_PITCH + k] * decays[row / 8]; },
        [=](int k, int column) { return memory[k * V_PITCH + columns + column]; });
    bool finite = true;
    each_pair(sums, [&](int row, int column, const float* pair) {
        const float own[2] = {pair[0] * scale, pair[1] * scale};
        if (rows + row >= part.count) return;
        store<false>(part.result(rows + row) + columns + column, own);
        finite &= fabsf(own[0]) <= LARGEST && fabsf(own[1]) <= LARGEST;
    });
    if (__syncthreads_or(!finite)) by_tokens(part, scale);
}

// `whole` tokens of a sequence are `parts` parts.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    linear_attention_products(const __grid_constant__ Operands p, int whole, int parts, float scale) {
    release_successor();
    wait_for_predecessor();
    constexpr int OWN_HEADS = RESULTS ? HEADS : STATE_HEADS;
    const int head = blockIdx.x / TILES % OWN_HEADS, number = blockIdx.x / TILES / OWN_HEADS;
    if (!RESULTS && !PRESENT && number % parts == parts - 1) return;  // nothing reads the state after the last part
    const int state_head = head / (OWN_HEADS / STATE_HEADS), token = number % parts * PART;
    const i64 first = (i64)(number / parts) * whole + token;
    const Part part{p,
                    first,
                    min(PART, whole - token),
                    state_head,
                    state_head / (STATE_HEADS / K_HEADS),
                    head / (HEADS / Q_HEADS),
                    head,
                    int(blockIdx.x % TILES) * COLUMNS};
    copy_rows<SIZE, K_PITCH>(0, part.key(), K_HEADS * SIZE, PART, part.count);
    if (RESULTS) copy_rows<SIZE, K_PITCH>(Q_TILE, part.query(), Q_HEADS * SIZE, PART, part.count);
    copy_rows<COLUMNS, V_PITCH>(V_TILE, part.value(), STATE_HEADS * VALUE_SIZE, PART, part.count);
    commit_copies();
    if (DECAY) sum_decays(part);
    wait_for_groups<0>();
    __syncthreads();
    const i64 own = (i64)number * STATE_HEADS + state_head, matrix = own * SIZE * VALUE_SIZE + part.column;
    if constexpr (RESULTS) compute_results(part, p.past + matrix, scale);
    else compute_state(part, p.present + matrix, p.factors + own);
}
