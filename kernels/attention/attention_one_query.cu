// Attention of one query over a growing cache, whose new row the kernel also writes: the token of a decoding step.
//
// The query heads of a key head are ROWS rows, at most eight. A cluster of CLUSTER blocks has one key head, and its
// warps take steps of 16 keys in turn. A warp reads these keys and values into registers, in the order in which mma
// multiplies them, so that blocks neither share tiles nor wait for each other before the end. All reads after the wait
// for the previous kernel are in flight at once.
//   1. Scores k q^T: keys are mma's left operand, with 16 keys and 16 of HEAD_DIM. A lane reads vectors of eight
//      neighbouring elements; the order of elements along HEAD_DIM only has to be the same in keys and queries.
//   2. Softmax online: a column of scores is a row of the result.
//   3. Results v^T p^T: pairs of values of two keys are the left operand, with 16 of HEAD_DIM and 16 keys.
//   4. A block adds up the results of its warps, and sends the sums to the blocks of its cluster. Each block divides a
//      SLICE of the result by the sum of its row.
// Queries and new keys are normalized and rotated in registers.
//
// The reads need the length of the sequence. The kernel loads it before it waits for the previous kernel, which can
// still be writing it, and again after the wait. Keys are read for the first length meanwhile, and once more if the
// length has changed.
//
// Macros:
//   T               the element type: f16 or bf16         HEAD_DIM   64 or 128
//   GQA_GROUP       query heads that share a key head     WARPS      of a block
//   CLUSTER         a power of two, at least GQA_GROUP    SHARED_BYTES   the dynamic shared memory of a block
//   REGISTER_THREADS   threads for which a multiprocessor's registers suffice: with more than a block has, registers
//                   are left for the blocks of the next kernels, which fetch their weights meanwhile
//   ZERO_MASKED_ROWS   as in attention_mma.cuh
//   TURNS           1: queries and new keys are turned, by the macros of attention_turns.cuh, where LANES is 4, WIDTH
//                   is 8, and ROTATED is 0 or HEAD_DIM
//   POSITIONS       1: with TURNS, the new row has a position of its own
#include "attention_cache.cuh"
#include "attention_mma_instruction.cuh"
#include "attention_results.cuh"
#include "attention_turns.cuh"
#include "cluster.cuh"

constexpr int rounded_up(int count) { return count <= 1 ? 1 : 2 * rounded_up((count + 1) / 2); }

constexpr int THREADS = 32 * WARPS, ROWS = rounded_up(GQA_GROUP);
constexpr int STEP_KEYS = 16, STRIDE = STEP_KEYS * WARPS * CLUSTER;  // keys from a warp's step to its next one
constexpr int CHUNKS = HEAD_DIM / 32;                                // vectors of a key, or of a query, that a lane has
constexpr int PARTS = HEAD_DIM / 64;                                 // vectors of a value that a lane has
constexpr int SLICE = ROWS * HEAD_DIM / CLUSTER;                     // elements of the result that a block writes
constexpr int PITCH = HEAD_DIM + 4;

static_assert(HEAD_DIM % 64 == 0 && ROWS <= 8 && ROWS <= CLUSTER, "see above");

using Vector = Pack<T, 8>;

struct Memory {
    float results[WARPS][ROWS][PITCH];  // of warps, not yet divided by the sums
    float tops[WARPS][ROWS], sums[WARPS][ROWS];
    float shares[CLUSTER][SLICE + 2];  // of the blocks: a slice of their results, and its row's maximum and sum
    Inbox inbox;                       // of the shares
};
static_assert(sizeof(Memory) == SHARED_BYTES, "the host knows this layout");

extern __shared__ __align__(128) char shared_bytes[];

// Transposes an 8 x 8 matrix of 16-bit elements. A lane has two elements of row lane / 4.
__device__ __forceinline__ u32 transposed(u32 pair) {
    u32 result = 0;
#if __CUDA_ARCH__ >= 750
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
#endif
    return result;
}

// Returns the sum, or the maximum, of the values of the eight lanes with the same lane % 4.
template <bool MAXIMUM>
__device__ __forceinline__ float over_rows(float value) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, value, lanes);
        value = MAXIMUM ? fmaxf(value, other) : value + other;
    }
    return value;
}

