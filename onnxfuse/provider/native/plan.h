// A plan: how a fused node runs for one combination of input shapes.  Made from the words that Python sends.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "driver.h"

namespace onnxfuse {

constexpr int64_t kPlanMark = 0x6f6e6678'0001;  // "onfx", format 1
constexpr size_t kMaxArguments = 64;
constexpr int64_t kMaxRank = 64;
constexpr size_t kScratchAlignment = 256;

struct TensorType {
  int dtype = 0;
  std::vector<int64_t> shape;
  int64_t bytes() const;  // throws where that overflows
};

// "float32", "bfloat16" …; "dtype 27" for what has no name here.
std::string dtype_name(int dtype);
// "float32[2,3]"
std::string describe(const TensorType& tensor);

// The inputs of a node, as words: per input dtype, aligned, rank, dims.  Shapes are looked up by these words.
using Key = std::vector<int64_t>;
std::vector<TensorType> types_of(const Key& key);

enum class Place : int64_t { kInput = 0, kOutput = 1, kScratch = 2 };

struct PointerArgument {
  size_t argument;
  Place place;
  size_t index;
  uint64_t offset;
};

struct Launch {
  Function function;
  Dim grid, block;
  uint32_t shared, cluster;
  std::vector<uint64_t> values;  // scalars in place, zero where a pointer goes
  std::vector<PointerArgument> pointers;
};

struct Plan {
  std::vector<TensorType> outputs;
  std::vector<uint64_t> scratch;  // offsets into one buffer
  uint64_t scratch_bytes = 0;
  std::vector<Launch> steps;
};

// Throws std::runtime_error, naming the fault, unless every count, index, size and dtype is sound.
Plan read_plan(const std::string& bytes, const std::vector<TensorType>& inputs, const std::vector<int64_t>& output_dtypes);

}  // namespace onnxfuse
