// All steps of an LSTM (GATES 4), GRU (3) or RNN (1) of one or two directions. The products of the inputs and W are
// operands; the kernel multiplies the states with R, whose elements stay in registers and shared memory.
//
// A cluster runs one direction of BATCH sequences. Each of its blocks computes UNITS units of the state: it multiplies
// the rows of R for all gates of these units with the states of all units, and sends its new states to the other blocks.
// Sequences and directions do not depend on each other, so clusters never wait for other clusters.
//
//   T          storage type          PRECISE    1: T is f32
//   HIDDEN     units of the state    DIRECTIONS, REVERSED (1: the first direction is reversed)
//   WARPS, SPLIT, TILES, STEPS       warp w multiplies TILES tiles of 16 rows with STEPS parts, 64 bytes each, of the
//                                    states; SPLIT warps share the tiles, and each has its own parts
//   HELD       parts of R that a thread holds in registers; the others are in shared memory
//   WIDTH      elements in a vector access to R            WEIGHTS_CONSTANT   1: no kernel writes R
//   BY_MMA        1: products by mma (of f32 as TF32); 0: products of f32 by FMA
//   RESET_FIRST  1: GRU multiplies states with the reset gate before R (linear_before_reset is 0)
//   COUPLED    1: the forget gate is 1 minus the input gate
//   CLIP       1: arguments of activations are clipped
//   ACTIVATION_1, _2, _3, ALPHA_1, BETA_1 ...   activations f, g, h
//   HAS_BIAS, HAS_PEEPHOLES, HAS_LENGTHS, HAS_H, HAS_C   1: the operand is present
#include "types.cuh"
#include "cluster.cuh"
#include "gemm_multiply.cuh"
#include "activations.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int EACH = 4 / int(sizeof(T));    // elements of a word
constexpr int CHUNK = 16 / int(sizeof(T));  // elements of 16 bytes
constexpr int PART = 4 * CHUNK;             // elements of a part: 64 bytes, 16 for each of four lanes
constexpr int ROWS = (GATES * UNITS + 15) / 16 * 16;
constexpr int TILE_PITCH = WARPS / SPLIT;  // between the tiles of a warp
constexpr int STORED = STEPS - HELD;
constexpr int PARTS_BYTES = 64 * SPLIT * STEPS;
constexpr int PITCH = PARTS_BYTES + (PARTS_BYTES % 128 ? 0 : 64);  // bytes of a row of states: no bank conflicts
constexpr int SUMS_PITCH = ROWS + 4;                               // no bank conflicts between columns
constexpr int ITEMS = (UNITS * BATCH + THREADS - 1) / THREADS;     // units of all sequences, for each thread
constexpr int STATES = RESET_FIRST ? 3 : 2;
constexpr int BIASES = GATES == 3 ? 4 : GATES;  // one for each gate; a GRU keeps two for its candidate, of W and of R
constexpr int RESET_TILES = 2 * UNITS / 16;     // tiles of the gates before the candidate

static_assert(UNITS % 2 == 0 && WARPS % SPLIT == 0 && TILES * TILE_PITCH * 16 >= ROWS);
static_assert(!RESET_FIRST || (GATES == 3 && UNITS % 16 == 0));
static_assert(BY_MMA ? BATCH % 8 == 0 : PRECISE);

struct Operands {
    const T *x, *r, *bias, *peepholes, *h, *c;
    const int* lengths;
};
struct Results { T *y, *h, *c; };
struct Memory {
    Inbox inboxes[4];  // of the states
    char states[STATES][BATCH * PITCH];
    float sums[SPLIT][BATCH][SUMS_PITCH];
    float biases[BIASES][UNITS];
    float peepholes[3][UNITS];
};
constexpr int MEMORY_BYTES = (int(sizeof(Memory)) + 15) / 16 * 16;
extern __shared__ uint4 recurrent_memory[];

struct Weights {
    u32 words[8];  // four of row lane / 4 of a tile, and four of the row 8 below it
};