// Returns the number to subtract from scores before they are exponentiated: their maximum, or 0 without scores.
__device__ __forceinline__ float zero_of(float top) { return top == MINUS_INFINITY ? 0.0f : top; }

struct Sizes { int past, keys, kv_heads, same_offsets; };

// The rows of a sequence: those of the past, and the new one, which a sequence without keys lacks.
struct Rows {
    int past;
    bool has_new;

    // `last` is the index of the last row.
    __device__ __forceinline__ Rows(const Sizes& sizes, int last) {
        const int all = max(0, min(sizes.keys - 1, last) + 1);
        past = min(sizes.past, max(0, all - 1)), has_new = all > past;
    }
};

#if TURNS
static_assert(LANES == 4 && WIDTH == 8 && (ROTATED == 0 || ROTATED == HEAD_DIM), "a lane has both elements of a pair");

// Normalizes and rotates a head. A lane has its vectors lane % 4, lane % 4 + 4, ...
struct Turn {
    Rotation rotations[STEPS];

    // Returns the offset of the new row's angles in the tables.
    __device__ __forceinline__ static i64 table(Turns turns, int batch, int row) {
        if constexpr (!POSITIONS) turns.positions = nullptr;
        return turns.table(batch, row);
    }

    __device__ __forceinline__ void load(const Turns& turns, i64 table) {
        if constexpr (ROTATED > 0)
#pragma unroll
            for (int s = 0; s < STEPS; ++s)
                rotations[s].load(turns.cos + table, turns.sin + table, threadIdx.x % LANES + s * LANES);
    }

    __device__ __forceinline__ void apply(Vector (&x)[CHUNKS], const SCALE_T* scale, float epsilon) const {
        const int lane = threadIdx.x % LANES;
        Vectors raw[STEPS] = {};
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            raw[s].first = x[s];
            if constexpr (ROTATED > 0) raw[s].second = x[s + STEPS];
        }
        const float factor = NORM ? inverse_rms(raw, lane, epsilon) : 1.0f;
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            float one[8], other[8];
            turn(raw[s], Piece(lane + s * LANES), factor, scale, rotations[s], ROTATED > 0, one, other);
            x[s] = pack<T>(one);
            if constexpr (ROTATED > 0) x[s + STEPS] = pack<T>(other);
        }
    }
};
#endif

// The first elements of a key and of a value that a lane has.
__device__ __forceinline__ int column_of_key() { return threadIdx.x % 4 * 8; }
__device__ __forceinline__ int column_of_value() { return threadIdx.x % 32 / 4 * 8; }

// Prefetches a line into L2. The compiler then has computed the address before the kernel waits for the previous one.
__device__ __forceinline__ void prefetch_line(const void* from) {
#if __CUDA_ARCH__ >= 900
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
#endif
}

// Loads a lane's vectors of a row, which are DISTANCE elements apart.
template <int DISTANCE, int COUNT>
__device__ __forceinline__ void load_row(Vector (&to)[COUNT], const T* from) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) to[i] = load_cached<8>(from + i * DISTANCE);
}

template <int DISTANCE, int COUNT>
__device__ __forceinline__ void store_row(const Vector (&from)[COUNT], const Cache& cache, int row, int column) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        store_pack<false>(cache.present + (i64)row * cache.present_row + column + i * DISTANCE, from[i]);
}

// Sixteen rows of the past, from `first` on, in the registers of a warp. Keys are row lane / 4 of two left operands of
// mma, so that the scores that a lane has after a transposition are those of the keys whose values it has. In place of
// rows that the past lacks, its last row is read; clear_missing then makes their values 0, because 0 * inf is NaN.
struct Step {
    int keys[2], values[4];  // rows
    const T *from_k[2], *from_v[4];
    Vector k[2][CHUNKS], v[4][PARTS];

