// Encoding a CUtensorMap.
#include "tensor_map.h"

namespace onnxfuse {
namespace {

constexpr int kInterleaveNone = 0;
constexpr int kPromotion128 = 2;
constexpr int kPromotion256 = 3;
constexpr int kFillZero = 0;

}  // namespace

void encode(const Driver& driver, const TensorMap& map, void* start, EncodedTensorMap& encoded) {
  // Rows whose stride is a multiple of 256 bytes are fetched into the L2 cache in pieces of 256 bytes, other rows in
  // pieces of 128 bytes.
  const bool whole_256 = map.rank > 1 && map.strides[0] % 256 == 0;
  const int promotion = whole_256 ? kPromotion256 : kPromotion128;
  if (map.im2col) {
    driver.check(driver.cuTensorMapEncodeIm2col(&encoded, map.type, map.rank, start, map.sizes, map.strides, map.lower,
                                                map.upper, map.box[0], map.box[1], map.element_strides,
                                                kInterleaveNone, map.swizzle, promotion, kFillZero),
                 "cuTensorMapEncodeIm2col");
  } else {
    driver.check(driver.cuTensorMapEncodeTiled(&encoded, map.type, map.rank, start, map.sizes, map.strides, map.box,
                                               map.element_strides, kInterleaveNone, map.swizzle, promotion, kFillZero),
                 "cuTensorMapEncodeTiled");
  }
}

}  // namespace onnxfuse
