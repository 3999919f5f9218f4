// y = x * cos + rotate_half(x) * sin for each head of one tensor, or of two that share the tables, as queries and keys
// do. With NORM, each head is first divided by its root mean square and scaled.
//
// The kernel moves each element of x and y once, 4 bytes an element in fp16, and computes in fp32. A thread reads its
// piece of the tables once for THREAD_HEADS heads.
//
//   HEADS            heads of the first tensor
//   MORE_HEADS       heads of the second tensor; 0: there is none
//   THREAD_HEADS     heads per thread
//   ADJACENT_GROUPS  groups of THREAD_HEADS heads of one position side by side in a block; divides the number of groups
//   LANES            threads that share a head's pieces; with NORM, a power of two up to 32
//   TABLE_BATCHED    1: each element of the batch has tables of its own
//   TABLE_BY_HEADS   1: each head of the first tensor has its own tables, and there is no second tensor
//   TABLE_BY_ROWS    1: each position has a row of the tables; 0: all share one
//   KEPT             number of first positions whose elements stay as they are; tables have no rows for them
//   and the macros of rotation.cuh
#include "types.cuh"
#include "head_tensor.cuh"
#include "rotation.cuh"

constexpr int GROUPS = (HEADS + THREAD_HEADS - 1) / THREAD_HEADS;
constexpr int ALL_GROUPS = GROUPS + (MORE_HEADS + THREAD_HEADS - 1) / THREAD_HEADS;

static_assert(ALL_GROUPS % ADJACENT_GROUPS == 0, "groups adjacent by adjacent are as many everywhere");
static_assert(!TABLE_BY_HEADS || MORE_HEADS == 0, "tables of heads are of one tensor");
static_assert(KEPT == 0 || INTERLEAVED == Y_INTERLEAVED, "elements that stay as they are do not move");
static_assert(!NORM || (LANES <= 32 && (LANES & (LANES - 1)) == 0), "a head's threads are lanes of a warp");

// A tensor, its result, and the scales of its norm; rotary.py writes the fields in this order.
struct RotatedHeads {
    HeadTensor<const X_T> x;
    HeadTensor<Y_T> y;
    const SCALE_T* scale;
};

template <class E>
__device__ __forceinline__ E* address(const HeadTensor<E>& of, INDEX batch, int head, INDEX position) {
    return of.data + (batch * INDEX(of.batch) + head * INDEX(of.head) + position * INDEX(of.row));
}

// THREAD_HEADS heads of a tensor at one position; the first `count` exist.
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
    turn(raw, piece, factor, heads.scale, rotation, turned, one, other);
    if (piece.rotated) store_as(streamed, row + piece.y_second, other);
    store_as(streamed, row + piece.y_first, one);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    rotary_embedding(const COS_T* cos, const SIN_T* sin, RotatedHeads first, RotatedHeads second, float epsilon,
                     long long seq_length, long long count) {
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
    const INDEX tables = TABLE_BATCHED ? batch : 0;  // index of this batch element's tables
    const INDEX rows = TABLE_BY_ROWS ? seq - KEPT : 1, row = TABLE_BY_ROWS ? position - KEPT : 0;
    const INDEX table = ((TABLE_BY_HEADS ? tables * HEADS + head : tables) * rows + row) * TABLE_ROW;
    const bool turned = KEPT == 0 || position >= KEPT;
    RotatedHeads own = first;
    if (more) own = second;
    const Heads heads = {address(own.x, batch, head, position),
                         address(own.y, batch, head, position),
                         INDEX(own.x.head),
                         INDEX(own.y.head),
                         present ? (more ? MORE_HEADS : HEADS) - head : 0,
                         own.scale};

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
        if (piece.rotated && turned) rotation.load(cos + table, sin + table, lane + s * LANES);
#pragma unroll
        for (int k = 0; k < THREAD_HEADS; ++k) {
            if (k >= heads.count) continue;
            const bool reads = TABLE_BY_HEADS && k > 0 && piece.rotated && turned;
            const INDEX own = table + k * rows * TABLE_ROW;
            if (reads) rotation.load(cos + own, sin + own, lane + s * LANES);
            finish(heads, piece, k, raw[k][s], factors[k], rotation, turned, STREAMED);
        }
    }
}
