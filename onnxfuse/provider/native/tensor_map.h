// A CUtensorMap, as a plan describes it.
#pragma once

#include <cstdint>

#include "address.h"
#include "driver.h"

namespace onnxfuse {

constexpr uint32_t kMaxTensorMapRank = 5;

// Dimensions from the innermost on.
struct TensorMap {
  Address address;
  int type;     // CUtensorMapDataType
  int swizzle;  // CUtensorMapSwizzle
  uint32_t rank;
  uint64_t sizes[kMaxTensorMapRank];
  uint64_t strides[kMaxTensorMapRank];  // bytes; of all but the innermost
  uint32_t box[kMaxTensorMapRank];
};

struct alignas(64) EncodedTensorMap {
  uint64_t words[16];
};

// The map over memory that begins at `start`.  Throws std::runtime_error with the driver's reason.
void encode(const Driver& driver, const TensorMap& map, void* start, EncodedTensorMap& encoded);

}  // namespace onnxfuse
