// Encoding a CUtensorMap.
#include "tensor_map.h"

namespace onnxfuse {
namespace {

constexpr int kInterleaveNone = 0;
constexpr int kPromotion128 = 2;
constexpr int kPromotion256 = 3;
constexpr int kFillZero = 0;
constexpr uint32_t kElementStrides[kMaxTensorMapRank] = {1, 1, 1, 1, 1};

}  // namespace

void encode(const Driver& driver, const TensorMap& map, void* start, EncodedTensorMap& encoded) {
  // Rows whose stride is a multiple of 256 bytes are fetched into the L2 cache in pieces of 256 bytes, others of 128.
  const bool whole_256 = map.rank > 1 && map.strides[0] % 256 == 0;
  driver.check(driver.cuTensorMapEncodeTiled(&encoded, map.type, map.rank, start, map.sizes, map.strides, map.box,
                                             kElementStrides, kInterleaveNone, map.swizzle,
                                             whole_256 ? kPromotion256 : kPromotion128, kFillZero),
               "cuTensorMapEncodeTiled");
}

}  // namespace onnxfuse
