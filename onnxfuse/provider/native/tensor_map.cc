// Encoding tensor maps.
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
  // A row of at least 256 bytes is fetched into the L2 cache in pieces of 256, a shorter one in pieces of 128.
  const bool wide = map.rank > 1 && map.strides[0] % 256 == 0;
  driver.check(driver.cuTensorMapEncodeTiled(&encoded, map.type, map.rank, start, map.sizes, map.strides, map.box,
                                             kElementStrides, kInterleaveNone, map.swizzle,
                                             wide ? kPromotion256 : kPromotion128, kFillZero),
               "cuTensorMapEncodeTiled");
}

}  // namespace onnxfuse
