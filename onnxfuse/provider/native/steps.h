// Reading and checking the steps of a plan.
#pragma once

#include <cstdint>
#include <vector>

#include "plan.h"
#include "reader.h"

namespace onnxfuse {

// A tensor or buffer that a step may point into.
struct Extent {
  int64_t bytes;
  bool aligned;  // to 16 bytes
};
struct Extents {
  std::vector<Extent> of[3];  // by Place
};

Step read_step(Reader& reader, const Extents& extents, int device);

// Without extents, no bounds are checked: for what is only asked about, and not run.
Product read_product(Reader& reader, const Extents* extents);

}  // namespace onnxfuse
