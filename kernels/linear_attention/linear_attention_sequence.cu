// Linear attention by chunks of 64 tokens in order: see linear_attention.cuh. linear_attention_chunks.cu runs before.
//
// One warp keeps 16 columns of the state of a head in fp32 registers, transposed, so that operands of its products need
// no exchange with other lanes, and passes these operands to another warp, which computes the results of the chunk one
// step later. Further warps meanwhile copy later chunks to shared memory.
//
// Chunks round states and rows to T, and products of factors above 1 lose what states keep. If a result or a state is
// not finite, which such factors also make it, the block computes its columns once more, token after token in fp32.
//
// Macros: those of linear_attention.cuh; STATE_T, STATES_BY_COLUMN; PAST, PRESENT; WARPS that have states; STAGES of shared memory, 2 or more.
#include "linear_attention.cuh"

constexpr int COPYING = 128;  // threads that copy
constexpr int TILES = VALUE_SIZE / (16 * WARPS);
// Offsets in a stage. It has the data of one chunk for the next state, and of the chunk before for the results.
constexpr int K_TILE = 0, WEIGHTS = CHUNK * PITCH, ROWS = WEIGHTS + (BETA ? SIZE * TOKEN_PITCH : 0);
constexpr int FACTORS = ROWS + WARPS * 16 * TOKEN_PITCH, Q_TILE = FACTORS + CHUNK * 8, SCORES = Q_TILE + CHUNK * PITCH;
constexpr int Q_FACTORS = SCORES + CHUNK * TOKEN_PITCH, STAGE = Q_FACTORS + CHUNK * 8;
// The operands that a warp passes on: of the state and of u. Two buffers follow the stages.
constexpr int STATE_WORDS = SIZE / 16, PASSED = (STATE_WORDS + CHUNK / 16) * 32 * 16;

__device__ __forceinline__ i64 state_index(int row, int column) {
    return STATES_BY_COLUMN ? (i64)column * SIZE + row : row * VALUE_SIZE + column;
}

struct States {
    const STATE_T* past;
    STATE_T* present;
    T* y;
};

// Rounds fp32 sums to operands of the next products.
template <int N>
__device__ __forceinline__ void round_sums(u32 (&to)[N / 2][4], const float (&sums)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) to[n / 2][n % 2 * 2 + half] = narrow(T(), sums[n] + 2 * half);
}

struct Block {
    Operands p;
    Scratch from;
    int length, chunks, batch, head, state_head, column;  // `column`: the block's first one

    // Copies COUNT rows that have an element for each token of a chunk.
    template <int COUNT>
    __device__ __forceinline__ void copy_columns(u32 to, const T* columns) const {
        for (int i = threadIdx.x; i < COUNT * 8; i += COPYING)
            copy_async<16>(to + i / 8 * TOKEN_PITCH + i % 8 * 16, reinterpret_cast<const char*>(columns + i * 8), 16);
    }

    __device__ __forceinline__ void copy_factors(u32 to, i64 own) const {
        const f32* const factors = from.factors + own * CHUNK * 2;
        for (int i = threadIdx.x; i < CHUNK / 2; i += COPYING)
            copy_async<16>(to + i * 16, reinterpret_cast<const char*>(factors + i * 4), 16);
    }

    // Starts the copies for a step: the data of chunk `step` for the state, and of the chunk before for the results.
    __device__ __forceinline__ void copy(int step) const {
        const u32 stage = shared_address(shared_memory()) + step % STAGES * STAGE;
        const i64 state = ((i64)batch * STATE_HEADS + state_head) * chunks;
        if (step < chunks) {
            const i64 own = state + step;
            if (BETA) copy_columns<SIZE>(stage + WEIGHTS, from.weights + own * SIZE * CHUNK);
            copy_columns<WARPS * 16>(stage + ROWS, from.rows + (own * VALUE_SIZE + column) * CHUNK);
            copy_factors(stage + FACTORS, own);
            const i64 first = (i64)batch * length + step * CHUNK;
            const T* const k = p.key + (first * K_HEADS + state_head / (STATE_HEADS / K_HEADS)) * SIZE;
            copy_rows<SIZE, PITCH, COPYING>(stage + K_TILE, k, K_HEADS * SIZE, min(CHUNK, length - step * CHUNK));
        }
        if (step > 0 && step <= chunks) {
            const int chunk = step - 1;
            copy_factors(stage + Q_FACTORS, state + chunk);
            const i64 first = (i64)batch * length + chunk * CHUNK;
            const T* const q = p.query + (first * Q_HEADS + head / (HEADS / Q_HEADS)) * SIZE;
            copy_rows<SIZE, PITCH, COPYING>(stage + Q_TILE, q, Q_HEADS * SIZE, min(CHUNK, length - chunk * CHUNK));
            const T* const scores = from.scores + (((i64)batch * HEADS + head) * chunks + chunk) * CHUNK * CHUNK;
            copy_columns<CHUNK>(stage + SCORES, scores);
        }
        commit_copies();
    }

