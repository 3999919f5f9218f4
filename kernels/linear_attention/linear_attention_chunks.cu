// Prepares chunks of linear attention, all at once: see linear_attention.cuh. One block for each chunk and each head of
// results; the first of the heads that share a state computes what they share.
#include "linear_attention.cuh"

constexpr int THREADS = 128;
constexpr int VALUE_PITCH = 2 * VALUE_SIZE + 16, INVERSE_PITCH = 68;  // the latter in floats

// Offsets in shared memory.
constexpr int K_TILE = 0, Q_TILE = CHUNK * PITCH, V_TILE = 2 * CHUNK * PITCH;
constexpr int SYSTEM = V_TILE + CHUNK * VALUE_PITCH, NUMBERS = SYSTEM + (BETA ? CHUNK * INVERSE_PITCH * 4 : 0);
constexpr int BY_BETA = NUMBERS + 3 * CHUNK * 4, BY_DECAY = BY_BETA + CHUNK * TOKEN_PITCH;
// A decay by less than exp(-100) leaves nothing of a state. With this limit, sums of decays are finite and precise.
constexpr float LOWEST_DECAY = -100.0f;

__device__ __forceinline__ float element(const T* from) {
    float value[1];
    unpack(load_cached<1>(from), value);
    return value[0];
}
__device__ __forceinline__ float exponential(float x) { return exp2_fast(x * LOG2_E); }

// Multiplies 16 rows of a tile by the rows of another tile up to the last of them: sums[n] are columns 8 n to 8 n + 7.
__device__ __forceinline__ void multiply_rows(float (&sums)[CHUNK / 8][4], u32 left, u32 right, int row) {
#pragma unroll
    for (int n = 0; n < CHUNK / 8; ++n) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;
#pragma unroll
    for (int step = 0; step < SIZE / 16; ++step) {
        u32 a[4];
        load_left(a, left, PITCH, row, step);
#pragma unroll
        for (int n = 0; n < CHUNK / 8; n += 2) {
            if (n * 8 > row) break;  // columns after the rows
            u32 b[4];
            load_columns(b, right, PITCH, n * 8, step);
            multiply(T(), sums[n], a, b[0], b[1]);
            multiply(T(), sums[n + 1], a, b[2], b[3]);
        }
    }
}

// Writes P for 16 rows.
__device__ __forceinline__ void write_scores(T* scores, const float* sums_of_decays, int row) {
    const int lane = threadIdx.x % 32;
    float sums[CHUNK / 8][4];
    multiply_rows(sums, shared_address(shared_memory()) + Q_TILE, shared_address(shared_memory()) + K_TILE, row);
#pragma unroll
    for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int t = row + lane / 4 + 8 * half, j = 8 * n + lane % 4 * 2;
            float p[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float decayed = DECAY ? exponential(sums_of_decays[t] - sums_of_decays[j + i]) : 1.0f;
                p[i] = j + i <= t ? sums[n][2 * half + i] * decayed : 0.0f;
            }
            store<false>(scores + t * CHUNK + j, p);
        }
}

// Writes 16 rows of A.
__device__ __forceinline__ void write_system(float* system, const float* sums_of_decays, const float* rates, int row) {
    const int lane = threadIdx.x % 32;
    float sums[CHUNK / 8][4];
    multiply_rows(sums, shared_address(shared_memory()) + K_TILE, shared_address(shared_memory()) + K_TILE, row);
#pragma unroll
    for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int t = row + lane / 4 + i / 2 * 8, j = 8 * n + lane % 4 * 2 + i % 2;
            const float decayed = DECAY ? exponential(sums_of_decays[t] - sums_of_decays[j]) : 1.0f;
            system[t * INVERSE_PITCH + j] = j < t ? rates[t] * decayed * sums[n][i] : 0.0f;
        }
}

