// Parts of 64 tokens of linear attention in fp32, on tensor cores. linear_attention_parts.cu runs between two launches of
// this kernel, and says why sequences have parts.
//
// Within a part, b is the sum of the logarithms of decays up to a token. Without RESULTS, a block computes what the
// tokens add to a state, K^T diag(exp(b[last] - b)) V. With RESULTS, it computes scale (diag(exp(b)) Q S + P V), where
// S is the state before the part, and P[t][j] = exp(b[t] - b[j]) q[t] k[j] for j <= t.
//
// A result that is not finite may overflow in P alone: then the block computes its results token after token.
//
// Macros: those of linear_attention_float32.cuh, whose PART is 64; RESULTS as in linear_attention_tokens.cu.
#include "linear_attention_float32.cuh"

constexpr int K_PITCH = SIZE + (RESULTS ? 4 : 8);  // elements of rows in shared memory: no bank conflicts
// Offsets in shared memory, in elements. The state takes the place of K once P is computed.
constexpr int S_ELEMENTS = SIZE * V_PITCH, K_ELEMENTS = PART * K_PITCH;
constexpr int V_TILE = RESULTS && S_ELEMENTS > K_ELEMENTS ? S_ELEMENTS : K_ELEMENTS, Q_TILE = V_TILE + PART * V_PITCH;
constexpr int P_TILE = Q_TILE + RESULTS * K_ELEMENTS, FACTORS = P_TILE + RESULTS * PART * P_PITCH;
constexpr int SUMS = FACTORS + PART;  // of PART doubles
static_assert(THREADS <= PART * P_PITCH, "the partial sums of by_tokens take the place of P");

// Sums up the logarithms of decays, and computes the decays after each token. The sums are doubles, because a difference
// of two of them may be much smaller than both.
__device__ __forceinline__ void sum_decays(const Part& part) {
    float* const factors = shared_memory() + FACTORS;
    double *const sums = reinterpret_cast<double*>(shared_memory() + SUMS), *const decays = sums + PART;
    const int t = threadIdx.x;
    if (t < PART) decays[t] = t < part.count ? summand(part.logarithm(t)) : 0.0;
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
    const float* const memory = shared_memory();
    const double* const b = reinterpret_cast<const double*>(memory + SUMS);
    if (columns > rows) return;
    float sums[PART / 16][4] = {};
    add_products(
        sums, SIZE, [=](int row, int k) { return memory[Q_TILE + (rows + row) * K_PITCH + k]; },
        [=](int k, int column) { return memory[(columns + column) * K_PITCH + k]; });
    write_scores(sums, rows, columns, b, P_TILE);
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
    if (__syncthreads_or(!finite)) by_tokens(part, shared_memory(), shared_memory() + P_TILE, scale);
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
