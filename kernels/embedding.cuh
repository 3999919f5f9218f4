// A norm along rows of a table, to which up to two others are added: rows of further tables, or of tensors.
//
//   ADDENDS           how many are added               FACTOR    1 where the table's rows are multiplied by a number
//   TABLE_T, TYPE_2, TYPE_3, SCALE_T ... SUM_T         storage types; those of absent operands do not matter
//   IDS_T, IDS_2_T, IDS_3_T                            of ids: int32_t or int64_t
//   GATHERED_2, _3    1 where ids choose the addend's row    PLACE_2, _3  where it or its id lies: see Place
//   INDEX_T           an unsigned type that counts the rows
#pragma once

using int32_t = int;
using int64_t = long long;
using uint32_t = unsigned;
using uint64_t = unsigned long long;

#define X_T TABLE_T  // what norm.cuh reads is not read there
#define RESIDUAL_T TABLE_T
#define RESIDUAL 0
#include "norm.cuh"

// What an addend has for (batch, seq) rows, as it broadcasts: one for each, for each position, for each batch, for all.
enum Place { OF_ROW, OF_POSITION, OF_BATCH, OF_ALL };

__device__ __align__(16) char zero_row[ROW * 4];  // of any type

// Ids below 0 count from the end of the table. Outside of it, where ONNX says nothing, there are zeros.
template <class T, class Id, bool GATHERED, int PLACE, bool THERE = true>
struct Source {
    const T* values;
    const Id* ids;
    long long count;  // rows of the table
    const T* from;    // where the values for the present row begin

    // The id, or the place among the rows of a tensor.
    __device__ __forceinline__ long long place(long long row, long long seq) const {
        if constexpr (!THERE || PLACE == OF_ALL) row = 0;
        else if constexpr (PLACE == OF_POSITION) row = INDEX_T(row) % INDEX_T(seq);
        else if constexpr (PLACE == OF_BATCH) row = INDEX_T(row) / INDEX_T(seq);
        return THERE && GATHERED ? ids[row] : row;
    }

    __device__ __forceinline__ void aim(long long place) {
        if (GATHERED && place < 0) place += count;
        const bool outside = GATHERED && (place < 0 || place >= count);
        from = outside ? reinterpret_cast<const T*>(zero_row) : values + place * ROW;
    }
};

using Tokens = Source<TABLE_T, IDS_T, true, OF_ROW>;
using Second = Source<TYPE_2, IDS_2_T, GATHERED_2, PLACE_2, (ADDENDS > 0)>;
using Third = Source<TYPE_3, IDS_3_T, GATHERED_3, PLACE_3, (ADDENDS > 1)>;

// A vector of one of the rows that are added up.
template <int NUMBER, class T, bool THERE = (NUMBER <= ADDENDS)>
struct Part {
    Pack<T, WIDTH> values;

    __device__ __forceinline__ void fetch(const T* from, int pack) {
        if constexpr (NUMBER == 0) values = load_once<WIDTH>(from + pack * WIDTH);
        else values = load_cached<WIDTH>(from + pack * WIDTH);  // which other rows add as well
    }

    __device__ __forceinline__ void copy(const T* from, int pack) { copy_later<WIDTH>(values, from + pack * WIDTH); }

    __device__ __forceinline__ void add_to(float (&sum)[WIDTH]) const {
        float added[WIDTH];
        unpack(values, added);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) sum[i] += added[i];
    }
};

template <int NUMBER, class T>
struct Part<NUMBER, T, false> {
    __device__ __forceinline__ void fetch(const T*, int) {}
    __device__ __forceinline__ void copy(const T*, int) {}
    __device__ __forceinline__ void add_to(float (&)[WIDTH]) const {}
};

// A row op of rows.cuh: Norm of the sum, which is also written where SUM is 1.
template <class Statistic>
struct EmbeddingNorm : Norm<Statistic, false> {
    static constexpr bool SEEKS = true;
    using One = Part<0, TABLE_T>;
    using Two = Part<1, TYPE_2>;
    using Three = Part<2, TYPE_3>;
    struct Raw : One, Two, Three {};

    Tokens tokens;
    Second second;
    Third third;
    float factor;
    long long seq;

    __device__ __forceinline__ void seek(long long row) {
        const long long one = tokens.place(row, seq), two = second.place(row, seq), three = third.place(row, seq);
        tokens.aim(one);  // all ids are on their way before one is needed
        second.aim(two);
        third.aim(three);
    }

    __device__ __forceinline__ Raw fetch(long long, int pack) const {
        Raw raw;
        raw.One::fetch(tokens.from, pack);
        raw.Two::fetch(second.from, pack);
        raw.Three::fetch(third.from, pack);
        return raw;
    }

    __device__ __forceinline__ void copy(Raw& raw, long long, int pack) const {
        raw.One::copy(tokens.from, pack);
        raw.Two::copy(second.from, pack);
        raw.Three::copy(third.from, pack);
    }

    __device__ __forceinline__ void open(const Raw& raw, long long row, int pack, float (&values)[WIDTH], bool first) {
        unpack(raw.One::values, values);
        if constexpr (FACTOR) {
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) values[i] *= factor;
        }
        raw.Two::add_to(values);
        raw.Three::add_to(values);
        if constexpr (SUM)
            if (first) store<STREAMED>(this->sum + this->at(row, pack), values);
    }
};
