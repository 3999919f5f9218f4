// Linear attention in fp32 where a session allows TF32: a block goes along a sequence with columns of a state, which
// stay in shared memory.
//
// For PART tokens at once, b is the sum of the logarithms of decays up to a token. The results are
// scale (diag(exp(b)) Q S + P V), where P[t][j] = exp(b[t] - b[j]) q[t] k[j] for j <= t, and then the state S becomes
// exp(b[last]) S + K^T diag(exp(b[last] - b)) V. A result or state that is not finite may overflow in a sum alone: then
// the block computes these tokens one after another.
//
// Macros: those of linear_attention_float32.cuh, whose PART is 32 and whose TF32 is 1; PAST and STATES_BY_COLUMN
// as in linear_attention_tokens.cu; STAGES: 2 if the next tokens are copied meanwhile.
#include "linear_attention_float32.cuh"

static_assert(PART == 32, "the lanes of a warp add up decays");
constexpr int K_PITCH = SIZE + 4;  // elements of rows in shared memory: no bank conflicts but where K is transposed
constexpr int SHARES = WARPS / (PART / 16);  // warps that share the columns of 16 rows
constexpr int SCORES = PART / SHARES / 8, RESULTS = COLUMNS / SHARES / 8, STATES = (SIZE / 16 + WARPS - 1) / WARPS;
// Offsets in shared memory, in elements; those of K, Q, V and the logarithms are in a stage.
constexpr int Q_TILE = PART * K_PITCH, V_TILE = 2 * Q_TILE, LOGARITHMS = V_TILE + PART * V_PITCH;
constexpr int STAGE = LOGARITHMS + PART, S_TILE = STAGES * STAGE, P_TILE = S_TILE + SIZE * V_PITCH;
constexpr int FACTORS = P_TILE + PART * P_PITCH, SUMS = FACTORS + PART;  // SUMS: of PART doubles
static_assert(THREADS <= PART * P_PITCH, "the partial sums of by_tokens take the place of P");

__device__ __forceinline__ void load(const Part& part, int stage) {
    copy_rows<SIZE, K_PITCH>(stage, part.key(), K_HEADS * SIZE, PART, part.count);
    copy_rows<SIZE, K_PITCH>(stage + Q_TILE, part.query(), Q_HEADS * SIZE, PART, part.count);
    copy_rows<COLUMNS, V_PITCH>(stage + V_TILE, part.value(), STATE_HEADS * VALUE_SIZE, PART, part.count);
    const int t = threadIdx.x;
    if (!DECAY || t >= PART) return;
    const bool inside = t < part.count;
    copy_async<4>(
        shared_address(shared_memory() + stage + LOGARITHMS + t),
        reinterpret_cast<const char*>(part.p.decay + (inside ? (part.first + t) * STATE_HEADS : 0) + part.state_head),
        inside ? 4 : 0);
}

// Adds up the logarithms of decays in doubles, because a difference of two sums may be much smaller than both.
__device__ __forceinline__ void sum_decays(int stage) {
    const int t = threadIdx.x;
    if (!DECAY || t >= PART) return;
    float* const memory = shared_memory();
    double sum = summand(memory[stage + LOGARITHMS + t]), all = sum;
#pragma unroll
    for (int distance = 1; distance < PART; distance *= 2) {
        const double other = __shfl_xor_sync(0xffffffffu, all, distance);
        if (t & distance) sum += other;
        all += other;
    }
    reinterpret_cast<double*>(memory + SUMS)[t] = sum;
    memory[FACTORS + t] = exponential(float(all - sum));
}

// Computes and writes the results of a part, and returns whether all are finite.
__device__ __forceinline__ bool compute_results(const Part& part, int stage, float scale) {
    float* const memory = shared_memory();
    const double* const b = reinterpret_cast<const double*>(memory + SUMS);
    const int warp = threadIdx.x / 32, rows = warp / SHARES * 16, keys = warp % SHARES * 8 * SCORES;
    const int columns = warp % SHARES * 8 * RESULTS;
    float both[SCORES + RESULTS][4] = {}, results[RESULTS][4], scores[SCORES][4];
    add_products(
        both, SIZE, [=](int row, int k) { return memory[stage + Q_TILE + (rows + row) * K_PITCH + k]; },
        [=](int k, int column) {
            return column < 8 * SCORES ? memory[stage + (keys + column) * K_PITCH + k]
                                       : memory[S_TILE + k * V_PITCH + columns + column - 8 * SCORES];
        });
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float decay = DECAY ? exponential(float(b[rows + threadIdx.x % 32 / 4 + i / 2 * 8])) : 1.0f;
#pragma unroll
        for (int n = 0; n < SCORES; ++n) scores[n][i] = both[n][i];
#pragma unroll
        for (int n = 0; n < RESULTS; ++n) results[n][i] = both[SCORES + n][i] * decay;
    }
    write_scores(scores, rows, keys, b, P_TILE);
    __syncthreads();
    add_products(
        results, rows + 16, [=](int row, int j) { return memory[P_TILE + (rows + row) * P_PITCH + j]; },
        [=](int j, int column) { return memory[stage + V_TILE + j * V_PITCH + columns + column]; });
    bool finite = true;
    each_pair(results, [&](int row, int column, const float* pair) {
        const float own[2] = {pair[0] * scale, pair[1] * scale};
        if (rows + row >= part.count) return;
        store<false>(part.result(rows + row) + columns + column, own);
        finite &= fabsf(own[0]) <= LARGEST && fabsf(own[1]) <= LARGEST;
    });
    return finite;
}