    __device__ __forceinline__ void copy_all() const {
        for (int step = 0; step < STAGES - 1; ++step) copy(step);
        for (int step = 0; step <= chunks; ++step) {
            wait_for_groups<STAGES - 2>();
            __syncthreads();
            copy(step + STAGES - 1);
        }
    }

    // Returns the address at which a warp passes its operands on in a step; each operand has 16 bytes for each lane.
    __device__ __forceinline__ char* passed(int warp, int step) const {
        return shared_memory() + STAGES * STAGE + (step % 2 * WARPS + warp) * PASSED + threadIdx.x % 32 * 16;
    }
};

template <int N>
__device__ __forceinline__ void pass(char* to, const u32 (&words)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; ++i)
        *reinterpret_cast<uint4*>(to + i * 512) = {words[i][0], words[i][1], words[i][2], words[i][3]};
}
template <int N>
__device__ __forceinline__ void take(u32 (&words)[N][4], const char* from) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const uint4 own = *reinterpret_cast<const uint4*>(from + i * 512);
        words[i][0] = own.x, words[i][1] = own.y, words[i][2] = own.z, words[i][3] = own.w;
    }
}

// Adds S^T times the weights to u.
__device__ __forceinline__ void retrieve(float (&u)[CHUNK / 8][4], const u32 (&state)[SIZE / 16][4], u32 weights) {
    pipeline<SIZE / 16, CHUNK / 16>(
        [=](u32(&b)[4], int step, int i) { load_right(b, weights, TOKEN_PITCH, step, i * 16); },
        [&](u32(&b)[CHUNK / 16][4], int step) {
#pragma unroll
            for (int i = 0; i < CHUNK / 16; ++i) {
                multiply(T(), u[2 * i], state[step], b[i][0], b[i][1]);
                multiply(T(), u[2 * i + 1], state[step], b[i][2], b[i][3]);
            }
        });
}

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) <= LARGEST; }

// Writes the results of `count` tokens: scale (diag(exp(b)) Q S + P u). Returns whether all are finite.
__device__ __forceinline__ bool write_results(T* y, const u32 (&state)[SIZE / 16][4], const u32 (&u)[CHUNK / 16][4],
                                              const char* stage, int count, float scale) {
    const int lane = threadIdx.x % 32;
    const u32 address = shared_address(stage);
    const float* const factors = reinterpret_cast<const float*>(stage + Q_FACTORS);
    float sums[CHUNK / 16][2][4] = {};
    pipeline<SIZE / 16, CHUNK / 16>(
        [=](u32(&a)[4], int step, int tile) { load_left(a, address + Q_TILE, PITCH, tile * 16, step); },
        [&](u32(&a)[CHUNK / 16][4], int step) {
#pragma unroll
            for (int tile = 0; tile < CHUNK / 16; ++tile) {
                multiply(T(), sums[tile][0], a[tile], state[step][0], state[step][2]);
                multiply(T(), sums[tile][1], a[tile], state[step][1], state[step][3]);
            }
        });
#pragma unroll
    for (int tile = 0; tile < CHUNK / 16; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float decayed = factors[(tile * 16 + lane / 4 + i / 2 * 8) * 2];
            sums[tile][0][i] *= decayed, sums[tile][1][i] *= decayed;
        }
    pipeline<CHUNK / 16, CHUNK / 16>(
        [=](u32(&a)[4], int step, int tile) {
            if (tile >= step) load_left(a, address + SCORES, TOKEN_PITCH, tile * 16, step);
        },
        [&](u32(&a)[CHUNK / 16][4], int step) {
#pragma unroll
            for (int tile = step; tile < CHUNK / 16; ++tile) {
                multiply(T(), sums[tile][0], a[tile], u[step][0], u[step][2]);
                multiply(T(), sums[tile][1], a[tile], u[step][1], u[step][3]);
            }
        });
    bool finite = true;
#pragma unroll
    for (int tile = 0; tile < CHUNK / 16; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int t = tile * 16 + lane / 4 + half * 8;
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float own[2] = {sums[tile][n][2 * half] * scale, sums[tile][n][2 * half + 1] * scale};
                if (t < count) store<false>(y + (i64)t * HEADS * VALUE_SIZE + n * 8 + lane % 4 * 2, own);
                finite &= (t >= count) | (is_finite(own[0]) & is_finite(own[1]));
            }
        }
    return finite;
}