// Solves (I + A) x = e for one column of the identity, by forward substitution, and writes x times both factors.
__device__ __forceinline__ void invert(const float* system, float decayed, float rate, int column) {
    float x[CHUNK];
#pragma unroll
    for (int t = 0; t < CHUNK; ++t) {
        float sums[4] = {t == column ? 1.0f : 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < t; j += 4) {
            const float4 a = *reinterpret_cast<const float4*>(system + t * INVERSE_PITCH + j);
            sums[0] = fmaf(-a.x, x[j], sums[0]);
            if (j + 1 < t) sums[1] = fmaf(-a.y, x[j + 1], sums[1]);
            if (j + 2 < t) sums[2] = fmaf(-a.z, x[j + 2], sums[2]);
            if (j + 3 < t) sums[3] = fmaf(-a.w, x[j + 3], sums[3]);
        }
        x[t] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        const float both[2] = {x[t] * rate, -x[t] * rate * decayed};
        const auto packed = pack<T>(both);
        *reinterpret_cast<unsigned short*>(shared_memory() + BY_BETA + t * TOKEN_PITCH + column * 2) =
            (unsigned short)packed.words[0];
        *reinterpret_cast<unsigned short*>(shared_memory() + BY_DECAY + t * TOKEN_PITCH + column * 2) =
            (unsigned short)(packed.words[0] >> 16);
    }
}

// Writes -T diag(beta exp(b)) K for 16 rows.
__device__ __forceinline__ void write_weights(T* weights, int row) {
    const int lane = threadIdx.x % 32;
    const u32 base = shared_address(shared_memory());
    float sums[SIZE / 8][4] = {};
#pragma unroll
    for (int step = 0; step < CHUNK / 16; ++step) {
        if (step * 16 > row) break;
        u32 a[4];
        load_left(a, base + BY_DECAY, TOKEN_PITCH, row, step);
#pragma unroll
        for (int n = 0; n < SIZE / 8; n += 2) {
            u32 b[4];
            load_rows_of(b, base + K_TILE, PITCH, step, n * 8);
            multiply(T(), sums[n], a, b[0], b[1]);
            multiply(T(), sums[n + 1], a, b[2], b[3]);
        }
    }
#pragma unroll
    for (int n = 0; n < SIZE / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float own[2] = {sums[n][2 * half], sums[n][2 * half + 1]};
            store<false>(weights + (row + lane / 4 + 8 * half) * SIZE + 8 * n + lane % 4 * 2, own);
        }
}

// Writes (T diag(beta) v)^T for 16 columns of v.
__device__ __forceinline__ void write_rows(T* rows, int column) {
    const int lane = threadIdx.x % 32;
    const u32 base = shared_address(shared_memory());
    float sums[CHUNK / 8][4] = {};
#pragma unroll
    for (int step = 0; step < CHUNK / 16; ++step) {
        u32 a[4];  // v^T, from rows of v
        load_matrices<true>(
            a, base + V_TILE + (step * 16 + lane / 16 * 8 + lane % 8) * VALUE_PITCH + column * 2 + lane / 8 % 2 * 16);
#pragma unroll
        for (int n = step * 2; n < CHUNK / 8; n += 2) {
            u32 b[4];
            load_columns(b, base + BY_BETA, TOKEN_PITCH, n * 8, step);
            multiply(T(), sums[n], a, b[0], b[1]);
            multiply(T(), sums[n + 1], a, b[2], b[3]);
        }
    }
#pragma unroll
    for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float own[2] = {sums[n][2 * half], sums[n][2 * half + 1]};
            store<false>(rows + (column + lane / 4 + 8 * half) * CHUNK + 8 * n + lane % 4 * 2, own);
        }
}

