// The rotation of the pairs of a head by the angles of a position.
//
//   first, second = first cos - second sin, second cos + first sin
//
// A head is divided into pieces: first those that are rotated, each of two vectors of WIDTH elements, then the others,
// each of one vector.
//
//   SIZE           elements of a head; the first ROTATED are rotated
//   LANES          threads that share a head's pieces    NORM  1: each head is normalized (RMS) and scaled
//   WIDTH          elements of a vector access; divides ROTATED / 2 and SIZE - ROTATED
//   INTERLEAVED    1: the elements of a pair of x are neighbours; 0: they are ROTATED / 2 apart
//   Y_INTERLEAVED  the same for y
//   WHOLE_TABLE    1: a row of the tables has ROTATED elements, in the order of a head's elements; 0: ROTATED / 2
//   X_T, COS_T, SIN_T, SCALE_T   element types of x, of the tables, and of the norm's scales
#pragma once
#include "types.cuh"

constexpr int ROTATED_HALF = ROTATED / 2;
constexpr int ROTATED_PIECES = ROTATED_HALF / WIDTH;
constexpr int PIECES = ROTATED_PIECES + (SIZE - ROTATED) / WIDTH;
constexpr int STEPS = (PIECES + LANES - 1) / LANES;  // pieces of a thread
constexpr int TABLE_ROW = WHOLE_TABLE ? ROTATED : ROTATED_HALF;
// Whether the two elements of a pair are in the same vector, both in x and in y.
constexpr bool INSIDE = INTERLEAVED && Y_INTERLEAVED && WIDTH > 1;
constexpr bool TABLE_OF_PAIRS = WHOLE_TABLE && INTERLEAVED && !INSIDE;
// The distance, in elements of a table, from the angles of a piece's first vector to those of its second vector.
constexpr int TO_SECOND = TABLE_OF_PAIRS ? WIDTH : WHOLE_TABLE ? ROTATED_HALF : 0;

static_assert(ROTATED_HALF % WIDTH == 0 && (SIZE - ROTATED) % WIDTH == 0, "a piece is of one kind");

// Deinterleaves two vectors that hold first0 second0 first1 second1 ...: writes the first elements of all pairs to
// `first`, and the second elements to `second`.
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

// The rotation of one piece of a head, by angles from the tables.
struct Rotation {
    float cos_first[WIDTH], sin_first[WIDTH], cos_second[WIDTH], sin_second[WIDTH];

    // Loads the angles of a piece; `cos` and `sin` point to the row of the tables.
    __device__ __forceinline__ void load(const COS_T* cos, const SIN_T* sin, int piece) {
        int at;
        if constexpr (INSIDE && !WHOLE_TABLE) {
            at = piece * (WIDTH / 2);
            load_twice(cos + at, cos_first), load_twice(sin + at, sin_first);
            load_twice(cos + at + ROTATED_HALF / 2, cos_second), load_twice(sin + at + ROTATED_HALF / 2, sin_second);
            return;
        }
        at = piece * WIDTH * (TABLE_OF_PAIRS ? 2 : 1);
        unpack(load_cached<WIDTH>(cos + at), cos_first);
        unpack(load_cached<WIDTH>(sin + at), sin_first);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) cos_second[i] = cos_first[i], sin_second[i] = sin_first[i];
        if constexpr (TO_SECOND == 0) return;
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

// Whether the two vectors of a piece are adjacent. Otherwise, they are ROTATED_HALF elements apart, which is faster:
// neighbouring threads then access adjacent vectors, not every second vector. With interleaved pairs, this is possible
// only if both elements of a pair are in the same vector (INSIDE).
constexpr bool X_ADJACENT = INTERLEAVED && !INSIDE, Y_ADJACENT = Y_INTERLEAVED && !INSIDE;

// The two vectors of a piece: where each begins within a head, in x and in y.
struct Piece {
    bool exists, rotated;
    int first, second, y_first, y_second;

    __device__ __forceinline__ explicit Piece(int piece)
        : exists(LANES * STEPS == PIECES || piece < PIECES), rotated(piece < ROTATED_PIECES),
          first(begin(piece, X_ADJACENT)), second(first + (X_ADJACENT ? WIDTH : ROTATED_HALF)),
          y_first(begin(piece, Y_ADJACENT)), y_second(y_first + (Y_ADJACENT ? WIDTH : ROTATED_HALF)) {}

    __device__ __forceinline__ static int begin(int piece, bool adjacent) {
        if (piece >= ROTATED_PIECES) return ROTATED + (piece - ROTATED_PIECES) * WIDTH;
        return piece * WIDTH * (adjacent ? 2 : 1);
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

struct Vectors { Pack<X_T, WIDTH> first, second; };

// Returns one over the root mean square of a head. LANES neighbouring threads have its pieces, COUNT pieces each.
template <int COUNT>
__device__ __forceinline__ float inverse_rms(const Vectors (&raw)[COUNT], int lane, float epsilon) {
    float sum = 0.0f, values[WIDTH];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const Piece piece(lane + i * LANES);
        if (!piece.exists) continue;
        unpack(raw[i].first, values);
        sum += squares(values);
        if (!piece.rotated) continue;
        unpack(raw[i].second, values);
        sum += squares(values);
    }
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    return rsqrtf(sum / SIZE + epsilon);
}

// Returns in `one` and `other` the vectors of a piece after norm and rotation; `factor` is one over the root mean
// square. A piece outside of the rotated elements has only `one`. If `turned` is false, nothing is rotated.
__device__ __forceinline__ void turn(const Vectors& raw, const Piece& piece, float factor, const SCALE_T* scale,
                                     const Rotation& rotation, bool turned, float (&one)[WIDTH],
                                     float (&other)[WIDTH]) {
    unpack(raw.first, one);
    if (NORM) scale_by(one, factor, scale + piece.first);
    if (!piece.rotated) return;
    unpack(raw.second, other);
    if (NORM) scale_by(other, factor, scale + piece.second);
    if (X_ADJACENT) deinterleave(one, other);
    if (turned) rotation.apply(one, other);
    if (Y_ADJACENT) interleave(one, other);
}