    __device__ __forceinline__ void begin(const Cache& cached_keys, const Cache& cached_values, int past, int first) {
        const int group = threadIdx.x % 32 / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            keys[half] = first + group / 2 * 4 + half * 2 + group % 2;
            from_k[half] = cached_keys.past + (i64)min(keys[half], past - 1) * cached_keys.past_row + column_of_key();
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            values[i] = first + threadIdx.x % 4 * 4 + i;
            from_v[i] = cached_values.past + (i64)min(values[i], past - 1) * cached_values.past_row + column_of_value();
        }
    }

    __device__ __forceinline__ void prefetch() const {
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            for (const T* from : from_k) prefetch_line(from + i * 64);
            for (const T* from : from_v) prefetch_line(from + i * 64);
        }
    }

    __device__ __forceinline__ void load_keys() {
#pragma unroll
        for (int half = 0; half < 2; ++half) load_row<32>(k[half], from_k[half]);
    }

    __device__ __forceinline__ void load_values() {
#pragma unroll
        for (int i = 0; i < 4; ++i) load_row<64>(v[i], from_v[i]);
    }

    __device__ __forceinline__ void clear_missing(int past) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (values[i] >= past)
#pragma unroll
                for (Vector& each : v[i]) each = {};
    }

    __device__ __forceinline__ void store(const Cache& cached_keys, const Cache& cached_values, int past) const {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (keys[half] < past) store_row<32>(k[half], cached_keys, keys[half], column_of_key());
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (values[i] < past) store_row<64>(v[i], cached_values, values[i], column_of_value());
    }
};

// The softmax of a warp: a lane has rows 2 * (lane % 4) and the next one.
struct Softmax {
    float top[2] = {MINUS_INFINITY, MINUS_INFINITY}, sum[2] = {};
    float o[PARTS][4][4] = {};  // element [t][c + 2 * i] is column column_of_value() + 2 * t + i of row c

    // Begins with a single key and its value. A lane has the same elements of the key as of its query.
    __device__ __forceinline__ void begin(const Vector (&k)[CHUNKS], const Vector (&v)[PARTS],
                                          const Vector (&q)[CHUNKS], float scale) {
        float product = 0.0f;
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            float a[8], b[8];
            unpack(k[i], a), unpack(q[i], b);
#pragma unroll
            for (int j = 0; j < 8; ++j) product = fmaf(a[j], b[j], product);
        }
        product += __shfl_xor_sync(0xffffffffu, product, 1);
        product += __shfl_xor_sync(0xffffffffu, product, 2);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            top[c] = scale * __shfl_sync(0xffffffffu, product, (threadIdx.x % 4 * 2 + c) * 4);
            sum[c] = threadIdx.x % 32 / 4 == 0;
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                float values[8];
                unpack(v[part], values);
#pragma unroll
                for (int j = 0; j < 8; ++j) o[part][j / 2][c + j % 2 * 2] = values[j];
            }
        }
    }

    // Returns the scores of a step: of keys 0 and 1 of the lane, for two rows each.
    __device__ __forceinline__ static void scores(float (&s)[4], const Step& step, const Vector (&q)[CHUNKS]) {
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
            for (int w = 0; w < 4; w += 2) {
                const u32 a[4] = {step.k[0][i].words[w], step.k[1][i].words[w], step.k[0][i].words[w + 1],
                                  step.k[1][i].words[w + 1]};
                mma(T(), s, a, q[i].words[w], q[i].words[w + 1]);
            }
    }

    // Adds a step with these scores, times log2(e), which become probabilities. Returns them as mma's right operand.
    __device__ __forceinline__ void add_scores(float (&s)[4], u32 (&p)[2]) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const float most = fmaxf(top[c], over_rows<true>(fmaxf(s[c], s[2 + c]))), zero = zero_of(most);
            const float factor = exp2_fast(top[c] - zero);
            s[c] = exp2_fast(s[c] - zero), s[2 + c] = exp2_fast(s[2 + c] - zero);
            sum[c] = fmaf(sum[c], factor, s[c] + s[2 + c]), top[c] = most;
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
#pragma unroll
                for (int t = 0; t < 4; ++t) o[part][t][c] *= factor, o[part][t][2 + c] *= factor;
        }
        p[0] = transposed(narrow(T(), s)), p[1] = transposed(narrow(T(), s + 2));
    }

    __device__ __forceinline__ void add_values(const Step& step, const u32 (&p)[2]) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                u32 w[4], a[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) w[i] = step.v[i][part].words[t];
