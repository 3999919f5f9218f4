// Norms of gathered table rows; rows of up to two further tables or tensors are added before the norm.
//
//   ADDENDS             rows that are added: 0 to 2
//   FACTOR              1: the table's rows are multiplied by a number
//   TABLE_T, TYPE_2, TYPE_3, SCALE_T ... SUM_T   storage types; those of absent operands do not matter
//   IDS_T, IDS_2_T, IDS_3_T                      types of ids: int32_t or int64_t
//   GATHERED_2, _3      1: ids choose the addend's row; 0: the addend is a tensor
//   BROADCAST_2, _3     how the ids or the tensor broadcast: see Broadcast
//   INDEX_T             an unsigned type that counts the rows
#pragma once

using int32_t = int;
using int64_t = long long;
using uint32_t = unsigned;
using uint64_t = unsigned long long;

#define X_T TABLE_T  // norm.cuh needs these macros, although the loads of its Norm are replaced below
#define RESIDUAL_T TABLE_T
#define RESIDUAL 0
#include "norm.cuh"

// How an addend broadcasts to (batch, seq) rows: it has a row for each of them, a row for each position, a row for each
// batch element, or a single row.
enum Broadcast { PER_ROW, PER_POSITION, PER_BATCH, PER_ALL };

__device__ __align__(16) char zero_row[ROW * 4];  // zeros in every storage type

// The source of the rows of one addend, as an argument of kernels; host.py writes the fields in this order. Ids below 0
// count from the end of the table. An id outside of the table, which ONNX leaves undefined, gives zeros.
template <class T, class Id, bool GATHERED, int BROADCAST, bool PRESENT = true>
struct RowSource {
    const T* values;
    const Id* ids;
    long long count;  // rows of the table

    // Returns which row of the source is added to a (batch, seq) row: its id if ids select rows, else its position.
    __device__ __forceinline__ long long row_index(long long row, long long seq) const {
        if constexpr (!PRESENT || BROADCAST == PER_ALL) row = 0;
        else if constexpr (BROADCAST == PER_POSITION) row = INDEX_T(row) % INDEX_T(seq);
        else if constexpr (BROADCAST == PER_BATCH) row = INDEX_T(row) / INDEX_T(seq);
        return PRESENT && GATHERED ? ids[row] : row;
    }

    __device__ __forceinline__ const T* row(long long index) const {
        if (GATHERED && index < 0) index += count;
        const bool outside = GATHERED && (index < 0 || index >= count);
        return outside ? reinterpret_cast<const T*>(zero_row) : values + index * ROW;
    }
};

using Tokens = RowSource<TABLE_T, IDS_T, true, PER_ROW>;
using Second = RowSource<TYPE_2, IDS_2_T, GATHERED_2, BROADCAST_2, (ADDENDS > 0)>;
using Third = RowSource<TYPE_3, IDS_3_T, GATHERED_3, BROADCAST_3, (ADDENDS > 1)>;

// A vector of one of the rows that are added. NUMBER is 0 for the row of the token, and 1 or 2 for an addend.
template <int NUMBER, class T, bool PRESENT = (NUMBER <= ADDENDS)>
struct RowPack {
    Pack<T, WIDTH> values;

    __device__ __forceinline__ void fetch(const T* from, int pack) {
        if constexpr (NUMBER == 0) values = load_once<WIDTH>(from + pack * WIDTH);
        else values = load_cached<WIDTH>(from + pack * WIDTH);  // other rows add the same vector
    }

    __device__ __forceinline__ void copy_async(const T* from, int pack) {
        copy_to_shared<WIDTH>(values, from + pack * WIDTH);
    }

    __device__ __forceinline__ void add_to(float (&sum)[WIDTH]) const {
        float added[WIDTH];
        unpack(values, added);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) sum[i] += added[i];
    }
};

template <int NUMBER, class T>
struct RowPack<NUMBER, T, false> {
    __device__ __forceinline__ void fetch(const T*, int) {}
    __device__ __forceinline__ void copy_async(const T*, int) {}
    __device__ __forceinline__ void add_to(float (&)[WIDTH]) const {}
};

// A row op: the struct with which rows.cuh computes a row. It normalizes the sum of the gathered and added rows; with
// SUM, it also writes the sum.
template <class Statistic>
struct EmbeddingNorm : Norm<Statistic, false> {
    static constexpr bool LOCATES = true;
    using One = RowPack<0, TABLE_T>;
    using Two = RowPack<1, TYPE_2>;
    using Three = RowPack<2, TYPE_3>;
    struct Raw : One, Two, Three {};

    Tokens tokens;
    Second second;
    Third third;
    float factor;
    long long seq;
    const TABLE_T* token_row;  // the current rows of the three sources
    const TYPE_2* second_row;
    const TYPE_3* third_row;

    __device__ __forceinline__ void locate(long long row) {
        const long long one = tokens.row_index(row, seq), two = second.row_index(row, seq);
        const long long three = third.row_index(row, seq);
        token_row = tokens.row(one);  // the loads of all ids are in flight before the first id is needed
        second_row = second.row(two);
        third_row = third.row(three);
    }

    __device__ __forceinline__ Raw fetch(long long, int pack) const {
        Raw raw;
        raw.One::fetch(token_row, pack);
        raw.Two::fetch(second_row, pack);
        raw.Three::fetch(third_row, pack);
        return raw;
    }

    __device__ __forceinline__ void copy_async(Raw& raw, long long, int pack) const {
        raw.One::copy_async(token_row, pack);
        raw.Two::copy_async(second_row, pack);
        raw.Three::copy_async(third_row, pack);
    }

    __device__ __forceinline__ void convert(const Raw& raw, long long row, int pack, float (&values)[WIDTH],
                                            bool first) {
        unpack(raw.One::values, values);
        if constexpr (FACTOR) {
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) values[i] *= factor;
        }
        raw.Two::add_to(values);
        raw.Three::add_to(values);
        if constexpr (SUM)
            if (first) store_as(this->streamed, this->sum + this->at(row, pack), values);
    }
};