// Multiplies the state by the decays of the chunk, and each token of u by the decays after it.
__device__ __forceinline__ void decay(float (&s)[SIZE / 8][4], float (&u)[CHUNK / 8][4], const float* factors) {
    const int lane = threadIdx.x % 32;
    const float whole = factors[2 * (CHUNK - 1)];
#pragma unroll
    for (int n = 0; n < SIZE / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] *= whole;
#pragma unroll
    for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) u[n][i] *= factors[(8 * n + lane % 4 * 2 + i % 2) * 2 + 1];
}

// Adds u^T K to the state, in steps of 16 tokens and PART times 16 rows of the state.
__device__ __forceinline__ void update(float (&s)[SIZE / 8][4], const u32 (&u)[CHUNK / 16][4], u32 keys) {
    constexpr int PART = SIZE % 64 == 0 ? 4 : SIZE % 32 == 0 ? 2 : 1, PARTS = SIZE / 16 / PART;
    pipeline<CHUNK / 16 * PARTS, PART>(
        [=](u32(&b)[4], int step, int i) { load_right(b, keys, PITCH, step / PARTS, (step % PARTS * PART + i) * 16); },
        [&](u32(&b)[PART][4], int step) {
#pragma unroll
            for (int i = 0; i < PART; ++i) {
                const int n = (step % PARTS * PART + i) * 2;
                multiply(T(), s[n], u[step / PARTS], b[i][0], b[i][1]);
                multiply(T(), s[n + 1], u[step / PARTS], b[i][2], b[i][3]);
            }
        });
}

// Computes the results of all chunks, from operands that the warp of the state passes on. Returns whether all are finite.
__device__ __forceinline__ bool all_results(const Block& block, T* y, int warp, float scale) {
    bool finite = true;
    for (int step = 0; step <= block.chunks; ++step) {
        __syncthreads();
        if (step == 0) continue;
        u32 state[SIZE / 16][4], u[CHUNK / 16][4];
        const char* const from = block.passed(warp, step - 1);
        take(state, from), take(u, from + STATE_WORDS * 512);
        const i64 first = (i64)block.batch * block.length + (step - 1) * CHUNK;
        T* const to = y + (first * HEADS + block.head) * VALUE_SIZE + block.column + warp * 16;
        finite &= write_results(to, state, u, shared_memory() + step % STAGES * STAGE,
                                min(CHUNK, block.length - (step - 1) * CHUNK), scale);
    }
    return finite;
}

// Computes the state `s` after all chunks.
__device__ __forceinline__ void all_states(const Block& block, float (&s)[SIZE / 8][4], int warp) {
    const int lane = threadIdx.x % 32;
    for (int chunk = 0; chunk < block.chunks; ++chunk) {
        __syncthreads();
        const char* const stage = shared_memory() + chunk % STAGES * STAGE;
        char* const to = block.passed(warp, chunk);
        u32 state[SIZE / 16][4];
        round_sums(state, s);
        pass(to, state);
        float u[CHUNK / 8][4];
#pragma unroll
        for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = warp * 16 + lane / 4 + half * 8;
                const char* const at = stage + ROWS + row * TOKEN_PITCH + (8 * n + lane % 4 * 2) * 2;
                widen(T(), *reinterpret_cast<const u32*>(at), u[n] + 2 * half);
            }
        if (BETA) retrieve(u, state, shared_address(stage) + WEIGHTS);
        u32 added[CHUNK / 16][4];
        round_sums(added, u);
        pass(to + STATE_WORDS * 512, added);
        if (DECAY) decay(s, u, reinterpret_cast<const float*>(stage + FACTORS));
        if (DECAY) round_sums(added, u);
        update(s, added, shared_address(stage) + K_TILE);
    }
    __syncthreads();  // the last results follow
}

