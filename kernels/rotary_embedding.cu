// y = x * cos + rotate_half(x) * sin for each head: of one tensor, or of two that turn by the same angles, as queries
// and keys do; with NORM each head is divided by its root mean square and scaled first.
//
// Moves each element of x and y once, 4 bytes an element in fp16; a thread reads its piece of the tables once for
// HEADS_EACH heads. Computed in fp32.
//
//   SIZE           of a head; ROTATED of them are rotated, the rest is copied
//   HEADS          of the first tensor, MORE_HEADS of the second (0: there is none); HEADS_EACH of them per thread
//   GROUPS_EACH    groups of as many heads that lie side by side in a block before the next place; divides their number
//   WIDTH          elements of a vector access; divides ROTATED / 2 and SIZE - ROTATED
//   LANES          threads of a head; with NORM a power of two up to 32
//   INTERLEAVED    1: the elements of a pair are neighbours; 0: half of ROTATED apart
//   WHOLE_TABLE    1: a row of the tables has ROTATED elements, and both halves count; 0: it has ROTATED / 2
//   TABLE_BATCHED  1: each element of the batch has tables of its own
#include "types.cuh"

constexpr int HALF = ROTATED / 2;
constexpr int TURNS = HALF / WIDTH;  // pieces of a head that are rotated: two vectors each
constexpr int PIECES = TURNS + (SIZE - ROTATED) / WIDTH;
constexpr int STEPS = (PIECES + LANES - 1) / LANES;  // pieces of a thread
constexpr int GROUPS = (HEADS + HEADS_EACH - 1) / HEADS_EACH;
constexpr int ALL_GROUPS = GROUPS + (MORE_HEADS + HEADS_EACH - 1) / HEADS_EACH;
constexpr int TABLE_ROW = WHOLE_TABLE ? ROTATED : HALF;

static_assert(HALF % WIDTH == 0 && (SIZE - ROTATED) % WIDTH == 0, "a piece is of one kind");
static_assert(ALL_GROUPS % GROUPS_EACH == 0, "groups side by side are as many everywhere");
static_assert(!NORM || (LANES <= 32 && (LANES & (LANES - 1)) == 0), "a head's threads are lanes of a warp");

// Values that lie as first0 second0 first1 second1 ... in two vectors, sorted into first and second, and back.
__device__ __forceinline__ void sort_pairs(float (&first)[WIDTH], float (&second)[WIDTH]) {
    float both[2 * WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) both[i] = first[i], both[WIDTH + i] = second[i];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) first[i] = both[2 * i], second[i] = both[2 * i + 1];
}

__device__ __forceinline__ void mix_pairs(float (&first)[WIDTH], float (&second)[WIDTH]) {
    float both[2 * WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) both[2 * i] = first[i], both[2 * i + 1] = second[i];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) first[i] = both[i], second[i] = both[WIDTH + i];
}

struct Turn {  // by the angles of one piece of the tables
    float cos_first[WIDTH], sin_first[WIDTH], cos_second[WIDTH], sin_second[WIDTH];

    __device__ __forceinline__ void load(const COS_T* cos, const SIN_T* sin, INDEX at) {
        unpack(load_cached<WIDTH>(cos + at), cos_first);
        unpack(load_cached<WIDTH>(sin + at), sin_first);
        unpack(load_cached<WIDTH>(cos + at + (WHOLE_TABLE ? HALF : 0)), cos_second);
        unpack(load_cached<WIDTH>(sin + at + (WHOLE_TABLE ? HALF : 0)), sin_second);
    }

    __device__ __forceinline__ void apply(float (&first)[WIDTH], float (&second)[WIDTH]) const {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const float one = first[i], other = second[i];
            first[i] = fmaf(one, cos_first[i], -other * sin_first[i]);
            second[i] = fmaf(other, cos_second[i], one * sin_second[i]);
        }
    }
};

struct Piece {  // where a thread's elements lie in a head
    bool exists, turned;
    int first, second;

    __device__ __forceinline__ explicit Piece(int piece)
        : exists(LANES * STEPS == PIECES || piece < PIECES), turned(piece < TURNS),
          first(turned ? piece * WIDTH * (INTERLEAVED ? 2 : 1) : ROTATED + (piece - TURNS) * WIDTH),
          second(first + (INTERLEAVED ? WIDTH : HALF)) {}
};

struct Vectors {
    Pack<X_T, WIDTH> first, second;
};

struct Strides {  // in elements, of a batch element, a head, a place
    long long batch, head, row;

    __device__ __forceinline__ INDEX at(INDEX b, int h, INDEX place) const {
        return b * INDEX(batch) + h * INDEX(head) + place * INDEX(row);
    }
};

__device__ __forceinline__ float squares(const float (&values)[WIDTH]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) sum = fmaf(values[i], values[i], sum);
    return sum;
}

__device__ __forceinline__ void scaled(float (&values)[WIDTH], float factor, const SCALE_T* scale) {
    float weights[WIDTH];
    unpack(load_cached<WIDTH>(scale), weights);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) values[i] *= factor * weights[i];
}