#pragma unroll
                for (int i = 0; i < 4; ++i) a[i] = __byte_perm(w[i / 2 * 2], w[i / 2 * 2 + 1], i % 2 ? 0x7632 : 0x5410);
                mma(T(), o[part][t], a, p[0], p[1]);
            }
    }

    __device__ __forceinline__ void store(Memory& memory) {
        const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const float all = over_rows<false>(sum[c]);
            const int row = threadIdx.x % 4 * 2 + c;
            if (row >= GQA_GROUP) continue;
            if (group == 0) memory.tops[warp][row] = top[c], memory.sums[warp][row] = all;
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
#pragma unroll
                for (int t = 0; t < 4; ++t)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        memory.results[warp][row][part * 64 + group * 8 + 2 * t + i] = o[part][t][c + 2 * i];
        }
    }
};

// Adds a warp's steps from row `first` of the past on; the reads of the first step have started.
__device__ __forceinline__ void add_steps(Softmax& softmax, Step& step, const Vector (&q)[CHUNKS], const Cache& keys,
                                          const Cache& values, int past, int first, float scale) {
#pragma unroll 1
    for (; first < past; first += STRIDE) {
        const bool has_next = first + STRIDE < past;
        if (!keys.in_place) step.store(keys, values, past);
        float s[4] = {};
        Softmax::scores(s, step, q);
#pragma unroll
        for (int i = 0; i < 4; ++i) s[i] = step.keys[i / 2] < past ? s[i] * scale : MINUS_INFINITY;
        if (has_next) step.begin(keys, values, past, first + STRIDE), step.load_keys();
        u32 p[2];
        softmax.add_scores(s, p);
        if (first + STEP_KEYS > past) step.clear_missing(past);
        softmax.add_values(step, p);
        if (has_next) step.load_values();
    }
}

// Softmaxes of one row over different keys as one: its maximum, its sum, and an element of its result.
struct Merged { float top = MINUS_INFINITY, sum = 0.0f, y = 0.0f; };

// Merges COUNT softmaxes; the functions return the numbers of softmax i.
template <int COUNT, class Top, class Sum, class Element>
__device__ __forceinline__ Merged merged(const Top& top, const Sum& sum, const Element& element) {
    Merged all;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) all.top = fmaxf(all.top, top(i));
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const float factor = exp2_fast(top(i) - zero_of(all.top));
        all.sum = fmaf(sum(i), factor, all.sum), all.y = fmaf(element(i), factor, all.y);
    }
    return all;
}

// Adds up the results of the block's warps, and sends each slice to the block that writes it.
__device__ __forceinline__ void send_results(Memory& memory, int rank) {
    for (int i = threadIdx.x; i < GQA_GROUP * HEAD_DIM; i += THREADS) {
        const int row = i / HEAD_DIM, column = i % HEAD_DIM, to = i / SLICE, at = i % SLICE;
        const Merged all = merged<WARPS>([&](int warp) { return memory.tops[warp][row]; },
                                         [&](int warp) { return memory.sums[warp][row]; },
                                         [&](int warp) { return memory.results[warp][row][column]; });
        float* const share = memory.shares[rank];
        send_peer(share + at, to, all.y, memory.inbox);
        if (at > 0) continue;
        send_peer(share + SLICE, to, all.top, memory.inbox), send_peer(share + SLICE + 1, to, all.sum, memory.inbox);
    }
}

// Returns an element of the block's slice of the result.
__device__ __forceinline__ float combined(const Memory& memory, int at) {
    const Merged all = merged<CLUSTER>([&](int i) { return memory.shares[i][SLICE]; },
                                       [&](int i) { return memory.shares[i][SLICE + 1]; },
                                       [&](int i) { return memory.shares[i][at]; });
    return normalized(all.y, all.sum);
}

