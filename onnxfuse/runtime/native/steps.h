// Reading and checking the steps of a plan.
#pragma once

#include <cstdint>
#include <vector>

#include "plan.h"
#include "word_reader.h"

namespace onnxfuse {

// A tensor or scratch buffer that a step's pointers may point into.
struct Extent {
  int64_t bytes;
  bool aligned;  // to 16 bytes
};
struct Extents {
  std::vector<Extent> of[3];  // by MemoryKind
};

Step read_step(WordReader& reader, const Extents& extents, int device);

// If `extents` is null, bounds are not checked, because the step is not run: it is only a query to the library.
Matmul read_matmul(WordReader& reader, const Extents* extents);
Convolution read_convolution(WordReader& reader, const Extents* extents);

}  // namespace onnxfuse