__device__ __forceinline__ void transpose_values(T* rows) {
    for (int i = threadIdx.x; i < VALUE_SIZE * CHUNK / 2; i += THREADS) {
        const int t = i / VALUE_SIZE * 2, column = i % VALUE_SIZE;
        const char* const from = shared_memory() + V_TILE + t * VALUE_PITCH + column * 2;
        const u32 word = *reinterpret_cast<const unsigned short*>(from) |
                         u32(*reinterpret_cast<const unsigned short*>(from + VALUE_PITCH)) << 16;
        store_bytes<false, 4>(reinterpret_cast<char*>(rows + column * CHUNK + t), &word);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    linear_attention_chunks(const __grid_constant__ Operands p, const __grid_constant__ Scratch to, int length,
                            int chunks) {
    release_successor();
    wait_for_predecessor();
    const int chunk = blockIdx.x % chunks, result = blockIdx.x / chunks, batch = result / HEADS, head = result % HEADS;
    const int state_head = head / GROUP, warp = threadIdx.x / 32, t = threadIdx.x;
    const int count = min(CHUNK, length - chunk * CHUNK);
    const i64 first = (i64)batch * length + chunk * CHUNK;
    const bool shared = head % GROUP == 0;  // this block computes what the heads share
    const u32 base = shared_address(shared_memory());
    const T* const k = p.key + (first * K_HEADS + state_head / (STATE_HEADS / K_HEADS)) * SIZE;
    copy_rows<SIZE, PITCH, THREADS>(base + K_TILE, k, K_HEADS * SIZE, count);
    const T* const q = p.query + (first * Q_HEADS + head / (HEADS / Q_HEADS)) * SIZE;
    copy_rows<SIZE, PITCH, THREADS>(base + Q_TILE, q, Q_HEADS * SIZE, count);
    const T* const v = p.value + (first * STATE_HEADS + state_head) * VALUE_SIZE;
    if (shared) copy_rows<VALUE_SIZE, VALUE_PITCH, THREADS>(base + V_TILE, v, STATE_HEADS * VALUE_SIZE, count);
    commit_copies();
    float* const decays = reinterpret_cast<float*>(shared_memory() + NUMBERS);  // then their sums, then rates
    float *const sums = decays + CHUNK, *const rates = sums + CHUNK,
                 *const system = reinterpret_cast<float*>(shared_memory() + SYSTEM);
    if (t < CHUNK) {
        const bool inside = t < count;
        const i64 number = (first + t) * STATE_HEADS + state_head;
        const float logarithm = DECAY && inside ? element(p.decay + number) : 0.0f;
        decays[t] = logarithm < LOWEST_DECAY ? LOWEST_DECAY : logarithm;  // keeps NaN
        rates[t] = BETA && inside ? element(p.beta + (BETA == 1 ? number : first + t)) : 0.0f;
    }
    __syncthreads();
    if (t < CHUNK) {
        float sum = 0.0f;
        for (int i = 0; i <= t; ++i) sum += decays[i];
        sums[t] = sum;
    }
    wait_for_groups<0>();
    __syncthreads();
    const i64 state = (i64)batch * STATE_HEADS + state_head, own = state * chunks + chunk;
    if (shared && t < CHUNK) {
        const float both[2] = {exponential(sums[t]), exponential(sums[CHUNK - 1] - sums[t])};
        store<false>(to.factors + (own * CHUNK + t) * 2, both);
    }
    T* const scores = to.scores + ((i64)result * chunks + chunk) * CHUNK * CHUNK;
    if (!BETA || !shared) {
        write_scores(scores, sums, warp * 16);
        if (shared) transpose_values(to.rows + own * VALUE_SIZE * CHUNK);
        return;
    }
    write_system(system, sums, rates, warp * 16);
    __syncthreads();
    if (t < CHUNK) {
        invert(system, exponential(sums[t]), rates[t], t);
    } else {  // two warps have two times 16 rows each, which take equally long
        write_scores(scores, sums, warp == 2 ? 0 : 16);
        write_scores(scores, sums, warp == 2 ? 48 : 32);
    }
    __syncthreads();
    write_weights(to.weights + own * CHUNK * SIZE, warp * 16);
    for (int column = warp * 16; column < VALUE_SIZE; column += THREADS / 2)
        write_rows(to.rows + own * VALUE_SIZE * CHUNK, column);
}
