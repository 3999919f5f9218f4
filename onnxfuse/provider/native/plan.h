// A plan: how a fused node runs for one combination of input shapes.  Made from the words that Python sends.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "address.h"
#include "driver.h"
#include "matmul.h"
#include "tensor_map.h"

namespace onnxfuse {

constexpr int64_t kPlanMark = 0x6f6e6678'0004;  // "onfx", format 4
constexpr size_t kMaxArguments = 64;
constexpr size_t kMaxTensorMaps = 8;  // of a launch: 128 bytes each of the 4096 that a kernel's parameters may take
constexpr int64_t kMaxRank = 64;

struct TensorType {
  int dtype = 0;
  std::vector<int64_t> shape;
  bool aligned = true;    // to 16 bytes; what else a key says of a tensor is for Python
  int64_t bytes() const;  // throws where that overflows
};

// "float32", "bfloat16" …; "dtype 27" for what has no name here.
std::string dtype_name(int dtype);
// "float32[2,3]"
std::string describe(const TensorType& tensor);

// The inputs of a node, as words: per input dtype, flags, rank, dims.  Shapes are looked up by these words.
using Key = std::vector<int64_t>;
constexpr int64_t kAligned = 1, kConstant = 2;  // flags of an input
std::vector<TensorType> types_of(const Key& key);

struct PointerArgument {
  size_t argument;
  Address address;
};

struct TensorMapArgument {
  size_t argument;
  TensorMap map;
};

struct Launch {
  Start start;
  std::vector<uint64_t> values;  // scalars in place, zero where something else goes
  std::vector<PointerArgument> pointers;
  std::vector<TensorMapArgument> maps;
};

// An input and an output that may not overlap, unless, where `together`, both begin at one address.
struct Apart {
  size_t input, output;
  uint64_t input_bytes, output_bytes;
  bool together;
};

using Step = std::variant<Launch, std::unique_ptr<const Matmul>>;  // a Matmul is 2 kB

struct Plan {
  std::vector<TensorType> outputs;
  std::vector<uint64_t> scratch;  // offsets into one buffer
  uint64_t scratch_bytes = 0;
  std::vector<Step> steps;
  std::vector<Apart> apart;
};

// For a device's current context.  Throws std::runtime_error, naming the fault, unless every count, index, size and
// dtype is sound and the driver and cuBLASLt can do what the steps want.
Plan read_plan(const std::string& bytes, const std::vector<TensorType>& inputs,
               const std::vector<int64_t>& output_dtypes, int device);

}  // namespace onnxfuse