// Returns 16 bytes of a row of R, which has HIDDEN elements; `row` counts the rows of this block.
__device__ __forceinline__ Pack<T, CHUNK> weights_of_row(const T* r, int row, int first_unit, int k) {
    Pack<T, CHUNK> found = {};
    const int gate = row / UNITS, unit = first_unit + row % UNITS;
    if (gate >= GATES || unit >= HIDDEN || k >= HIDDEN) return found;
    const T* from = r + (gate * HIDDEN + unit) * HIDDEN + k;
    if constexpr (WIDTH == CHUNK) return load_cached<CHUNK, WEIGHTS_CONSTANT>(from);
    float values[CHUNK] = {};
#pragma unroll
    for (int i = 0; i < CHUNK; ++i)
        if (k + i < HIDDEN) {
            float one[1];
            unpack(load_cached<1, WEIGHTS_CONSTANT>(from + i), one);
            values[i] = one[0];
        }
    return pack<T, CHUNK>(values);
}

// Returns a word as mma reads it.
__device__ __forceinline__ u32 rounded(u32 word) {
    if constexpr (PRECISE && BY_MMA) return nearest_tf32(word);
    return word;
}

// Returns this thread's elements of a part of R.
__device__ __forceinline__ Weights load_weights(const T* r, int first_unit, int tile, int step) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = (warp / SPLIT + tile * TILE_PITCH) * 16 + lane / 4;
    const int k = (warp % SPLIT * STEPS + step) * PART + lane % 4 * CHUNK;
    const Pack<T, CHUNK> low = weights_of_row(r, row, first_unit, k);
    const Pack<T, CHUNK> high = weights_of_row(r, row + 8, first_unit, k);
    Weights found;
#pragma unroll
    for (int i = 0; i < 4; ++i) found.words[i] = rounded(low.words[i]), found.words[i + 4] = rounded(high.words[i]);
    return found;
}

// Whether tile number `tile` of this warp is one of the block's tiles [FIRST, END).
template <int FIRST, int END>
__device__ __forceinline__ bool is_within(int tile) {
    const int found = int(threadIdx.x) / 32 / SPLIT + tile * TILE_PITCH;
    return (FIRST == 0 || found >= FIRST) && (END == TILES * TILE_PITCH || found < END);
}

#if BY_MMA

constexpr int COLUMN_TILES = BATCH / 8;
// Sums that do not depend on each other, if a warp has one tile: a product begins every eight clocks, but takes over
// thirty. On an H200, more sums of two tiles cost more time than they saved, because they need registers of weights.
constexpr int CHAINS = TILES * COLUMN_TILES > 1 ? 1 : STEPS > 1 ? 4 : 2;

struct Sums { float of[CHAINS][TILES][COLUMN_TILES][4]; };

// Adds the products of a part of R and a part of the states; `step` is known to the compiler.
template <int FIRST, int END>
__device__ __forceinline__ void multiply_part(Sums& sums, const Weights (&weights)[TILES], const char* states,
                                              int step) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int column = 0; column < COLUMN_TILES; ++column) {
        const uint4 h = *reinterpret_cast<const uint4*>(states + (column * 8 + lane / 4) * PITCH + lane % 4 * 16);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            if (RESET_FIRST && !is_within<FIRST, END>(tile)) continue;
            const u32(&w)[8] = weights[tile].words;
            const u32 first[4] = {w[0], w[4], w[1], w[5]}, second[4] = {w[2], w[6], w[3], w[7]};
            multiply(T(), sums.of[2 * step % CHAINS][tile][column], first, h.x, h.y);
            multiply(T(), sums.of[(2 * step + 1) % CHAINS][tile][column], second, h.z, h.w);
        }
    }
}

