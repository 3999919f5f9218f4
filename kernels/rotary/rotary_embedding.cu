// y = x * cos + rotate_half(x) * sin for each head of one tensor, or of two that share the tables, as queries and keys
// do; with NORM each head is divided by its root mean square and scaled first.
//
// The kernel moves each element of x and y once, 4 bytes an element in fp16, and computes in fp32. A thread reads its
// piece of the tables once for THREAD_HEADS heads.
//
//   SIZE             elements of a head; ROTATED of them are rotated, the rest is copied
//   HEADS            of the first tensor, MORE_HEADS of the second (0: there is none); THREAD_HEADS of them per thread
//   ADJACENT_GROUPS  groups of THREAD_HEADS heads of one position side by side in a block; divides the number of groups
//   WIDTH            elements of a vector access; divides ROTATED / 2 and SIZE - ROTATED
//   LANES            threads of a head; with NORM a power of two up to 32
//   INTERLEAVED      1: the elements of a pair of x are neighbours; 0: they are ROTATED / 2 apart
//   Y_INTERLEAVED    the same of y
//   WHOLE_TABLE      1: a row of the tables has ROTATED elements, in the order of a head's; 0: it has ROTATED / 2
//   TABLE_BATCHED    1: each element of the batch has tables of its own
//   TABLE_BY_HEADS   1: each head of the first tensor has tables of its own, and there is no second one
//   KEPT             first positions whose elements stay as they are, and for which tables have no rows
#include "types.cuh"

constexpr int HALF = ROTATED / 2;
constexpr int ROTATED_PIECES = HALF / WIDTH;  // of a head, two vectors each
constexpr int PIECES = ROTATED_PIECES + (SIZE - ROTATED) / WIDTH;
constexpr int STEPS = (PIECES + LANES - 1) / LANES;  // pieces of a thread
constexpr int GROUPS = (HEADS + THREAD_HEADS - 1) / THREAD_HEADS;
constexpr int ALL_GROUPS = GROUPS + (MORE_HEADS + THREAD_HEADS - 1) / THREAD_HEADS;
constexpr int TABLE_ROW = WHOLE_TABLE ? ROTATED : HALF;
constexpr bool INSIDE = INTERLEAVED && Y_INTERLEAVED && WIDTH > 1;  // a pair lies in one vector, of x and of y
constexpr bool TABLE_OF_PAIRS = WHOLE_TABLE && INTERLEAVED && !INSIDE;
constexpr int TO_SECOND = TABLE_OF_PAIRS ? WIDTH : WHOLE_TABLE ? HALF : 0;  // of a piece of the tables

static_assert(HALF % WIDTH == 0 && (SIZE - ROTATED) % WIDTH == 0, "a piece is of one kind");
static_assert(ALL_GROUPS % ADJACENT_GROUPS == 0, "groups adjacent by adjacent are as many everywhere");
static_assert(!TABLE_BY_HEADS || MORE_HEADS == 0, "tables of heads are of one tensor");
static_assert(KEPT == 0 || INTERLEAVED == Y_INTERLEAVED, "elements that stay as they are do not move");
static_assert(!NORM || (LANES <= 32 && (LANES & (LANES - 1)) == 0), "a head's threads are lanes of a warp");

// Sorts two vectors first0 second0 first1 second1 ... into first and second.
__device__ __forceinline__ void deinterleave(float (&first)[WIDTH], float (&second)[WIDTH]) {
    float both[2 * WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) both[i] = first[i], both[WIDTH + i] = second[i];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) first[i] = both[2 * i], second[i] = both[2 * i + 1];
}

// The inverse of deinterleave.
__device__ __forceinline__ void interleave(float (&first)[WIDTH], float (&second)[WIDTH]) {
    float both[2 * WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) both[2 * i] = first[i], both[2 * i + 1] = second[i];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) first[i] = both[i], second[i] = both[WIDTH + i];
}

// The rotation by the angles of one piece of the tables.
struct Rotation {
    float cos_first[WIDTH], sin_first[WIDTH], cos_second[WIDTH], sin_second[WIDTH];

    // `at`: the first element of the row of the tables.
    __device__ __forceinline__ void load(const COS_T* cos, const SIN_T* sin, INDEX at, int piece) {
        if constexpr (INSIDE && !WHOLE_TABLE) {
            at += piece * (WIDTH / 2);
            load_twice(cos + at, cos_first), load_twice(sin + at, sin_first);
            load_twice(cos + at + HALF / 2, cos_second), load_twice(sin + at + HALF / 2, sin_second);
            return;
        }
        at += piece * WIDTH * (TABLE_OF_PAIRS ? 2 : 1);
        unpack(load_cached<WIDTH>(cos + at), cos_first);
        unpack(load_cached<WIDTH>(sin + at), sin_first);
        unpack(load_cached<WIDTH>(cos + at + TO_SECOND), cos_second);
        unpack(load_cached<WIDTH>(sin + at + TO_SECOND), sin_second);
        if (TABLE_OF_PAIRS) deinterleave(cos_first, cos_second), deinterleave(sin_first, sin_second);
    }

