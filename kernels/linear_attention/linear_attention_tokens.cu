// Linear attention, token after token: for one token after a state, and for all nodes that the kernels of
// chunks do not take. Sequences may be split into parts for blocks of their own: see linear_attention_parts.cu.
//
//     S = exp(decay) S;  w = beta (v - S^T k);  S = S + k w^T;  y = scale S^T q
//
// A block has some columns of the state of one head, in fp32 registers. A thread has COLUMNS neighbouring columns and
// a part of their rows; LANES lanes of a warp share the columns. The operands of TOKENS tokens are copied to
// shared memory at once, while the tokens before them are computed. A state may be written where it was read.
//
// Macros:
//   T, GATE_T, STATE_T     storage types of the operands, of decays and rates, and of the state
//   STATES_BY_COLUMN       1: states are stored as (VALUE_SIZE, SIZE)
//   SIZE, VALUE_SIZE       rows and columns of a state
//   STATE_HEADS, Q_HEADS, K_HEADS, HEADS   heads of states, of queries, of keys, and of results: the largest of these
//   DECAY                  0: none, 1: one for each head, 2: one for each row of the state
//   BETA                   0: none, and w = v; 1: one for each head, 2: one for all heads
//   PAST, PRESENT          1: there is a past state; the last state is an output
//   RESULTS                0: only the states after parts that begin with 0 are computed, and products of decays
//   LANES, COLUMNS, WIDTH, STATE_WIDTH   elements of an access to results, and to states
//   STEP                   elements of an access to the other operands
//   WARPS, TOKENS
//   BUFFERS                2: copies overlap with tokens that are computed; 1: a token takes too much memory for that
#include "types.cuh"

using i64 = long long;

constexpr int ROWS = (SIZE + LANES - 1) / LANES;
constexpr int TILE = 32 / LANES * COLUMNS * WARPS;  // columns of a block
constexpr int TILES = (VALUE_SIZE + TILE - 1) / TILE;
constexpr int GROUP = RESULTS * HEADS / STATE_HEADS;                  // heads of results that read one state
constexpr int GATE = int(sizeof(GATE_T) / sizeof(T));                 // elements of T that a logarithm takes
constexpr int RUN = SIZE % (4 * LANES) || TILE % (4 * GATE) ? 1 : 4;  // neighbouring rows of a thread
// Rows and columns of a state in one access.
constexpr int DOWN = STATES_BY_COLUMN ? STATE_WIDTH : 1, ACROSS = STATES_BY_COLUMN ? 1 : STATE_WIDTH;
static_assert(RUN % DOWN == 0 && COLUMNS % ACROSS == 0, "an access has rows or columns of one thread");
// Elements of a token in shared memory: a key, queries, values, and decays of rows.
constexpr int VALUES = SIZE * (1 + GROUP), DECAYS = (VALUES + TILE + GATE - 1) / GATE * GATE;
constexpr int ELEMENTS = DECAYS + (DECAY == 2 ? SIZE * GATE : 0);
constexpr int PITCH = (ELEMENTS * int(sizeof(T)) + 15) / 16 * 16 / int(sizeof(T));

extern __shared__ __align__(16) float staged[];

// The operands, as an argument of the kernel; host.py writes the fields in this order.
struct Operands {
    const T *query, *key, *value;
    const GATE_T *decay, *beta;
    const STATE_T* past;
    STATE_T* present;
    T* y;
    f32* factors;  // (sequences, parts, STATE_HEADS), or SIZE times as many: see State::follow
};

__device__ __forceinline__ i64 state_index(int row, int column) {
    return STATES_BY_COLUMN ? (i64)column * SIZE + row : row * VALUE_SIZE + column;
}

template <class U>
__device__ __forceinline__ float element(const U* from) {
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

// Reads neighbouring elements of shared memory.
template <int N, class U>
__device__ __forceinline__ void read_shared(const U* from, float (&to)[N]) {
    if constexpr (N == 4 && sizeof(U) == 4) {
        const float4 four = *reinterpret_cast<const float4*>(from);
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    } else if constexpr (N == 4) {
        const uint2 words = *reinterpret_cast<const uint2*>(from);
        const Pack<U, 4> pack = {{words.x, words.y}};
        unpack(pack, to);
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const Pack<U, 1> pack = {{from[i].bits}};
            float value[1];
            unpack(pack, value);
            to[i] = value[0];
        }
    }
}