// Writes the sums of a tile of this warp to `to`, which has the row lane / 4 of the tile.
__device__ __forceinline__ void store_tile(Sums& sums, int tile, bool wanted, float (*to)[SUMS_PITCH]) {
#pragma unroll
    for (int column = 0; column < COLUMN_TILES; ++column)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float sum = sums.of[0][tile][column][j];
#pragma unroll
            for (int chain = 1; chain < CHAINS; ++chain) sum += sums.of[chain][tile][column][j];
            if (wanted) to[column * 8 + threadIdx.x % 4 * 2 + j % 2][j / 2 * 8] = sum;
        }
}

#else

struct Sums { float of[TILES][2][BATCH]; };

template <int FIRST, int END>
__device__ __forceinline__ void multiply_part(Sums& sums, const Weights (&weights)[TILES], const char* states, int) {
#pragma unroll
    for (int n = 0; n < BATCH; ++n) {
        const float4 h = *reinterpret_cast<const float4*>(states + n * PITCH + threadIdx.x % 4 * 16);
#pragma unroll
        for (int i = 0; i < 2 * TILES; ++i) {
            if (RESET_FIRST && !is_within<FIRST, END>(i / 2)) continue;
            const u32* w = weights[i / 2].words + i % 2 * 4;
            float& sum = sums.of[i / 2][i % 2][n];
            sum = fmaf(__uint_as_float(w[0]), h.x, sum);
            sum = fmaf(__uint_as_float(w[1]), h.y, sum);
            sum = fmaf(__uint_as_float(w[2]), h.z, sum);
            sum = fmaf(__uint_as_float(w[3]), h.w, sum);
        }
    }
}

__device__ __forceinline__ void store_tile(Sums& sums, int tile, bool wanted, float (*to)[SUMS_PITCH]) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < BATCH; ++n) {
            float sum = sums.of[tile][half][n];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            if (wanted && threadIdx.x % 4 == n % 4) to[n][half * 8] = sum;
        }
}

#endif

// Multiplies the rows of R in the tiles [FIRST, END) with the states, and returns once all sums are in shared memory.
template <int FIRST, int END>
__device__ __forceinline__ void multiply_states(Memory& memory, const char* states,
                                                const Weights (&held)[HELD > 0 ? HELD : 1][TILES],
                                                const uint4* stored) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const char* from = states + warp % SPLIT * STEPS * 64;
    Sums sums = {};
#pragma unroll
    for (int step = 0; step < HELD; ++step) multiply_part<FIRST, END>(sums, held[step], from + step * 64, step);
#pragma unroll 2
    for (int step = 0; step < STORED; ++step) {
        Weights weights[TILES];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint4 part = stored[((warp * STORED + step) * TILES + tile) * 64 + half * 32 + lane];
                u32* words = weights[tile].words + 4 * half;
                words[0] = part.x, words[1] = part.y, words[2] = part.z, words[3] = part.w;
            }
        multiply_part<FIRST, END>(sums, weights, from + (HELD + step) * 64, 0);
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        const int tile = warp / SPLIT + i * TILE_PITCH, row = tile * 16 + lane / 4;
        float (*to)[SUMS_PITCH] = reinterpret_cast<float (*)[SUMS_PITCH]>(&memory.sums[warp % SPLIT][0][row]);
        store_tile(sums, i, is_within<FIRST, END>(i), to);
    }
    __syncthreads();
}

// Sends the state of a unit to all blocks. Neighbouring lanes have neighbouring units; each of them sends the word of
// both to half of the blocks, if elements have 16 bits.
__device__ __forceinline__ void send(Memory& memory, int buffer, int n, int unit, bool in_block, float value) {
    const int own = EACH == 1 ? 0 : threadIdx.x % 2;  // which unit of a word the lane has
    float all[EACH] = {value};
    if constexpr (EACH == 2) {
        const float other = __shfl_xor_sync(0xffffffffu, value, 1);
        all[0] = own ? other : value, all[EACH - 1] = own ? value : other;
    }
    const float word = __uint_as_float(rounded(pack<T, EACH>(all).words[0]));
    float* to = reinterpret_cast<float*>(memory.states[buffer] + n * PITCH) + unit / EACH;
    if (in_block && unit - own < HIDDEN)
        for (int peer = own; peer < CLUSTER; peer += EACH) send_peer(to, peer, word, memory.inboxes[buffer]);
}

