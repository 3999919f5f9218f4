// Rotary embedding of a block's queries in shared memory. Each warpgroup rotates the queries that it multiplies.
//
// Each query belongs to one block only, so no rotation is repeated. A separate launch for the rotation would have to
// read and write all queries once more. Keys are rotated once, before this kernel, because every block reads all of
// them.
//
// Macros, where ROTATED is not 0: those of rotation.cuh, with X_T = T and SIZE = HEAD_DIM, and
//   KEPT_ROWS   the first KEPT_ROWS queries are not rotated; the tables have no rows for them
#pragma once
#include "attention_hopper_shape.cuh"

#ifndef ROTATED
#define ROTATED 0
#endif

#if !ROTATED
using COS_T = f32;
using SIN_T = f32;
using SCALE_T = f32;
#endif

// A parameter of attention_hopper.cu; hopper_rotation.py writes the fields in this order.
struct RotationTables {
    const COS_T* cos;
    const SIN_T* sin;
    long long batch;       // elements of a table from one batch to the next
    const SCALE_T* scale;  // with NORM: scales of the norm before the rotation
    float epsilon;
};

#if !ROTATED
struct QueryRotation {  // without a rotation, the queries stay as they are
    __device__ __forceinline__ QueryRotation(const RotationTables&, int, const Shape&, int) {}
    __device__ __forceinline__ void apply(char*, int) {}
};
#else
#include "rotation.cuh"

static_assert(WIDTH == 8 && LANES >= 2 && LANES <= 8, "vectors are swizzled, and the threads of a row are in a warp");
static_assert(KEPT_ROWS == 0 || INTERLEAVED == Y_INTERLEAVED, "elements that stay as they are do not move");

// The work of one thread: LANES threads share a query, and each thread has several of a warpgroup's 64 queries. The
// threads that share a query are neighbours, because a warp's read of a table costs whole lines of 128 bytes, even if
// it needs only a part of a line.
class QueryRotation {
    static constexpr int PIECES_OF_ROW = NORM ? PIECES : ROTATED_PIECES;  // pieces (see rotation.cuh) that change
    static constexpr int OF_THREAD = (PIECES_OF_ROW + LANES - 1) / LANES;
    static constexpr int ROWS = 64 * LANES / 128, NEXT_ROW = 128 / LANES;  // a thread has ROWS rows, NEXT_ROW apart
    static constexpr int ANGLE_WORDS = OF_THREAD *
                                       (TABLE_ROW / ROTATED_HALF * WIDTH * (sizeof(COS_T) + sizeof(SIN_T)) / 4);
    static constexpr int IN_REGISTERS = ANGLE_WORDS < 64 ? 64 / ANGLE_WORDS : 1;  // rows whose angles are in registers
    static constexpr int AT_ONCE = ROWS < IN_REGISTERS ? ROWS : IN_REGISTERS;

    const RotationTables& tables;
    const COS_T* cos;  // the table's row for the warpgroup's first query
    const SIN_T* sin;
    int row, lane;    // the thread's first row in the warpgroup, and its index among the LANES threads of this row
    int first, last;  // the rows from `first` to `last`, both included, are rotated
    Rotation angles[AT_ONCE][OF_THREAD];

    __device__ __forceinline__ bool turned(int r) const {
        return row + r * NEXT_ROW >= first && row + r * NEXT_ROW <= last;
    }

    __device__ __forceinline__ void load_angles(int from) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int table = (row + (from + i) * NEXT_ROW) * TABLE_ROW;
#pragma unroll
            for (int j = 0; j < OF_THREAD; ++j)
                if (turned(from + i) && Piece(lane + j * LANES).rotated)
                    angles[i][j].load(cos + table, sin + table, lane + j * LANES);
        }
    }

    // Returns the 16 bytes of row r from `element` on; rows lie in panels of 64 columns.
    __device__ __forceinline__ uint4& vector(char* queries, int r, int element) const {
        const int at = row + r * NEXT_ROW;
        char* const line = queries + element / 64 * QO_PANEL + at * 128;
        return *reinterpret_cast<uint4*>(line + (element % 64 / WIDTH ^ at % 8) * 16);
    }

    __device__ __forceinline__ Pack<T, WIDTH> loaded(char* queries, int r, int element) const {
        const uint4 words = vector(queries, r, element);
        return {{words.x, words.y, words.z, words.w}};
    }

    __device__ __forceinline__ void store(char* queries, int r, int element, const float (&values)[WIDTH]) const {
        const Pack<T, WIDTH> packed = pack<T>(values);
        vector(queries, r, element) = uint4{packed.words[0], packed.words[1], packed.words[2], packed.words[3]};
    }

public:
    // Loads the first angles; the queries need not have arrived yet. `from`: the first query of the warpgroup.
    __device__ __forceinline__ QueryRotation(const RotationTables& tables, int from, const Shape& shape, int batch)
        : tables(tables), row(threadIdx.x % 128 / LANES), lane(threadIdx.x % LANES), first(KEPT_ROWS - from),
          last(shape.queries - 1 - from) {
        const long long table = batch * tables.batch + (long long)(from - KEPT_ROWS) * TABLE_ROW;
        cos = tables.cos + table, sin = tables.sin + table;
        load_angles(0);
    }

    // Rotates the warpgroup's queries, which must have arrived; wgmma can read them afterwards. `barrier`: a named
    // barrier of the warpgroup's 128 threads.
    __device__ __forceinline__ void apply(char* queries, int barrier) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (r > 0 && r % AT_ONCE == 0) load_angles(r);
            Vectors raw[OF_THREAD];
#pragma unroll
            for (int j = 0; j < OF_THREAD; ++j) {
                const Piece piece(lane + j * LANES);
                if (!piece.exists) continue;
                raw[j].first = loaded(queries, r, piece.first);
                if (piece.rotated) raw[j].second = loaded(queries, r, piece.second);
            }
            const float factor = NORM ? inverse_rms(raw, lane, tables.epsilon) : 1.0f;
            if (INTERLEAVED != Y_INTERLEAVED) __syncwarp();  // waits until the other lanes have read the row
#pragma unroll
            for (int j = 0; j < OF_THREAD; ++j) {
                const Piece piece(lane + j * LANES);
                if (!piece.exists || !(NORM || piece.rotated)) continue;
                float one[WIDTH], other[WIDTH];
                turn(raw[j], piece, factor, tables.scale, angles[r % AT_ONCE][j], turned(r), one, other);
                store(queries, r, piece.y_first, one);
                if (piece.rotated) store(queries, r, piece.y_second, other);
            }
        }
        store_fence();
        named_barrier(barrier, 128);
    }
};
#endif