// Computes the next state without writing it, and returns whether it is finite.
__device__ __forceinline__ bool compute_states(int stage, float (&states)[STATES][COLUMNS / 8][4]) {
    const float* const memory = shared_memory();
    const float decay = DECAY ? exponential(float(reinterpret_cast<const double*>(memory + SUMS)[PART - 1])) : 1.0f;
    bool finite = true;
#pragma unroll
    for (int i = 0; i < STATES; ++i) {
        const int first = (threadIdx.x / 32 + i * WARPS) * 16;
        if (first >= SIZE) break;
        each_pair(states[i], [=](int row, int column, float* pair) {
            const float* const from = memory + S_TILE + (first + row) * V_PITCH + column;
            pair[0] = from[0] * decay;
            pair[1] = from[1] * decay;
        });
        add_products(
            states[i], PART,
            [=](int row, int t) {
                return memory[stage + t * K_PITCH + first + row] * (DECAY ? memory[FACTORS + t] : 1.0f);
            },
            [=](int t, int column) { return memory[stage + V_TILE + t * V_PITCH + column]; });
        each_pair(states[i], [&](int, int, const float* pair) {
            finite &= fabsf(pair[0]) <= LARGEST && fabsf(pair[1]) <= LARGEST;
        });
    }
    return finite;
}

__device__ __forceinline__ void write_states(float (&states)[STATES][COLUMNS / 8][4]) {
#pragma unroll
    for (int i = 0; i < STATES; ++i) {
        const int first = (threadIdx.x / 32 + i * WARPS) * 16;
        if (first >= SIZE) break;
        each_pair(states[i], [=](int row, int column, const float* pair) {
            float* const to = shared_memory() + S_TILE + (first + row) * V_PITCH + column;
            to[0] = pair[0];
            to[1] = pair[1];
        });
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    linear_attention_tf32(const __grid_constant__ Operands p, int length, float scale) {
    release_successor();
    wait_for_predecessor();
    constexpr int GROUP = HEADS / STATE_HEADS;
    const int head = blockIdx.x / TILES % HEADS, column = int(blockIdx.x % TILES) * COLUMNS;
    const i64 sequence = blockIdx.x / TILES / HEADS;
    const int state_head = head / GROUP;
    float* const state = shared_memory() + S_TILE;
    const i64 matrix = (sequence * STATE_HEADS + state_head) * SIZE * VALUE_SIZE;
    // Visits all elements of the block's columns: their places in memory, and in shared memory.
    const auto each_element = [=](auto visit) {
        for (int i = threadIdx.x; i < SIZE * COLUMNS; i += THREADS) {
            const int row = STATES_BY_COLUMN ? i % SIZE : i / COLUMNS, own = STATES_BY_COLUMN ? i / SIZE : i % COLUMNS;
            const int at = STATES_BY_COLUMN ? (column + own) * SIZE + row : row * VALUE_SIZE + column + own;
            visit(matrix + at, row * V_PITCH + own);
        }
    };
    const auto part = [&](int token) {
        return Part{p,
                    sequence * length + token,
                    min(PART, length - token),
                    state_head,
                    state_head / (STATE_HEADS / K_HEADS),
                    head / (HEADS / Q_HEADS),
                    head,
                    column};
    };
    if (length > 0) load(part(0), 0);
    commit_copies();
    each_element([=](i64 at, int to) { state[to] = PAST ? element(p.past + at) : 0.0f; });
    int stage = 0;
    for (int token = 0; token < length; token += PART) {
        const int next = STAGES == 2 ? STAGE - stage : 0;
        const bool is_last = token + PART >= length;
        if (STAGES == 2) {
            if (!is_last) load(part(token + PART), next);
            commit_copies();
        }
        wait_for_groups<STAGES - 1>();
        sum_decays(stage);
        __syncthreads();
        float states[STATES][COLUMNS / 8][4];
        const Part own = part(token);
        bool finite = compute_results(own, stage, scale);
        finite &= compute_states(stage, states);
        if (__syncthreads_or(!finite)) by_tokens(own, state, shared_memory() + P_TILE, scale);
        else write_states(states);
        if (STAGES == 1) {
            if (!is_last) load(part(token + PART), 0);
            commit_copies();
        }
        stage = next;
    }
    if (!PRESENT || head % GROUP) return;
    __syncthreads();
    each_element([=](i64 at, int from) {
        const float value[1] = {state[from]};
        store<false>(p.present + at, value);
    });
}
