// Row ops of rows.cuh call the program, the operators that are fused after a norm (program.cuh), through RowProgram: it
// loads the program's operands for a thread's packs of elements, and computes the program's results.
#pragma once
#include "program.cuh"

// A program, the operators that are fused into the kernel, and its operands. With PREFETCH_WEIGHTS, the operands for
// all packs are loaded along with the row. Otherwise the operands for each pack are loaded when the pack's results are
// stored, because registers are scarce.
struct RowProgram {
    Program program;
    Program::OfRow of_row;
    Program::OfColumns<WIDTH> of_columns[PREFETCH_WEIGHTS ? CHUNKS : 1];
    Program::OfElements<WIDTH> of_elements[PREFETCH_WEIGHTS ? CHUNKS : 1];

    // With PREFETCH_WEIGHTS, loads the operands for pack k. The first element of the pack is at `row` and `column` of
    // y, and has index `at`.
    __device__ __forceinline__ void load_early(int k, long long row, int column, long long at) {
        if constexpr (PREFETCH_WEIGHTS) load(k, row, column, at);
    }

    __device__ __forceinline__ void apply(int k, long long row, int column, long long at, float (&values)[WIDTH]) {
        if constexpr (!PREFETCH_WEIGHTS) load(k, row, column, at);
        const float residual[WIDTH] = {};
        const int slot = PREFETCH_WEIGHTS ? k : 0;
        program.template apply<true>(values, residual, of_row, of_columns[slot], of_elements[slot], at, WIDTH);
    }

    __device__ __forceinline__ void load(int k, long long row, int column, long long at) {
        const int slot = PREFETCH_WEIGHTS ? k : 0;
        if (k == 0) program.load(of_row, int(row), true);
        program.template load<true>(of_columns[slot], column, WIDTH);
        program.template load<true>(of_elements[slot], int(row), column, at, WIDTH);
    }
};