// The tokens in a buffer of shared memory, and two numbers of each: what its decay multiplies a state by, and its rate.
struct Tokens {
    T* elements;
    float* numbers;

    __device__ __forceinline__ explicit Tokens(int buffer) {
        elements = reinterpret_cast<T*>(staged) + buffer * TOKENS * PITCH;
        numbers = reinterpret_cast<float*>(reinterpret_cast<T*>(staged) + BUFFERS * TOKENS * PITCH) +
                  buffer * TOKENS * 2;
    }

    // Starts the copies of `count` tokens from token `first` of all sequences on.
    __device__ __forceinline__ void copy(const Operands& p, i64 first, int count, int state_head, int column) const {
        constexpr int ACCESSES = ELEMENTS / STEP;
        for (int i = threadIdx.x; i < count * ACCESSES; i += WARPS * 32) {
            const i64 token = first + i / ACCESSES, number = token * STATE_HEADS + state_head;
            const int at = i % ACCESSES * STEP;
            const T* from = p.key + (token * K_HEADS + state_head / (STATE_HEADS / K_HEADS)) * SIZE + at;
            if (at >= DECAYS) {
                from = reinterpret_cast<const T*>(p.decay + number * SIZE) + at - DECAYS;
            } else if (at >= VALUES) {
                if (column + at - VALUES >= VALUE_SIZE) continue;  // nothing stores what these columns give
                from = p.value + number * VALUE_SIZE + column + at - VALUES;
            } else if (at >= SIZE) {
                const int head = (state_head * GROUP + at / SIZE - 1) / (HEADS / Q_HEADS);
                from = p.query + (token * Q_HEADS + head) * SIZE + at % SIZE;
            }
            T* const to = elements + i / ACCESSES * PITCH + at;
            if constexpr (STEP * sizeof(T) < 4) *to = *from;
            else copy_to_shared<STEP>(*reinterpret_cast<Pack<T, STEP>*>(to), from);
        }
    }
    // Loads the numbers of this thread's token, if it has one of the `count` tokens.
    __device__ __forceinline__ void load(const Operands& p, i64 first, int count, int state_head,
                                         float (&loaded)[2]) const {
        const i64 token = first + threadIdx.x, number = token * STATE_HEADS + state_head;
        if (int(threadIdx.x) >= count) return;
        if (DECAY == 1) loaded[0] = element(p.decay + number);
        if (BETA) loaded[1] = element(p.beta + (BETA == 1 ? number : token));
    }
    __device__ __forceinline__ void write(int count, const float (&loaded)[2]) const {
        if (int(threadIdx.x) >= count) return;
        if (DECAY == 1) numbers[threadIdx.x * 2] = exponential(loaded[0]);
        if (BETA) numbers[threadIdx.x * 2 + 1] = loaded[1];
    }
};

struct State {
    float s[ROWS][COLUMNS];
    float factors[DECAY == 2 ? ROWS : 1];  // without RESULTS, the products of decays
    int lane;

    // Multiplies a product by a decay. NaN stands for products of a factor above 1, which may overflow, or leave the
    // range of fp32 and return, where the states do not.
    __device__ __forceinline__ static void follow(float& product, float decay) {
        product = decay > 1.0f ? __uint_as_float(0x7fffffffu) : product * decay;
    }

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

    template <class U>
    __device__ __forceinline__ void rows_of(const U* from, float (&to)[ROWS]) const {
#pragma unroll
        for (int r = 0; r < ROWS; r += RUN) {
            float own[RUN] = {};
            if (row(r) < SIZE) read_shared(from + row(r), own);
#pragma unroll
            for (int i = 0; i < RUN; ++i) to[r + i] = own[i];
        }
    }

