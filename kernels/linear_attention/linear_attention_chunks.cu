// Prepares chunks of linear attention, all at once: see linear_attention.cuh. One block for each chunk and each head of
// results; the first of the heads that share a state computes what they share.
#include "linear_attention.cuh"

constexpr int THREADS = 128;
constexpr int VALUE_PITCH = 2 * VALUE_SIZE + 16, INVERSE_PITCH = 68;  // the latter in floats

// Offsets in shared memory. Both roundings of the inverse take the place of Q.
constexpr int K_TILE = 0, V_TILE = CHUNK * PITCH, Q_TILE = V_TILE + CHUNK * VALUE_PITCH;
constexpr int BY_BETA = Q_TILE, BY_DECAY = BY_BETA + CHUNK * TOKEN_PITCH;
constexpr int Q_BYTES = BETA && PITCH < 2 * TOKEN_PITCH ? 2 * CHUNK * TOKEN_PITCH : CHUNK * PITCH;
constexpr int SYSTEM = Q_TILE + Q_BYTES;
constexpr int NUMBERS = SYSTEM + (BETA ? CHUNK * INVERSE_PITCH * 4 : 0);
// A decay by less than exp(-100) leaves nothing of a state. With this limit, sums of decays are finite and precise.
constexpr float LOWEST_DECAY = -100.0f;

// The words of two 16 x 8 operands B, whose columns are 16 rows of a tile, in an order in which a lane's sums belong to
// four neighbouring columns of the result: sums[0][0], sums[0][1], sums[1][0] and sums[1][1].
__device__ __forceinline__ void load_columns(u32 (&b)[4], u32 tile, int pitch, int column, int step) {
    const int lane = threadIdx.x % 32, row = column + lane % 8 / 2 * 4 + lane / 16 * 2 + lane % 2;
    load_matrices<false>(b, tile + row * pitch + step * 32 + lane / 8 % 2 * 16);
}

// Calls `write` with the row, the first of four columns, and the four products of 16 rows of the tile `left` with the
// rows of K, up to the last of these 16 rows.
template <int PAIRS, class Write>
__device__ __forceinline__ void multiply_rows(u32 left, int row, Write write) {
    const int lane = threadIdx.x % 32;
    const u32 keys = shared_address(shared_memory()) + K_TILE;
    float sums[PAIRS][2][4] = {};
    pipeline<SIZE / 16, PAIRS + 1>(
        [=](u32(&to)[4], int step, int i) {
            if (i == 0) load_left(to, left, PITCH, row, step);
            else load_columns(to, keys, PITCH, (i - 1) * 16, step);
        },
        [&](u32(&words)[PAIRS + 1][4], int step) {
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                multiply(T(), sums[i][0], words[0], words[i + 1][0], words[i + 1][1]);
                multiply(T(), sums[i][1], words[0], words[i + 1][2], words[i + 1][3]);
            }
        });
#pragma unroll
    for (int i = 0; i < PAIRS; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float four[4] = {sums[i][0][2 * half], sums[i][0][2 * half + 1], sums[i][1][2 * half],
                             sums[i][1][2 * half + 1]};
            write(row + lane / 4 + 8 * half, i * 16 + lane % 4 * 4, four);
        }
}
template <class Write>
__device__ __forceinline__ void multiply_rows(u32 left, int row, Write write) {
    if (row < 32) multiply_rows<2>(left, row, write);
    else multiply_rows<4>(left, row, write);
}

// Multiplies products of token t with four tokens from j on by the decays between them, or by 0 after `last`.
__device__ __forceinline__ void decay(float (&x)[4], const float* sums, int t, int j, int last) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = j + i > last ? 0.0f : DECAY ? x[i] * exponential(sums[t] - sums[j + i]) : x[i];
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

// Writes 16 rows of (M X)^T, where the tile `inverse` has the rows of M, and `tile` those of X.
__device__ __forceinline__ void write_product(T* to, u32 inverse, u32 tile, int pitch, int column) {
    const int lane = threadIdx.x % 32;
    float sums[CHUNK / 16][2][4] = {};
    u32 a[CHUNK / 16][4];  // X^T, from rows of X
#pragma unroll
    for (int step = 0; step < CHUNK / 16; ++step)
        load_matrices<true>(a[step],
                            tile + (step * 16 + lane / 16 * 8 + lane % 8) * pitch + column * 2 + lane / 8 % 2 * 16);
    pipeline<CHUNK / 16, CHUNK / 16>(
        [=](u32(&b)[4], int step, int i) {
            if (i >= step) load_columns(b, inverse, TOKEN_PITCH, i * 16, step);
        },
        [&](u32(&b)[CHUNK / 16][4], int step) {
#pragma unroll
            for (int i = step; i < CHUNK / 16; ++i) {
                multiply(T(), sums[i][0], a[step], b[i][0], b[i][1]);
                multiply(T(), sums[i][1], a[step], b[i][2], b[i][3]);
            }
        });
#pragma unroll
    for (int i = 0; i < CHUNK / 16; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float own[4] = {sums[i][0][2 * half], sums[i][0][2 * half + 1], sums[i][1][2 * half],
                                  sums[i][1][2 * half + 1]};
            store<false>(to + (column + lane / 4 + 8 * half) * CHUNK + i * 16 + lane % 4 * 4, own);
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
        const float rate = BETA && inside ? element(p.beta + (BETA == 1 ? number : first + t)) : 0.0f;
        // A factor above 1 becomes NaN, so that linear_attention_sequence.cu computes the head token after token.
        decays[t] = logarithm < LOWEST_DECAY ? LOWEST_DECAY : logarithm <= 0.0f ? logarithm : __uint_as_float(~0u);
        rates[t] = rate;  // loaded above, so that no branch makes this load wait for the decay
    }
    __syncthreads();
    if (t < CHUNK) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < CHUNK; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(decays + i);
            sum += i <= t ? four.x : 0.0f, sum += i + 1 <= t ? four.y : 0.0f;
            sum += i + 2 <= t ? four.z : 0.0f, sum += i + 3 <= t ? four.w : 0.0f;
        }
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
    multiply_rows(base + Q_TILE, warp * 16, [=](int t, int j, float (&four)[4]) {
        decay(four, sums, t, j, t);
        store<false>(scores + t * CHUNK + j, four);
    });
    if (!shared) return;
    if (!BETA) return transpose_values(to.rows + own * VALUE_SIZE * CHUNK);
    multiply_rows(base + K_TILE, warp * 16, [=](int t, int j, float (&four)[4]) {
        decay(four, sums, t, j, t - 1);
#pragma unroll
        for (int i = 0; i < 4; ++i) system[t * INVERSE_PITCH + j + i] = four[i] * rates[t];
    });
    __syncthreads();
    if (t < CHUNK) invert(system, exponential(sums[t]), rates[t], t);
    __syncthreads();
    for (int column = warp * 16; column < VALUE_SIZE; column += THREADS / 2)
        write_product(to.rows + own * VALUE_SIZE * CHUNK, base + BY_BETA, base + V_TILE, VALUE_PITCH, column);
    for (int column = warp * 16; column < SIZE; column += THREADS / 2)
        write_product(to.weights + own * SIZE * CHUNK, base + BY_DECAY, base + K_TILE, PITCH, column);
}