__device__ __forceinline__ float element(const T* from) {
    float value[1];
    unpack(load_cached<1>(from), value);
    return value[0];
}

__device__ __forceinline__ float clipped(float x, float limit) {
    return !CLIP ? x : x < -limit ? -limit : x > limit ? limit : x;
}

// A unit of a sequence: its place, and its state.
struct Unit {
    int n, u, length;      // sequence and unit, counted from the first ones of the block, and steps of the sequence
    bool in_block, there;  // whether the block has the sequence, and whether it has the unit
    int row;               // of the batch
    float h, c;
    u32 x[GATES];  // products of the next step's inputs and W
};

// The sums and states of one unit.
struct Step {
    Memory& memory;
    const Unit& at;
    float limit;

    // Returns the argument of a gate: the sum of its biases, of the product of x and, unless `of_x`, of the states.
    __device__ __forceinline__ float argument(int gate, bool of_x = false) const {
        float value[1];
        Pack<T, 1> x = {};
        x.words[0] = at.x[gate];
        unpack(x, value);
        return value[0] + memory.biases[gate][at.u] + (of_x ? 0.0f : product(gate));
    }
    __device__ __forceinline__ float product(int gate) const {
        float sum = 0.0f;
#pragma unroll
        for (int split = 0; split < SPLIT; ++split) sum += memory.sums[split][at.n][gate * UNITS + at.u];
        return sum;
    }
    __device__ __forceinline__ float peephole(int gate, float c) const {
        return HAS_PEEPHOLES ? memory.peepholes[gate][at.u] * c : 0.0f;
    }
    __device__ __forceinline__ float f(float x) const {
        return activate::ACTIVATION_1(clipped(x, limit), ALPHA_1, BETA_1);
    }
    __device__ __forceinline__ float g(float x) const {
        return activate::ACTIVATION_2(clipped(x, limit), ALPHA_2, BETA_2);
    }
};

// Replaces h and c of a unit by their values after a step. `update` is the update gate of a GRU with RESET_FIRST.
__device__ __forceinline__ void advance(const Step& step, float update, float& h, float& c) {
    if constexpr (GATES == 4) {
        const float in = step.f(step.argument(0) + step.peephole(0, c));
        const float forget = COUPLED ? 1.0f - in : step.f(step.argument(2) + step.peephole(2, c));
        c = forget * c + in * step.g(step.argument(3));
        const float out = step.f(step.argument(1) + step.peephole(1, c));
        h = out * activate::ACTIVATION_3(c, ALPHA_3, BETA_3);  // onnxruntime does not clip c
    } else if constexpr (GATES == 3) {
        float candidate;
        if constexpr (RESET_FIRST) {
            candidate = step.g(step.argument(2) + step.memory.biases[3][step.at.u]);
        } else {
            update = step.f(step.argument(0));
            const float reset = step.f(step.argument(1));
            candidate = step.g(step.argument(2, true) + reset * (step.product(2) + step.memory.biases[3][step.at.u]));
        }
        h = (1.0f - update) * candidate + update * h;
    } else {
        h = step.f(step.argument(0));
    }
}

// What a block computes: units of some sequences in one direction. x is (steps, batch, DIRECTIONS, GATES, HIDDEN), y is
// (steps, DIRECTIONS, batch, HIDDEN), and states are (DIRECTIONS, batch, HIDDEN).
struct Share {
    int direction, first_unit, first_row, steps, batch;

