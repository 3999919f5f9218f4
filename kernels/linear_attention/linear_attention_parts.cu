// The states of linear attention before each part of a sequence, of the states that the parts' own tokens leave behind.
//
// A sequence is split into parts in float32, and where batches and heads are too few for a GPU. First,
// linear_attention_products.cu or, without tensor cores, linear_attention_tokens.cu computes for all parts at once the
// state that a part's tokens leave behind if it begins with 0, and the product of its decays. From these, this kernel
// computes the state with which each part begins, one part after another. Then the first kernel computes the results
// of all parts at once.
//
// A part with a factor above 1, or whose own state overflows, is computed here token after token: its own state and the
// product may overflow where their sum with the state before does not.
//
// Macros: T, GATE_T, STATE_T, STATES_BY_COLUMN; STATE (elements of a state), COLUMNS (of it), STATE_HEADS, K_HEADS; DECAY, PAST, PRESENT as in
// linear_attention_tokens.cu; PART (tokens of a part); THREADS.
#include "types.cuh"

using i64 = long long;

constexpr int ROWS = STATE / COLUMNS;
constexpr int AHEAD = 8;  // parts that are loaded at once

struct Operands {
    const T *query, *key, *value;
    const GATE_T *decay, *beta;
};

template <class T>
__device__ __forceinline__ float element_of(const T* from) {
    float value[1];
    unpack(load_once<1>(from), value);
    return value[0];
}

// Returns an element of the state of a head after `count` tokens from token `first` of all sequences on.
__device__ float after_tokens(const Operands& p, float state, i64 first, int count, int head, int element) {
    const int row = element / COLUMNS, column = element % COLUMNS;
    for (i64 token = first; token < first + count; ++token) {
        const i64 number = token * STATE_HEADS + head;
        if (DECAY) state *= exp2_fast(element_of(p.decay + (DECAY == 2 ? number * ROWS + row : number)) * LOG2_E);
        const T* const key = p.key + (token * K_HEADS + head / (STATE_HEADS / K_HEADS)) * ROWS + row;
        state = fmaf(element_of(key), element_of(p.value + number * COLUMNS + column), state);
    }
    return state;
}

// `states` (sequences, parts, STATE_HEADS, STATE) holds what the tokens of parts leave behind, and then the states
// before them. `decays` are the products of the parts' decays. A thread has one element of all states of a head.
extern "C" __global__ void __launch_bounds__(THREADS)
    linear_attention_parts(const __grid_constant__ Operands p, const STATE_T* past, STATE_T* present, f32* states,
                           const f32* decays, int length, int parts) {
    release_successor();
    wait_for_predecessor();
    const i64 block = blockIdx.x;
    constexpr int BLOCKS = (STATE + THREADS - 1) / THREADS;
    const int element = int(block % BLOCKS) * THREADS + int(threadIdx.x);
    const i64 own = block / BLOCKS;
    const i64 sequence = own / STATE_HEADS;
    const int head = int(own % STATE_HEADS);
    if (element >= STATE) return;
    const int within = STATES_BY_COLUMN ? element % COLUMNS * ROWS + element / COLUMNS : element;
    float state = 0.0f;
    if (PAST) state = element_of(past + own * STATE + within);
    const int changed = parts - !PRESENT;  // nothing reads the state after the last part
    for (int first = 0; first < parts; first += AHEAD) {
        float added[AHEAD] = {}, factors[AHEAD] = {};
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const i64 of = (sequence * parts + first + i) * STATE_HEADS + head;
            if (first + i >= changed) continue;
            added[i] = element_of(states + of * STATE + element);
            factors[i] = DECAY == 2 ? element_of(decays + of * ROWS + element / COLUMNS) : 1.0f;
            if (DECAY == 1) factors[i] = element_of(decays + of);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int part = first + i;
            if (part >= parts) break;
            const float before[1] = {state};
            store<false>(states + ((sequence * parts + part) * STATE_HEADS + head) * STATE + element, before);
            if (factors[i] <= 1.0f && fabsf(added[i]) <= LARGEST) state = fmaf(factors[i], state, added[i]);
            else
                state = after_tokens(p, state, sequence * length + part * PART, min(PART, length - part * PART), head,
                                     element);
        }
    }
    const float value[1] = {state};
    if (PRESENT) store<false>(present + own * STATE + within, value);
}