    template <class E>
    __device__ __forceinline__ static void load_twice(const E* from, float (&to)[WIDTH]) {
        float values[WIDTH / 2];
        unpack(load_cached<WIDTH / 2>(from), values);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) to[i] = values[i / 2];
    }

    __device__ __forceinline__ void apply(float (&first)[WIDTH], float (&second)[WIDTH]) const {
        if constexpr (INSIDE) {
            apply_inside(first, cos_first, sin_first), apply_inside(second, cos_second, sin_second);
        } else {
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
                const float one = first[i], other = second[i];
                first[i] = fmaf(one, cos_first[i], -other * sin_first[i]);
                second[i] = fmaf(other, cos_second[i], one * sin_second[i]);
            }
        }
    }

    __device__ __forceinline__ static void apply_inside(float (&x)[WIDTH], const float (&cos)[WIDTH],
                                                        const float (&sin)[WIDTH]) {
#pragma unroll
        for (int i = 0; i < WIDTH; i += 2) {
            const float one = x[i], other = x[i + 1];
            x[i] = fmaf(one, cos[i], -other * sin[i]);
            x[i + 1] = fmaf(other, cos[i + 1], one * sin[i + 1]);
        }
    }
};

// Whether the two vectors of a piece are neighbours. Neighbouring threads then read every other 16 bytes at once, which
// takes as long as if they read all; so vectors of whole pairs are HALF apart.
constexpr bool X_ADJACENT = INTERLEAVED && !INSIDE, Y_ADJACENT = Y_INTERLEAVED && !INSIDE;

// The indices in a head of x and of y of a thread's elements.
struct Piece {
    bool exists, rotated;
    int first, second, y_first, y_second;

    __device__ __forceinline__ explicit Piece(int piece)
        : exists(LANES * STEPS == PIECES || piece < PIECES), rotated(piece < ROTATED_PIECES),
          first(begin(piece, X_ADJACENT)), second(first + (X_ADJACENT ? WIDTH : HALF)),
          y_first(begin(piece, Y_ADJACENT)), y_second(y_first + (Y_ADJACENT ? WIDTH : HALF)) {}

    __device__ __forceinline__ static int begin(int piece, bool adjacent) {
        if (piece >= ROTATED_PIECES) return ROTATED + (piece - ROTATED_PIECES) * WIDTH;
        return piece * WIDTH * (adjacent ? 2 : 1);
    }
};

struct Vectors {
    Pack<X_T, WIDTH> first, second;
};

// Strides in elements.
struct Strides {
    long long batch, head, row;

    __device__ __forceinline__ INDEX at(INDEX b, int h, INDEX position) const {
        return b * INDEX(batch) + h * INDEX(head) + position * INDEX(row);
    }
};

__device__ __forceinline__ float squares(const float (&values)[WIDTH]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) sum = fmaf(values[i], values[i], sum);
    return sum;
}

__device__ __forceinline__ void scale_by(float (&values)[WIDTH], float factor, const SCALE_T* scale) {
    float weights[WIDTH];
    unpack(load_cached<WIDTH>(scale), weights);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) values[i] *= factor * weights[i];
}

// Returns one over the root mean square of a head, whose pieces are in LANES threads.
__device__ __forceinline__ float inverse_rms(const Vectors (&raw)[STEPS], int lane, float epsilon) {
    float sum = 0.0f, values[WIDTH];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const Piece piece(lane + s * LANES);
        if (!piece.exists) continue;
        unpack(raw[s].first, values);
        sum += squares(values);
        unpack(raw[s].second, values);
        sum += piece.rotated ? squares(values) : 0.0f;
    }
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    return rsqrtf(sum / SIZE + epsilon);
}

// THREAD_HEADS heads of a tensor at one position, of which `count` exist.
struct Heads {
    const X_T* x;
    Y_T* y;
    INDEX from, to;  // strides of x and y from head to head
    int count;
    const SCALE_T* scale;
};