    // Returns the position in x and y of a step of a sequence; steps after its end are not reversed.
    __device__ __forceinline__ u64 position(const Unit& at, int step) const {
        return direction != REVERSED && step < at.length ? at.length - 1 - step : step;
    }
    __device__ __forceinline__ u64 state(const Unit& at) const {
        return u64(direction * batch + at.row) * HIDDEN + first_unit + at.u;
    }
    __device__ __forceinline__ void load_x(const T* x, Unit& at, int step) const {
        if (!at.there || step >= at.length) return;
        const u64 row = position(at, step) * batch + at.row;
        const T* from = x + (row * DIRECTIONS + direction) * (GATES * HIDDEN) + first_unit + at.u;
#pragma unroll
        for (int gate = 0; gate < GATES; ++gate) at.x[gate] = load_cached<1>(from + gate * HIDDEN).words[0];
    }
    __device__ __forceinline__ void store_y(T* y, const Unit& at, int step) const {
        const float value[1] = {step < at.length ? at.h : 0.0f};
        const u64 row = (position(at, step) * DIRECTIONS + direction) * batch + at.row;
        if (at.there) store<false>(y + row * HIDDEN + first_unit + at.u, value);
    }
};

// Loads this thread's parts of R to registers and to shared memory.
__device__ __forceinline__ void keep_weights(const T* r, int first_unit, Weights (&held)[HELD > 0 ? HELD : 1][TILES],
                                             uint4* stored) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int step = 0; step < HELD; ++step)
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) held[step][tile] = load_weights(r, first_unit, tile, step);
#pragma unroll 1
    for (int step = 0; step < STORED; ++step)
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const Weights weights = load_weights(r, first_unit, tile, HELD + step);
            uint4* to = stored + ((warp * STORED + step) * TILES + tile) * 64 + lane;
            to[0] = {weights.words[0], weights.words[1], weights.words[2], weights.words[3]};
            to[32] = {weights.words[4], weights.words[5], weights.words[6], weights.words[7]};
        }
}

// Writes the initial states, or zeros, and the biases and peepholes to shared memory.
__device__ __forceinline__ void fill_memory(Memory& memory, const Operands& operands, const Share& share) {
    for (int at = threadIdx.x; at < STATES * BATCH * PITCH / 4; at += THREADS)
        reinterpret_cast<u32*>(memory.states)[at] = 0;
    for (int u = threadIdx.x; u < UNITS; u += THREADS) {
        const int unit = share.first_unit + u;
#pragma unroll
        for (int gate = 0; gate < BIASES; ++gate) {
            float sum = 0.0f;
            if (HAS_BIAS && unit < HIDDEN) {
                const T* bias = operands.bias + (share.direction * 2 * GATES + min(gate, GATES - 1)) * HIDDEN + unit;
                const bool of_w = gate < GATES, of_r = GATES != 3 || gate != 2;
                sum = (of_w ? element(bias) : 0.0f) + (of_r ? element(bias + GATES * HIDDEN) : 0.0f);
            }
            memory.biases[gate][u] = sum;
        }
#pragma unroll
        for (int gate = 0; gate < 3; ++gate)
            if (HAS_PEEPHOLES && unit < HIDDEN)
                memory.peepholes[gate][u] = element(operands.peepholes + (share.direction * 3 + gate) * HIDDEN + unit);
    }
    __syncthreads();
    for (int at = threadIdx.x; HAS_H && at < BATCH * HIDDEN; at += THREADS) {
        const int n = at / HIDDEN, unit = at % HIDDEN;
        if (share.first_row + n >= share.batch) continue;
        const T* from = operands.h + u64(share.direction * share.batch + share.first_row + n) * HIDDEN + unit;
        reinterpret_cast<T*>(memory.states[0] + n * PITCH)[unit].bits = rounded(load_cached<1>(from).words[0]);
    }
}

// Returns unit number `item` of the block before the first step.
__device__ __forceinline__ Unit first_state(const Operands& operands, const Share& share, int item) {
    Unit at = {};
    at.n = item / UNITS, at.u = item % UNITS, at.row = share.first_row + at.n;
    at.in_block = item < UNITS * BATCH && at.row < share.batch;
    at.there = at.in_block && share.first_unit + at.u < HIDDEN;
    at.length = share.steps;
    if (!at.there) return at;
    if constexpr (HAS_LENGTHS) at.length = max(0, min(operands.lengths[at.row], share.steps));
    if constexpr (HAS_H) at.h = element(operands.h + share.state(at));
    if constexpr (HAS_C) at.c = element(operands.c + share.state(at));
    share.load_x(operands.x, at, 0);
    return at;
}