// One over the root mean square of a head, whose pieces are in LANES threads.
__device__ __forceinline__ float shrinking(const Vectors (&raw)[STEPS], int lane, float epsilon) {
    float sum = 0.0f, values[WIDTH];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const Piece piece(lane + s * LANES);
        if (!piece.exists) continue;
        unpack(raw[s].first, values);
        sum += squares(values);
        unpack(raw[s].second, values);
        sum += piece.turned ? squares(values) : 0.0f;
    }
#pragma unroll
    for (int apart = LANES / 2; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
    return rsqrtf(sum / SIZE + epsilon);
}

struct Heads {  // HEADS_EACH heads of a tensor at one place, of which `count` exist
    const X_T* x;
    Y_T* y;
    INDEX from, to;  // elements from one to the next
    int count;
    const SCALE_T* scale;
};

__device__ __forceinline__ void load(const Heads& heads, int lane, Vectors (&raw)[HEADS_EACH][STEPS]) {
#pragma unroll
    for (int k = 0; k < HEADS_EACH; ++k) {
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const Piece piece(lane + s * LANES);
            if (NORM) raw[k][s] = {};  // what is not there adds nothing
            if (k >= heads.count || !piece.exists) continue;
            raw[k][s].first = load_once<WIDTH>(heads.x + k * heads.from + piece.first);
            if (piece.turned) raw[k][s].second = load_once<WIDTH>(heads.x + k * heads.from + piece.second);
        }
    }
}

__device__ __forceinline__ void finish(const Heads& heads, const Piece& piece, int k, const Vectors& raw, float factor,
                                       const Turn& turn) {
    Y_T* row = heads.y + k * heads.to;
    float one[WIDTH], other[WIDTH];
    unpack(raw.first, one);
    if (NORM) scaled(one, factor, heads.scale + piece.first);
    if (piece.turned) {
        unpack(raw.second, other);
        if (NORM) scaled(other, factor, heads.scale + piece.second);
        if (INTERLEAVED) sort_pairs(one, other);
        turn.apply(one, other);
        if (INTERLEAVED) mix_pairs(one, other);
        store<STREAMED>(row + piece.second, other);
    }
    store<STREAMED>(row + piece.first, one);
}

#define STRIDES(name) long long name##_batch, long long name##_head, long long name##_row

extern "C" __global__ void __launch_bounds__(THREADS)
    rotary_embedding(const X_T* x, const COS_T* cos, const SIN_T* sin, Y_T* y, STRIDES(x), STRIDES(y),
                     const X_T* more_x, Y_T* more_y, STRIDES(more_x), STRIDES(more_y), const SCALE_T* scale,
                     const SCALE_T* more_scale, float epsilon, long long seq_length, long long count) {
    const INDEX item = INDEX(blockIdx.x) * THREADS + threadIdx.x, seq = INDEX(seq_length);
    const bool present = item < INDEX(count);
    if (!NORM && !present) return;  // the lanes of a norm wait for each other
    const int lane = int(item % LANES);
    const INDEX side = item / LANES % GROUPS_EACH, beside = item / (LANES * GROUPS_EACH);
    const INDEX place = beside % seq, above = beside / seq;
    const int group = int(above % (ALL_GROUPS / GROUPS_EACH)) * GROUPS_EACH + int(side);
    const INDEX batch = above / (ALL_GROUPS / GROUPS_EACH);
    const INDEX table = ((TABLE_BATCHED ? batch : 0) * seq + place) * TABLE_ROW;
    release_successor();
    wait_for_predecessor();
    const bool more = MORE_HEADS > 0 && group >= GROUPS;
    const int head = (more ? group - GROUPS : group) * HEADS_EACH;
    const Strides from = more ? Strides{more_x_batch, more_x_head, more_x_row} : Strides{x_batch, x_head, x_row};
    const Strides to = more ? Strides{more_y_batch, more_y_head, more_y_row} : Strides{y_batch, y_head, y_row};
    const Heads heads = {
        (more ? more_x : x) + from.at(batch, head, place), (more ? more_y : y) + to.at(batch, head, place),
        INDEX(from.head), INDEX(to.head), present ? (more ? MORE_HEADS : HEADS) - head : 0, more ? more_scale : scale};

    Vectors raw[HEADS_EACH][STEPS];
    load(heads, lane, raw);
    float factors[HEADS_EACH];
#pragma unroll
    for (int k = 0; k < HEADS_EACH; ++k) factors[k] = NORM ? shrinking(raw[k], lane, epsilon) : 1.0f;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const Piece piece(lane + s * LANES);
        if (!present || !piece.exists) continue;
        Turn turn;
        if (piece.turned) turn.load(cos, sin, table + (lane + s * LANES) * WIDTH);
#pragma unroll
        for (int k = 0; k < HEADS_EACH; ++k)
            if (k < heads.count) finish(heads, piece, k, raw[k][s], factors[k], turn);
    }
}