__device__ __forceinline__ float sum_of_lanes(float x) {
    for (int mask = 16; mask; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
    return x;
}

// Computes the block's columns token after token. A warp has some columns of the state, and a lane some of their rows.
// The block is a copy, because a reference would keep it in local memory in the loops over chunks, too.
__device__ __noinline__ void by_tokens(const Block block, const States& to, i64 matrix, float scale) {
    constexpr int ALL = COPYING / 32 + 2 * WARPS, COLUMNS = (16 * WARPS + ALL - 1) / ALL, LANE_ROWS = (SIZE + 31) / 32;
    const Operands& p = block.p;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float s[COLUMNS][LANE_ROWS] = {};
    const auto each = [=](auto visit) {
        for (int c = 0; c < COLUMNS && warp + c * ALL < 16 * WARPS; ++c)
            for (int r = 0; r < LANE_ROWS && r * 32 + lane < SIZE; ++r)
                visit(c, r, matrix + state_index(r * 32 + lane, warp + c * ALL));
    };
    if (PAST) each([&](int c, int r, i64 at) { s[c][r] = element(to.past + at); });
    for (int t = 0; t < block.length; ++t) {
        const i64 token = (i64)block.batch * block.length + t, number = token * STATE_HEADS + block.state_head;
        const T* const k = p.key + (token * K_HEADS + block.state_head / (STATE_HEADS / K_HEADS)) * SIZE;
        const T* const q = p.query + (token * Q_HEADS + block.head / (HEADS / Q_HEADS)) * SIZE;
        const float factor = DECAY ? exponential(element(p.decay + number)) : 1.0f;
        const float rate = BETA ? element(p.beta + (BETA == 1 ? number : token)) : 1.0f;
        float found[COLUMNS] = {}, y[COLUMNS] = {}, w[COLUMNS] = {};
        each([&](int c, int r, i64) {
            s[c][r] *= factor;
            found[c] = fmaf(s[c][r], element(k + r * 32 + lane), found[c]);
        });
        for (int c = 0; c < COLUMNS && warp + c * ALL < 16 * WARPS; ++c) {
            w[c] = element(p.value + number * VALUE_SIZE + block.column + warp + c * ALL);
            if (BETA) w[c] = rate * (w[c] - sum_of_lanes(found[c]));
        }
        each([&](int c, int r, i64) {
            s[c][r] = fmaf(element(k + r * 32 + lane), w[c], s[c][r]);
            y[c] = fmaf(s[c][r], element(q + r * 32 + lane), y[c]);
        });
        for (int c = 0; c < COLUMNS && warp + c * ALL < 16 * WARPS; ++c) {
            const float own[1] = {sum_of_lanes(y[c]) * scale};
            T* const row = to.y + (token * HEADS + block.head) * VALUE_SIZE + block.column;
            if (lane == 0) store<false>(row + warp + c * ALL, own);
        }
    }
    if (PRESENT && block.head % GROUP == 0)
        each([&](int c, int r, i64 at) {
            const float own[1] = {s[c][r]};
            store<false>(to.present + at, own);
        });
}

extern "C" __global__ void __launch_bounds__(COPYING + WARPS * 64, 1)
    linear_attention_sequence(const __grid_constant__ Operands p, const __grid_constant__ Scratch from,
                              const __grid_constant__ States to, int length, int chunks, float scale) {
    release_successor();
    wait_for_predecessor();
    const int lane = threadIdx.x % 32, warp = (int(threadIdx.x) - COPYING) / 32, result = blockIdx.x / TILES;
    const int head = result % HEADS, batch = result / HEADS, state_head = head / GROUP;
    const Block block{p, from, length, chunks, batch, head, state_head, int(blockIdx.x % TILES) * WARPS * 16};
    const bool has_state = threadIdx.x >= COPYING && warp < WARPS;
    const i64 columns = ((i64)batch * STATE_HEADS + state_head) * SIZE * VALUE_SIZE + state_index(0, block.column);
    const i64 matrix = columns + state_index(0, warp * 16);
    bool finite = true;
    float s[SIZE / 8][4] = {};
    if (threadIdx.x < COPYING) {
        block.copy_all();
    } else if (!has_state) {
        finite = all_results(block, to.y, warp - WARPS, scale);
    } else {
#pragma unroll
        for (int n = 0; n < SIZE / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = 8 * n + lane % 4 * 2 + i % 2;
                if (PAST) s[n][i] = element(to.past + matrix + state_index(row, lane / 4 + i / 2 * 8));
            }
        all_states(block, s, warp);
#pragma unroll
        for (int n = 0; n < SIZE / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) finite &= is_finite(s[n][i]);
    }
    if (__syncthreads_or(!finite)) return by_tokens(block, to, columns, scale);
    if (!has_state || head % GROUP) return;
#pragma unroll
    for (int n = 0; n < SIZE / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float value[1] = {s[n][i]};
            const int row = 8 * n + lane % 4 * 2 + i % 2;
            if (PRESENT) store<false>(to.present + matrix + state_index(row, lane / 4 + i / 2 * 8), value);
        }
}
