// Expressions over the sizes of a node's inputs, which compute the numbers of a plan for a new shape.
#pragma once

#include <cstdint>
#include <vector>

#include "word_reader.h"

namespace onnxfuse {

class Expressions {
 public:
  // Reads the rows that onnxfuse.runtime.expressions makes, each an operation with two operands.  Throws
  // std::runtime_error for a malformed row.
  Expressions(WordReader& reader, size_t sizes);

  size_t count() const { return rows_.size(); }

  // Returns the values of all expressions; real numbers are the bits of a double.  `overflowed` becomes true if
  // an integer does not fit into 64 bits.
  std::vector<int64_t> evaluate(const std::vector<int64_t>& sizes, bool& overflowed) const;

  // Returns how far a comparison is from giving `answer`: its greater side divided by its lesser one, minus 1.  The
  // result is 0 if the comparison has that answer.  Otherwise it is infinite if the sides are integers, or if one of
  // them is not positive.  `values` are the values of all expressions.
  double miss(size_t expression, bool answer, const std::vector<int64_t>& values) const;

 private:
  struct Row {
    int64_t op, a, b;
  };
  std::vector<Row> rows_;
};

}  // namespace onnxfuse