// `present_keys` and `present_values` may be the past caches.
extern "C" __global__ void __launch_bounds__(REGISTER_THREADS) CLUSTER_DIMS
    attention_one_query(HeadTensor<const T> queries, HeadTensor<T> out, HeadTensor<T> present_keys,
                        HeadTensor<T> present_values, CacheRows key_rows, CacheRows value_rows, const int* lengths,
                        Sizes sizes, float scale, const __grid_constant__ Turns turns) {
    release_successor();
    Memory& memory = *reinterpret_cast<Memory*>(shared_bytes);
    const int rank = int(cluster_rank()), head = blockIdx.x / CLUSTER;
    const int batch = head / sizes.kv_heads, kv = head % sizes.kv_heads, own_row = rank * SLICE / HEAD_DIM;
    if (threadIdx.x == 0 && own_row < GQA_GROUP)
        open_inbox(memory.inbox), expect(memory.inbox, CLUSTER * (SLICE + 2) * 4);
    cluster_arrive();
    const bool in_place = sizes.same_offsets && key_rows.past.data == present_keys.data &&
                          value_rows.past.data == present_values.data;
    const Cache keys(key_rows, present_keys, batch, kv, sizes.past, in_place);
    const Cache values(value_rows, present_values, batch, kv, sizes.past, in_place);
    const int last = static_cast<const volatile int*>(lengths)[batch];
    const int first = (threadIdx.x / 32 * CLUSTER + rank) * STEP_KEYS;
    Rows rows(sizes, last);
    Step step;
    step.begin(keys, values, rows.past, first);
    if (first < rows.past) step.prefetch();
    const int head_of_row = threadIdx.x % 32 / 4;
    const T* const query = queries.at(batch, kv * GQA_GROUP + min(head_of_row, GQA_GROUP - 1)) + column_of_key();
    const T *const new_key = keys.added + column_of_key(), *const new_value = values.added + column_of_value();
    prefetch_line(query), prefetch_line(new_key), prefetch_line(new_value);
#if TURNS
    i64 table = POSITIONS ? 0 : Turn::table(turns, batch, rows.past);
    if constexpr (ROTATED > 0) prefetch_line(turns.cos + table), prefetch_line(turns.sin + table);
    Turn turn_of_row;
#endif
    wait_for_predecessor();

    const int now = static_cast<const volatile int*>(lengths)[batch];
    Vector q[CHUNKS], k[CHUNKS], v[PARTS];
    load_row<32>(q, query);
    if (first < rows.past) step.load_keys(), step.load_values();
    const bool is_last = threadIdx.x / 32 == WARPS - 1 && rank == CLUSTER - 1;  // the warp that has the new row
    if (is_last) load_row<32>(k, new_key), load_row<64>(v, new_value);
#if TURNS
    if constexpr (POSITIONS) table = Turn::table(turns, batch, rows.past);
    turn_of_row.load(turns, table);
#endif
    if (now != last) {
        rows = Rows(sizes, now), step.begin(keys, values, rows.past, first);
        if (first < rows.past) step.load_keys(), step.load_values();
#if TURNS
        turn_of_row.load(turns, Turn::table(turns, batch, rows.past));
#endif
    }
#if TURNS
    turn_of_row.apply(q, turns.q_scale, turns.q_epsilon);
#endif
    if (head_of_row >= GQA_GROUP)
#pragma unroll
        for (Vector& each : q) each = {};

    Softmax softmax;
    if (is_last && rows.has_new) {
#if TURNS
        turn_of_row.apply(k, turns.k_scale, turns.k_epsilon);
#endif
        softmax.begin(k, v, q, scale);
        if (threadIdx.x % 32 / 4 == 0) store_row<32>(k, keys, rows.past, column_of_key());
        if (threadIdx.x % 4 == 0) store_row<64>(v, values, rows.past, column_of_value());
    }
    add_steps(softmax, step, q, keys, values, rows.past, first, scale);
    softmax.store(memory);
    __syncthreads();
    cluster_wait();
    send_results(memory, rank);

    if (own_row >= GQA_GROUP || threadIdx.x >= SLICE) return;
    receive(memory.inbox, 0);
    const float y[1] = {combined(memory, threadIdx.x)};
    store<false>(out.at(batch, kv * GQA_GROUP + own_row) + rank * SLICE % HEAD_DIM + threadIdx.x, y);
}