// `slices` clusters run the sequences of a direction.
extern "C" __global__ void __launch_bounds__(THREADS, 1) CLUSTER_DIMS
    recurrent(Operands operands, Results results, int steps, int batch, int slices, float limit) {
    Memory& memory = *reinterpret_cast<Memory*>(recurrent_memory);
    uint4* stored = recurrent_memory + MEMORY_BYTES / 16;
    const int cluster = int(blockIdx.x) / CLUSTER, direction = cluster / slices;
    const Share share = {direction, int(cluster_rank()) * UNITS, cluster % slices * BATCH, steps, batch};

    // The bytes of the states of all sequences after a step.
    const unsigned bytes = 4 * min(BATCH, batch - share.first_row) * ((HIDDEN + EACH - 1) / EACH);
    for (int i = 0; threadIdx.x == 0 && i < STATES; ++i) {
        open_inbox(memory.inboxes[i]);
        expect(memory.inboxes[i], bytes);
    }
    Weights held[HELD > 0 ? HELD : 1][TILES];
    if constexpr (!WEIGHTS_CONSTANT) wait_for_predecessor();
    keep_weights(operands.r + direction * (GATES * HIDDEN * HIDDEN), share.first_unit, held, stored);
    if constexpr (WEIGHTS_CONSTANT) wait_for_predecessor();
    fill_memory(memory, operands, share);
    cluster_arrive();  // other blocks may send states once the memory for them is filled
    Unit units[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) units[i] = first_state(operands, share, threadIdx.x + i * THREADS);
    cluster_wait();

#pragma unroll 1
    for (int s = 0; s < steps; ++s) {
        const int now = s % 2, next = 1 - now;
        if (s > 0) {
            receive(memory.inboxes[now], (s - 1) / 2);
            if (threadIdx.x == 0) expect(memory.inboxes[now], bytes);
        }
        const char* states = memory.states[now];
        float update[ITEMS] = {};
        if constexpr (RESET_FIRST) {
            multiply_states<0, RESET_TILES>(memory, states, held, stored);
            states = memory.states[STATES - 1];
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                const Unit& at = units[i];
                const Step step = {memory, at, limit};
                if (at.there) update[i] = step.f(step.argument(0));
                const float reset = at.there ? step.f(step.argument(1)) * at.h : 0.0f;
                send(memory, STATES - 1, at.n, share.first_unit + at.u, at.in_block, reset);
            }
            receive(memory.inboxes[STATES - 1], s);
            if (threadIdx.x == 0) expect(memory.inboxes[STATES - 1], bytes);
        }
        multiply_states<RESET_FIRST ? RESET_TILES : 0, ROWS / 16>(memory, states, held, stored);
        // No block reads the previous states any more: each block sent the present ones after it had read those.
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            Unit& at = units[i];
            if (at.there && s < at.length) advance({memory, at, limit}, update[i], at.h, at.c);
            const bool is_read = at.in_block && s + 1 < steps;  // a block may end before a state that it does not read
            send(memory, next, at.n, share.first_unit + at.u, is_read, at.h);
        }
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            share.store_y(results.y, units[i], s);
            share.load_x(operands.x, units[i], s + 1);
        }
    }
    release_successor();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const Unit& at = units[i];
        const float h[1] = {at.length ? at.h : 0.0f}, c[1] = {at.length ? at.c : 0.0f};  // like onnxruntime
        if (at.there && results.h) store<false>(results.h + share.state(at), h);
        if (GATES == 4 && at.there && results.c) store<false>(results.c + share.state(at), c);
    }
}