__device__ __forceinline__ void load(const Heads& heads, int lane, Vectors (&raw)[THREAD_HEADS][STEPS]) {
#pragma unroll
    for (int k = 0; k < THREAD_HEADS; ++k) {
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const Piece piece(lane + s * LANES);
            if (NORM) raw[k][s] = {};  // an absent piece adds 0 to the sum of squares
            if (k >= heads.count || !piece.exists) continue;
            raw[k][s].first = load_once<WIDTH>(heads.x + k * heads.from + piece.first);
            if (piece.rotated) raw[k][s].second = load_once<WIDTH>(heads.x + k * heads.from + piece.second);
        }
    }
}

__device__ __forceinline__ void finish(const Heads& heads, const Piece& piece, int k, const Vectors& raw, float factor,
                                       const Rotation& rotation, bool turned, bool streamed) {
    Y_T* row = heads.y + k * heads.to;
    float one[WIDTH], other[WIDTH];
    unpack(raw.first, one);
    if (NORM) scale_by(one, factor, heads.scale + piece.first);
    if (piece.rotated) {
        unpack(raw.second, other);
        if (NORM) scale_by(other, factor, heads.scale + piece.second);
        if (X_ADJACENT) deinterleave(one, other);
        if (turned) rotation.apply(one, other);
        if (Y_ADJACENT) interleave(one, other);
        store_as(streamed, row + piece.y_second, other);
    }
    store_as(streamed, row + piece.y_first, one);
}

#define STRIDES(name) long long name##_batch, long long name##_head, long long name##_row

extern "C" __global__ void __launch_bounds__(THREADS)
    rotary_embedding(const X_T* x, const COS_T* cos, const SIN_T* sin, Y_T* y, STRIDES(x), STRIDES(y),
                     const X_T* more_x, Y_T* more_y, STRIDES(more_x), STRIDES(more_y), const SCALE_T* scale,
                     const SCALE_T* more_scale, float epsilon, long long seq_length, long long count) {
    const INDEX item = INDEX(blockIdx.x) * THREADS + threadIdx.x, seq = INDEX(seq_length);
    const bool present = item < INDEX(count);
    if (!NORM && !present) return;  // with NORM all lanes take part in shuffles
    const int lane = int(item % LANES);
    const INDEX adjacent = item / LANES % ADJACENT_GROUPS, outer = item / (LANES * ADJACENT_GROUPS);
    const INDEX position = outer % seq, outer_heads = outer / seq;
    const int group = int(outer_heads % (ALL_GROUPS / ADJACENT_GROUPS)) * ADJACENT_GROUPS + int(adjacent);
    const INDEX batch = outer_heads / (ALL_GROUPS / ADJACENT_GROUPS);
    release_successor();
    wait_for_predecessor();
    const bool more = MORE_HEADS > 0 && group >= GROUPS;
    const int head = (more ? group - GROUPS : group) * THREAD_HEADS;
    const INDEX tables = TABLE_BATCHED ? batch : 0;  // in front of those of this element of the batch
    const INDEX rows = seq - KEPT;
    const INDEX table = ((TABLE_BY_HEADS ? tables * HEADS + head : tables) * rows + position - KEPT) * TABLE_ROW;
    const bool turned = KEPT == 0 || position >= KEPT;
    const Strides from = more ? Strides{more_x_batch, more_x_head, more_x_row} : Strides{x_batch, x_head, x_row};
    const Strides to = more ? Strides{more_y_batch, more_y_head, more_y_row} : Strides{y_batch, y_head, y_row};
    const Heads heads = {
        (more ? more_x : x) + from.at(batch, head, position), (more ? more_y : y) + to.at(batch, head, position),
        INDEX(from.head), INDEX(to.head), present ? (more ? MORE_HEADS : HEADS) - head : 0, more ? more_scale : scale};

    Vectors raw[THREAD_HEADS][STEPS];
    load(heads, lane, raw);
    float factors[THREAD_HEADS];
#pragma unroll
    for (int k = 0; k < THREAD_HEADS; ++k) factors[k] = NORM ? inverse_rms(raw[k], lane, epsilon) : 1.0f;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const Piece piece(lane + s * LANES);
        if (!present || !piece.exists) continue;
        Rotation rotation;
        if (piece.rotated && turned) rotation.load(cos, sin, table, lane + s * LANES);
#pragma unroll
        for (int k = 0; k < THREAD_HEADS; ++k) {
            if (k >= heads.count) continue;
            const bool reads = TABLE_BY_HEADS && k > 0 && piece.rotated && turned;
            if (reads) rotation.load(cos, sin, table + k * rows * TABLE_ROW, lane + s * LANES);
            finish(heads, piece, k, raw[k][s], factors[k], rotation, turned, STREAMED);
        }
    }
}