    // Adds a token, which has two `numbers` and, in `w`, the thread's columns of its values.
    __device__ __forceinline__ void add(const T* token, const float* numbers, float (&w)[COLUMNS]) {
        if constexpr (DECAY == 1) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) s[r][c] *= numbers[0];
            if (!RESULTS) follow(factors[0], numbers[0]);
        } else if constexpr (DECAY == 2) {
            float own[ROWS];
            rows_of(reinterpret_cast<const GATE_T*>(token + DECAYS), own);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                own[r] = exponential(own[r]);
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) s[r][c] *= own[r];
                if (!RESULTS) follow(factors[r], own[r]);
            }
        }
        float k[ROWS];
        rows_of(token, k);
        if constexpr (BETA) {
            float found[COLUMNS];
            multiply(k, found);
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) w[c] = numbers[1] * (w[c] - found[c]);
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
    const auto each_access = [&](auto visit) {  // visits rows and columns of this thread
#pragma unroll
        for (int r = 0; r < ROWS; r += DOWN)
#pragma unroll
            for (int c = 0; c < COLUMNS; c += ACROSS)
                visit(r, c, state.row(r) < SIZE && column + c < VALUE_SIZE,
                      matrix + state_index(state.row(r), column + c));
    };
    Pack<STATE_T, STATE_WIDTH> past[ROWS / DOWN][COLUMNS / ACROSS] = {};
    each_access([&](int r, int c, bool inside, i64 at) {
        if (PAST && inside) past[r / DOWN][c / ACROSS] = load_once<STATE_WIDTH>(p.past + at);
    });
    // The state arrives while the first tokens are copied.
    float loaded[2] = {};
    Tokens(0).copy(p, begin, min(TOKENS, length), state_head, first);
    Tokens(0).load(p, begin, min(TOKENS, length), state_head, loaded);
    each_access([&](int r, int c, bool, i64) {
        float values[STATE_WIDTH];
        unpack(past[r / DOWN][c / ACROSS], values);
#pragma unroll
        for (int i = 0; i < STATE_WIDTH; ++i) state.s[r + i % DOWN][c + i % ACROSS] = values[i];
    });
#pragma unroll
    for (float& factor : state.factors) factor = 1.0f;
    Tokens(0).write(min(TOKENS, length), loaded);
    for (int t = 0; t < length; t += TOKENS) {
        const Tokens now(t / TOKENS % BUFFERS), later((t / TOKENS + 1) % BUFFERS);
        const int count = min(TOKENS, length - t), next = min(TOKENS, length - t - TOKENS);
        const i64 start = begin + t;
        wait_for_copies();
        __syncthreads();
        if (BUFFERS == 2) {
            later.copy(p, start + TOKENS, next, state_head, first);
            later.load(p, start + TOKENS, next, state_head, loaded);
        }
        for (int i = 0; i < count; ++i) {
            const T* const token = now.elements + i * PITCH;
            float w[COLUMNS];
            if constexpr (SIZE % 4 == 0) read_shared(token + VALUES + within, w);
            else {
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) {
                    float one[1];
                    read_shared(token + VALUES + within + c, one);
                    w[c] = one[0];
                }
            }
            state.add(token, now.numbers + i * 2, w);
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
        if (BUFFERS == 1) {
            __syncthreads();
            later.copy(p, start + TOKENS, next, state_head, first);
            later.load(p, start + TOKENS, next, state_head, loaded);
        }
        later.write(next, loaded);
    }
    each_access([&](int r, int c, bool inside, i64 at) {
        float values[STATE_WIDTH];
#pragma unroll
        for (int i = 0; i < STATE_WIDTH; ++i) values[i] = state.s[r + i % DOWN][c + i % ACROSS];
        if ((PRESENT || !RESULTS) && inside) store<false>(p.present + at, values);
    });
    if (RESULTS || column != 0 || !DECAY) return;
    f32* const factors = p.factors + ((i64)part * STATE_HEADS + state_head) * (DECAY == 2 ? SIZE : 1);
    if (DECAY == 1 && state.lane == 0) store<false>(factors, state.factors);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const float own[1] = {state.factors[DECAY == 2 ? r : 0]};
        if (DECAY == 2 && state.row(r) < SIZE) store<false>(factors + state.row(r), own);
    }
}
