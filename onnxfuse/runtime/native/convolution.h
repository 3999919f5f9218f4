// A convolution by cuDNN, as a step of a plan.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cudnn_backend.h"
#include "pointer.h"

namespace onnxfuse {

enum class ConvolutionActivation : int64_t {
  kNone = 0,
  kRelu = 1,
  kSilu = 2,
  kGelu = 3,
  kGeluTanh = 4,
  kSigmoid = 5,
  kTanh = 6,
  kClip = 7,
  kLeakyRelu = 8,
  kElu = 9,
  kSoftplus = 10,
  kQuickGelu = 11,
};

// An engine of cuDNN and its knobs: the engine's global index, followed by the type and the value of each knob.
using CudnnEngine = std::vector<int64_t>;
constexpr size_t kMaxEngineWords = 1 + 2 * kMaxKnobs;

// A convolution as plan.Convolution describes it in Python.
struct Convolution {
  CudnnDataType type = kCudnnFloat32;
  int64_t n = 0, c = 0, m = 0, group = 1;
  std::vector<int64_t> sizes, y_sizes, kernel, strides, dilations, pads_begin, pads_end;  // by spatial axis
  bool transposed = false, channels_last = true, w_channels_last = true, tf32 = false, aligned = false;
  ConvolutionActivation activation = ConvolutionActivation::kNone;
  float alpha = 0, beta = 0;
  Pointer x{}, w{}, y{}, bias{}, residual{}, workspace{};
  bool has_bias = false, has_residual = false, residual_first = true, has_workspace = false;
  uint64_t workspace_bytes = 0;
  CudnnEngine engine;  // empty for cuDNN's first choice

  int64_t element_bytes() const { return type == kCudnnFloat32 ? 4 : 2; }
};

// Returns text such as "a convolution of float16 1x8x5x5 and 16x8x3x3".
std::string describe(const Convolution& convolution);

// An engine that cuDNN proposes.
struct ProposedEngine {
  CudnnEngine engine;
  uint64_t workspace_bytes;
  bool compiles;  // reading a plan with it compiles a kernel
};

// A convolution with cuDNN's execution plan, which is made once; a run passes addresses.
class CudnnConvolution {
 public:
  // Takes the first engine that cuDNN proposes if the convolution names none.  The device's context must be current.
  // Throws std::runtime_error if cuDNN cannot compute the convolution.
  static std::unique_ptr<const CudnnConvolution> make(const Convolution& convolution, int device);
  void run(const Memory& memory, Stream stream) const;
  // Returns up to `max_count` engines within the convolution's workspace, the best by cuDNN's own estimate first; none
  // if cuDNN cannot compute the convolution.  Nothing is compiled yet, so an engine's kernel may still fail to compile.
  static std::vector<ProposedEngine> engines(const Convolution& convolution, int device, int max_count);

 private:
  static constexpr size_t kMaxTensors = 5;
  // Addresses of x, w, y, and then of bias and residual if they are present; the last entry is the workspace's address.
  using Addresses = std::array<void*, kMaxTensors + 1>;

  CudnnConvolution(const Convolution& convolution, int device, std::vector<CudnnDescriptor> plan);
  void pack(const Addresses& addresses) const;

  const Cudnn& cudnn_;
  const Convolution convolution_;
  const int device_;
  const std::vector<CudnnDescriptor> plan_;  // the descriptors that the execution plan was made from, and then the plan
  // cuDNN does not promise that threads may run one execution plan at one time, so each run holds the mutex while it
  // starts.  The mutex also guards the addresses of the last run and their descriptor (cuDNN's variant pack), which the
  // next run often uses again.
  mutable std::mutex mutex_;
  mutable Addresses addresses_{};
  mutable std::optional<CudnnDescriptor> pack_;
};

}  // namespace onnxfuse
