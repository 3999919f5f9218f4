// A plan: how a fused node runs for one combination of input shapes.  It is read from the words that Python sends.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "convolution.h"
#include "driver.h"
#include "matmul.h"
#include "pointer.h"
#include "tensor_map.h"

namespace onnxfuse {

constexpr int64_t kPlanMark = 0x6f6e6678'0007;  // "onfx", format 7
constexpr size_t kMaxArguments = 64;
constexpr size_t kMaxArgumentWords = 512;  // the 4096 bytes that kernel parameters may take; tensor maps not counted
constexpr size_t kMaxTensorMaps = 8;  // per launch; each takes 128 of the 4096 bytes that kernel parameters may take
constexpr int64_t kMaxRank = 64;

struct TensorType {
  int dtype = 0;
  std::vector<int64_t> shape;
  bool aligned = true;    // to 16 bytes
  int64_t bytes() const;  // throws std::runtime_error if there are more than kMaxBytes
};

// Returns "float32", "bfloat16" and the like, or "dtype 27" for a number without a name here.
std::string dtype_name(int dtype);
// Returns text such as "float32[2,3]".
std::string describe(const TensorType& tensor);

// The inputs of a node as words: dtype, flags, rank and dims of each.  A node finds its plans by these words.
using Key = std::vector<int64_t>;
constexpr int kInt32 = 6;  // onnx::TensorProto::INT32
constexpr int64_t kAligned = 1, kIsConstant = 2;  // flags of an input: its data is aligned; the model holds its values
std::vector<TensorType> types_of(const Key& key);

struct PointerArgument {
  size_t word;  // in Launch::values
  Pointer pointer;
};

struct TensorMapArgument {
  size_t argument;
  TensorMap map;
};

struct Launch {
  LaunchConfig config;
  std::vector<uint64_t> values;  // of all arguments: the bits of scalars, 0 for pointers and tensor maps
  std::vector<size_t> starts;    // by argument: its first word in `values`
  std::vector<PointerArgument> pointers;
  std::vector<TensorMapArgument> maps;
};

// An input and an output that may not overlap in memory; if `same_start`, they may overlap by starting at one address.
struct NoAlias {
  size_t input, output;
  uint64_t input_bytes, output_bytes;
  bool same_start;
};

// Two kinds of steps are pointers, because a CublasMatmul takes 2 kB, and a CudnnConvolution cannot be moved.
using Step = std::variant<Launch, std::unique_ptr<const CublasMatmul>, std::unique_ptr<const CudnnConvolution>>;

// How often a plan ran since the last `take`; any thread may count.
class RunCount {
 public:
  RunCount() = default;
  RunCount(RunCount&&) noexcept {}  // the count is 0, because a plan is moved only before it runs
  void add() const { count_.fetch_add(1, std::memory_order_relaxed); }
  uint64_t take() const { return count_.exchange(0, std::memory_order_relaxed); }

 private:
  mutable std::atomic<uint64_t> count_{0};
};

struct Plan {
  std::vector<TensorType> outputs;
  std::vector<uint64_t> scratch;  // offsets of the scratch buffers in one allocation
  uint64_t scratch_bytes = 0;
  std::vector<Step> steps;
  std::vector<NoAlias> no_alias;
  RunCount runs;
};

// Reads a plan for the device whose context is current.  Throws std::runtime_error that names the fault unless every
// count, index, size and dtype is valid, and the driver, cuBLASLt and cuDNN can run the steps.
Plan read_plan(const std::string& bytes, const std::vector<TensorType>& inputs,
               const std::vector<int64_t>& output_dtypes, int device);

}  // namespace onnxfuse
