// A CUtensorMap as a plan describes it, and its encoding for an address.
#pragma once

#include <cstdint>

#include "driver.h"
#include "pointer.h"

namespace onnxfuse {

constexpr uint32_t kMaxTensorMapRank = 5;
constexpr uint32_t kMaxSpatialRank = kMaxTensorMapRank - 2;

// Sizes, strides and box begin with the innermost dimension.  With `im2col`, the box is a number of channels and a
// number of pixels; `lower`, `upper` and the element strides of the spatial axes, which lie between those of the
// channels and of the images, describe the walk over the spatial axes.
struct TensorMap {
  Pointer pointer;
  int type;     // CUtensorMapDataType
  int swizzle;  // CUtensorMapSwizzle
  uint32_t rank;
  uint64_t sizes[kMaxTensorMapRank];
  uint64_t strides[kMaxTensorMapRank];  // bytes; without the innermost dimension
  uint32_t box[kMaxTensorMapRank];
  bool im2col;
  int lower[kMaxSpatialRank], upper[kMaxSpatialRank];
  uint32_t element_strides[kMaxTensorMapRank];
};

struct alignas(64) EncodedTensorMap {
  uint64_t words[16];
};

// Encodes the map for memory that starts at `start`.  Throws std::runtime_error with the driver's reason.
void encode(const Driver& driver, const TensorMap& map, void* start, EncodedTensorMap& encoded);

}  // namespace onnxfuse
