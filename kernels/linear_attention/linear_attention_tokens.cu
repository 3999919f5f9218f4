// Linear attention, token after token: for one token after a state, and for all nodes that the kernels of
// chunks do not take. Sequences may be split into parts for blocks of their own: see linear_attention_parts.cu.
//
//     S = exp(decay) S;  w = beta (v - S^T k);  S = S + k w^T;  y = scale S^T q
//
// A block has some columns of the state of one head, in fp32 registers. A thread has COLUMNS neighbouring columns and
// a part of their rows; LANES lanes of a warp share the columns. The operands of TOKENS tokens are copied to
// shared memory at once. A state may be written where it was read.
//
// Macros:
//   T, STATE_T             storage types of the operands and of the state
//   SIZE, VALUE_SIZE       rows and columns of a state
//   STATE_HEADS, Q_HEADS, K_HEADS, HEADS   heads of states, of queries, of keys, and of results: the largest of these
//   DECAY                  0: none, 1: one for each head, 2: one for each row of the state
//   BETA                   0: none, and w = v; 1: one for each head, 2: one for all heads
//   PAST, PRESENT          1: there is a past state; the last state is an output
//   RESULTS                0: only the states after parts that begin with 0 are computed, and products of decays
//   LANES, COLUMNS, WIDTH  WIDTH: elements of an access to states and results
//   STEP                   elements of an access to the other operands
//   WARPS, TOKENS
#include "types.cuh"

using i64 = long long;

constexpr int ROWS = (SIZE + LANES - 1) / LANES;
constexpr int TILE = 32 / LANES * COLUMNS * WARPS;  // columns of a block
constexpr int TILES = (VALUE_SIZE + TILE - 1) / TILE;
constexpr int GROUP = RESULTS * HEADS / STATE_HEADS;         // heads of results that read one state
constexpr int RUN = SIZE % (4 * LANES) || TILE % 4 ? 1 : 4;  // neighbouring rows of a thread
// Floats of a token in shared memory: a key, queries, values, and decays of rows; a decay and a rate; none.
constexpr int VALUES = SIZE * (1 + GROUP), DECAYS = VALUES + TILE, NUMBERS = DECAYS + (DECAY == 2 ? SIZE : 0);
constexpr int TOKEN_FLOATS = (NUMBERS + 2 + 3) / 4 * 4;

extern __shared__ __align__(16) float staged[];

// The operands, as an argument of the kernel; host.py writes the fields in this order.
struct Operands {
    const T *query, *key, *value, *decay, *beta;
    const STATE_T* past;
    STATE_T* present;
    T* y;
    f32* factors;  // (sequences, parts, STATE_HEADS), or SIZE times as many: products of the decays of a part
};

__device__ __forceinline__ float element(const T* from) {
    float value[1];
    unpack(load_cached<1>(from), value);
    return value[0];
}

// Adds the values of the lanes that share columns.
__device__ __forceinline__ void add_lanes(float (&x)[COLUMNS]) {
#pragma unroll
    for (int mask = 32 / LANES; mask < 32; mask *= 2)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) x[c] += __shfl_xor_sync(0xffffffffu, x[c], mask);
}

__device__ __forceinline__ float exponential(float x) { return exp2_fast(x * LOG2_E); }

// Copies `count` tokens from token `first` of the sequence on to shared memory.
__device__ __forceinline__ void stage(const Operands& p, i64 first, int count, int state_head, int column) {
    constexpr int ACCESSES = NUMBERS / STEP + 1;  // the last one is to the numbers
    for (int i = threadIdx.x; i < count * ACCESSES; i += WARPS * 32) {
        const i64 token = first + i / ACCESSES, number = token * STATE_HEADS + state_head;
        const int at = i % ACCESSES * STEP;
        float* const to = staged + i / ACCESSES * TOKEN_FLOATS;
        if (at == NUMBERS / STEP * STEP) {
            if (DECAY == 1) to[NUMBERS] = exponential(element(p.decay + number));
            if (BETA) to[NUMBERS + 1] = element(p.beta + (BETA == 1 ? number : token));
            continue;
        }
        const T* from = p.key + (token * K_HEADS + state_head / (STATE_HEADS / K_HEADS)) * SIZE + at;
        if (at >= DECAYS) {
            from = p.decay + number * SIZE + at - DECAYS;
        } else if (at >= VALUES) {
            from = p.value + number * VALUE_SIZE + column + at - VALUES;
        } else if (at >= SIZE) {
            const int head = (state_head * GROUP + at / SIZE - 1) / (HEADS / Q_HEADS);
            from = p.query + (token * Q_HEADS + head) * SIZE + at % SIZE;
        }
        Pack<T, STEP> read = {};
        if (at < VALUES || at >= DECAYS || column + at - VALUES < VALUE_SIZE) read = load_cached<STEP>(from);
        float values[STEP];
        unpack(read, values);
#pragma unroll
        for (int j = 0; j < STEP; ++j) values[j] = DECAY == 2 && at >= DECAYS ? exponential(values[j]) : values[j];
        if constexpr (STEP % 4 == 0) {
#pragma unroll
            for (int j = 0; j < STEP; j += 4)
                *reinterpret_cast<float4*>(to + at + j) = {values[j], values[j + 1], values[j + 2], values[j + 3]};
        } else {
#pragma unroll
            for (int j = 0; j < STEP; ++j) to[at + j] = values[j];
        }
    }
}

struct State {
    float s[ROWS][COLUMNS];
    float factors[DECAY == 2 ? ROWS : 1];  // without RESULTS, the products of decays
    int lane;

