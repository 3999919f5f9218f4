// The last launches on each GPU.
#include "stream_use.h"

#include <atomic>
#include <chrono>
#include <cstdint>

namespace onnxfuse {
namespace {

// For this long after the last launch to a stream, the stream is assumed to have work.
constexpr int64_t kLately = 200'000;  // nanoseconds
constexpr int64_t kNever = -kLately;
constexpr int kDevices = 64;  // GPUs with larger numbers share the last entry

// The last launches on one GPU.  If two threads change these fields at the same time, one can miss the other's launch;
// this only affects whether kernels start early.
struct alignas(64) Use {
  std::atomic<Stream> stream{nullptr};  // the stream of the last launch
  std::atomic<int64_t> at{kNever};      // the time of that launch
  std::atomic<int64_t> others_at{kNever};  // the time of the last launch to another stream
};
Use uses[kDevices];

int64_t now() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

}  // namespace

bool shares_device(int device, Stream stream) {
  Use& use = uses[device >= 0 && device < kDevices ? device : kDevices - 1];
  const auto relaxed = std::memory_order_relaxed;
  const int64_t time = now();
  if (use.stream.load(relaxed) != stream) {
    use.others_at.store(use.at.load(relaxed), relaxed);
    use.stream.store(stream, relaxed);
  }
  use.at.store(time, relaxed);
  return time - use.others_at.load(relaxed) < kLately;
}

}  // namespace onnxfuse
