// Elementwise operators that were fused after a node, as the struct `Program`. kernels/epilogue_program.py generates
// the struct before the kernel's source; for kernels without such operators, this file defines an empty struct.
//
// A kernel calls the program on results in fp32, and stores the returned values as y. The program itself loads its
// other operands and stores the other outputs. If no output has a dtype that the kernel stores, the program stores all
// outputs. A column is a position on the last axis of y.
//   HAS_PROGRAM           1: there are operators
//   STORES_Y              1: the kernel stores y; 0: the program stores all outputs
//   PROGRAM_PARAMETERS    parameters that follow the kernel's own
//   PROGRAM_ARGUMENTS     the initialiser of a Program
#pragma once

#include "output_position.cuh"

#ifndef HAS_PROGRAM
#define HAS_PROGRAM 0
#define STORES_Y 1
#define PROGRAM_RESIDUAL 0
#define PROGRAM_PARAMETERS
#define PROGRAM_ARGUMENTS

namespace program {

struct Program {  // for kernels without operators
    // The operands of the operators: values loaded for one row of y, for W columns of all rows, or for W elements.
    struct OfRow {};
    template <int W> struct OfColumns {};
    template <int W> struct OfElements {};

    // Returns the position in y at which a query's results of one head begin, for attention.
    __device__ __forceinline__ Located locate(int batch, int head, int query) const { return {}; }

    // The overloads of load read the operands for a row, for columns or for elements. The row lies in y only if
    // `inside`; only the first `left` of the W columns lie in y. ALIGNED: all rows of y begin at multiples of W
    // elements. `at` is the index of the first element.
    __device__ __forceinline__ void load(OfRow&, int row, bool inside) const {}
    template <bool ALIGNED, int W>
    __device__ __forceinline__ void load(OfColumns<W>&, int column, int left) const {}
    template <bool ALIGNED, int W>
    __device__ __forceinline__ void load(OfElements<W>&, int row, int column, long long at, int left) const {}

    // Applies the operators to the kernel's results, and stores the other outputs.
    template <bool ALIGNED, int W>
    __device__ __forceinline__ void apply(float (&results)[W], const float (&residual)[W], const OfRow&,
                                          const OfColumns<W>&, const OfElements<W>&, long long at, int left) const {}
};

}  // namespace program
#endif

using program::Program;

// Applies the program to the W neighbouring results in `values`, at `column` of the row that begins at `to`: loads the
// program's operands, and computes the values to store. Rows of y and their parts begin at multiples of W.
template <int W>
__device__ __forceinline__ void apply_program(const Program& program, const program::Located& to, int column,
                                              float (&values)[W], const float (&residual)[W]) {
    Program::OfRow of_row;
    Program::OfColumns<W> of_columns;
    Program::OfElements<W> of_elements;
    program.load(of_row, to.row, true);
    program.template load<true>(of_columns, to.column + column, W);
    program.template load<true>(of_elements, to.row, to.column + column, to.at + column, W);
    program.template apply<true>(values, residual, of_row, of_columns, of_elements, to.at + column, W);
}

template <int W>
__device__ __forceinline__ void apply_program(const Program& program, const program::Located& to, int column,
                                              float (&values)[W]) {
    const float residual[W] = {};
    apply_program(program, to, column, values, residual);
}