    __device__ __forceinline__ int row(int r) const { return (r / RUN * LANES + lane) * RUN + r % RUN; }

    __device__ __forceinline__ void multiply(const float (&k)[ROWS], float (&sums)[COLUMNS]) const {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) sums[c] = 0.0f;
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) sums[c] = fmaf(s[r][c], k[r], sums[c]);
        add_lanes(sums);
    }

    __device__ __forceinline__ void rows_of(const float* from, float (&to)[ROWS]) const {
#pragma unroll
        for (int r = 0; r < ROWS; r += RUN) {
            if constexpr (RUN == 4) {
                const float4 four = *reinterpret_cast<const float4*>(from + row(r));
                to[r] = four.x, to[r + 1] = four.y, to[r + 2] = four.z, to[r + 3] = four.w;
            } else {
                to[r] = row(r) < SIZE ? from[row(r)] : 0.0f;
            }
        }
    }

    // Adds a token. `token` is its part of shared memory, and `w` are the thread's columns of its values.
    __device__ __forceinline__ void add(const float* token, float (&w)[COLUMNS]) {
        if constexpr (DECAY == 1) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) s[r][c] *= token[NUMBERS];
            if (!RESULTS) factors[0] *= token[NUMBERS];
        } else if constexpr (DECAY == 2) {
            float own[ROWS];
            rows_of(token + DECAYS, own);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) s[r][c] *= own[r];
                if (!RESULTS) factors[r] *= own[r];
            }
        }
        float k[ROWS];
        rows_of(token, k);
        if constexpr (BETA) {
            float found[COLUMNS];
            multiply(k, found);
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) w[c] = token[NUMBERS + 1] * (w[c] - found[c]);
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) s[r][c] = fmaf(k[r], w[c], s[r][c]);
    }
};

// A sequence of `whole` tokens has `parts` parts, which have `size` tokens each, or fewer in the last one.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    linear_attention_tokens(const __grid_constant__ Operands p, int whole, int size, int parts, float scale) {
    release_successor();
    wait_for_predecessor();
    const int state_head = blockIdx.x / TILES % STATE_HEADS, part = blockIdx.x / TILES / STATE_HEADS;
    const int token = part % parts * size, length = min(size, whole - token);
    const i64 begin = (i64)(part / parts) * whole + token;
    if (!RESULTS && !PRESENT && part % parts == parts - 1) return;  // nothing reads the state after the last part
    const int first = blockIdx.x % TILES * TILE;
    const int within = (threadIdx.x / 32 * (32 / LANES) + threadIdx.x % 32 % (32 / LANES)) * COLUMNS;
    const int column = first + within;
    State state;
    state.lane = threadIdx.x % 32 / (32 / LANES);
    const i64 matrix = ((i64)part * STATE_HEADS + state_head) * SIZE * VALUE_SIZE;
    Pack<STATE_T, WIDTH> past[ROWS][COLUMNS / WIDTH] = {};
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < COLUMNS; c += WIDTH) {
            const int row = state.row(r);
            if (PAST && row < SIZE && column + c < VALUE_SIZE)
                past[r][c / WIDTH] = load_once<WIDTH>(p.past + matrix + row * VALUE_SIZE + column + c);
        }
    // The state arrives while the first tokens are copied.
    stage(p, begin, min(TOKENS, length), state_head, first);
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < COLUMNS; c += WIDTH) {
            float values[WIDTH];
            unpack(past[r][c / WIDTH], values);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) state.s[r][c + i] = values[i];
        }
#pragma unroll
    for (float& factor : state.factors) factor = 1.0f;
    for (int t = 0; t < length; t += TOKENS) {
        const int count = min(TOKENS, length - t);
        const i64 start = begin + t;
        if (t > 0) {
            __syncthreads();
            stage(p, start, count, state_head, first);
            __syncthreads();
        }
        for (int i = 0; i < count; ++i) {
            const float* const token = staged + i * TOKEN_FLOATS;
            float w[COLUMNS];
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) w[c] = token[VALUES + within + c];
            state.add(token, w);
#pragma unroll 1
            for (int g = 0; g < GROUP; ++g) {
                float q[ROWS], y[COLUMNS];
                state.rows_of(token + SIZE * (1 + g), q);
                state.multiply(q, y);
                T* const to = p.y + ((start + i) * HEADS + state_head * GROUP + g) * VALUE_SIZE + column;
#pragma unroll
                for (int c = 0; c < COLUMNS; c += WIDTH) {
                    float values[WIDTH];
#pragma unroll
                    for (int j = 0; j < WIDTH; ++j) values[j] = y[c + j] * scale;
                    if (state.lane == 0 && column + c < VALUE_SIZE) store<false>(to + c, values);
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < COLUMNS; c += WIDTH) {
            const int row = state.row(r);
            float values[WIDTH];
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) values[i] = state.s[r][c + i];
            if ((PRESENT || !RESULTS) && row < SIZE && column + c < VALUE_SIZE)
                store<false>(p.present + matrix + row * VALUE_SIZE + column + c, values);
        }
    if (RESULTS || column != 0 || !DECAY) return;
    f32* const factors = p.factors + ((i64)part * STATE_HEADS + state_head) * (DECAY == 2 ? SIZE : 1);
    if (DECAY == 1 && state.lane == 0) store<false>(factors, state.factors);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const float own[1] = {state.factors[DECAY == 2 ? r : 0]};
        if (DECAY == 2 && state.row(r) < SIZE) store<false>(factors + state.row(r), own);
    }
}
