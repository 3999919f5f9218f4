// Reading and checking plans.
#include "plan.h"

#include <cstring>
#include <limits>
#include <stdexcept>

namespace onnxfuse {
namespace {

struct Dtype {
  const char* name;
  int bytes;
};
// By ONNX TensorProto.DataType, which onnxruntime's own enumeration equals for these.
constexpr Dtype kDtypes[] = {
    {nullptr, 0},   {"float32", 4}, {"uint8", 1},    {"int8", 1},    {"uint16", 2}, {"int16", 2},
    {"int32", 4},   {"int64", 8},   {nullptr, 0},    {"bool", 1},    {"float16", 2}, {"float64", 8},
    {"uint32", 4},  {"uint64", 8},  {nullptr, 0},    {nullptr, 0},   {"bfloat16", 2}, {"float8e4m3fn", 1},
    {"float8e4m3fnuz", 1}, {"float8e5m2", 1}, {"float8e5m2fnuz", 1},
};

const Dtype* dtype_of(int dtype) {
  const bool known = dtype > 0 && dtype < static_cast<int>(sizeof(kDtypes) / sizeof(Dtype)) && kDtypes[dtype].name;
  return known ? &kDtypes[dtype] : nullptr;
}

[[noreturn]] void malformed(const std::string& what) { throw std::runtime_error("the plan is malformed: " + what); }

// The words of a plan, in order.
class Reader {
 public:
  explicit Reader(const std::string& bytes) : words_(bytes.size() / 8) {
    if (bytes.size() % 8 != 0) malformed("its size is not a multiple of 8 bytes");
    if (!bytes.empty()) std::memcpy(words_.data(), bytes.data(), bytes.size());
  }
  int64_t next(const char* what, int64_t low, int64_t high) {
    if (at_ == words_.size()) malformed(std::string("it ends before ") + what);
    const int64_t word = words_[at_++];
    if (word < low || word > high) {
      malformed(std::string(what) + " is " + std::to_string(word) + ", required " + std::to_string(low) + " to " +
                std::to_string(high));
    }
    return word;
  }
  // A count of things that take at least one word each.
  size_t count(const char* what, int64_t most) { return static_cast<size_t>(next(what, 0, most)); }
  uint64_t bits(const char* what) {
    constexpr auto limits = std::numeric_limits<int64_t>();
    return static_cast<uint64_t>(next(what, limits.min(), limits.max()));
  }
  bool at_end() const { return at_ == words_.size(); }

 private:
  std::vector<int64_t> words_;
  size_t at_ = 0;
};

constexpr int64_t kMaxBytes = int64_t{1} << 46;

TensorType read_output(Reader& reader, int64_t dtype) {
  TensorType type;
  type.dtype = static_cast<int>(reader.next("an output's dtype", 1, 1000));
  if (type.dtype != dtype) {
    malformed("an output is " + dtype_name(type.dtype) + ", the node declares " + dtype_name(static_cast<int>(dtype)));
  }
  type.shape.resize(reader.count("an output's rank", kMaxRank));
  for (int64_t& size : type.shape) size = reader.next("an output's dimension", 0, kMaxBytes);
  type.bytes();
  return type;
}

Dim read_dim(Reader& reader, const char* what, int64_t x, int64_t y, int64_t z) {
  const auto at = [&](int64_t most) { return static_cast<uint32_t>(reader.next(what, 1, most)); };
  const uint32_t first = at(x), second = at(y);
  return {first, second, at(z)};
}

// Sizes in bytes of everything that an argument may point into.
struct Extents {
  std::vector<int64_t> of[3];
};

void read_argument(Reader& reader, const Extents& extents, Launch& launch) {
  const int64_t kind = reader.next("an argument's kind", 0, 3);
  if (kind == 3) {
    launch.values.push_back(reader.bits("a scalar"));
    return;
  }
  const std::vector<int64_t>& sizes = extents.of[kind];
  const int64_t index = reader.next("a pointer's index", 0, static_cast<int64_t>(sizes.size()) - 1);
  const int64_t offset = reader.next("a pointer's offset", 0, sizes[static_cast<size_t>(index)]);
  launch.pointers.push_back({launch.values.size(), static_cast<Place>(kind), static_cast<size_t>(index),
                             static_cast<uint64_t>(offset)});
  launch.values.push_back(0);
}

Launch read_launch(Reader& reader, const Extents& extents) {
  constexpr int64_t kGridX = std::numeric_limits<int32_t>::max();
  Launch launch;
  launch.function = reinterpret_cast<Function>(reader.bits("a function"));
  if (!launch.function) malformed("a step has no function");
  launch.grid = read_dim(reader, "a grid size", kGridX, 65535, 65535);
  launch.block = read_dim(reader, "a block size", 1024, 1024, 64);
  if (uint64_t{launch.block.x} * launch.block.y * launch.block.z > 1024) malformed("a block has over 1024 threads");
  launch.shared = static_cast<uint32_t>(reader.next("shared memory", 0, 1 << 20));
  launch.cluster = static_cast<uint32_t>(reader.next("a cluster size", 1, 16));
  if (launch.grid.x % launch.cluster != 0) malformed("the grid's width is no multiple of the cluster's");
  const size_t arguments = reader.count("the number of arguments", kMaxArguments);
  for (size_t i = 0; i < arguments; ++i) read_argument(reader, extents, launch);
  return launch;
}

}  // namespace

int64_t TensorType::bytes() const {
  const Dtype* known = dtype_of(dtype);
  if (!known) throw std::runtime_error("a tensor of " + dtype_name(dtype) + " cannot be passed to a kernel");
  int64_t total = known->bytes;
  for (const int64_t size : shape) {
    if (size == 0) return 0;
    if (size < 0 || total > kMaxBytes / size) throw std::runtime_error("the tensor " + describe(*this) + " is too large");
    total *= size;
  }
  return total;
}

std::string dtype_name(int dtype) {
  const Dtype* known = dtype_of(dtype);
  return known ? known->name : "dtype " + std::to_string(dtype);
}

std::string describe(const TensorType& tensor) {
  std::string text = dtype_name(tensor.dtype) + "[";
  for (size_t i = 0; i < tensor.shape.size(); ++i) text += (i ? "," : "") + std::to_string(tensor.shape[i]);
  return text + "]";
}

std::vector<TensorType> types_of(const Key& key) {
  std::vector<TensorType> types;
  for (size_t at = 0; at + 2 < key.size();) {
    TensorType type;
    type.dtype = static_cast<int>(key[at]);
    const auto rank = static_cast<size_t>(key[at + 2]);
    at += 3;
    type.shape.assign(key.begin() + static_cast<ptrdiff_t>(at), key.begin() + static_cast<ptrdiff_t>(at + rank));
    types.push_back(std::move(type));
    at += rank;
  }
  return types;
}

Plan read_plan(const std::string& bytes, const std::vector<TensorType>& inputs,
               const std::vector<int64_t>& output_dtypes) {
  Reader reader(bytes);
  Plan plan;
  Extents extents;
  reader.next("the format mark", kPlanMark, kPlanMark);
  const auto wanted = static_cast<int64_t>(output_dtypes.size());
  reader.next("the number of outputs", wanted, wanted);
  for (const int64_t dtype : output_dtypes) plan.outputs.push_back(read_output(reader, dtype));
  const size_t scratch = reader.count("the number of scratch buffers", 64);
  for (size_t i = 0; i < scratch; ++i) {
    const int64_t size = reader.next("a scratch size", 0, kMaxBytes);
    plan.scratch.push_back(plan.scratch_bytes);
    plan.scratch_bytes += (static_cast<uint64_t>(size) + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
    extents.of[2].push_back(size);
  }
  for (const TensorType& type : inputs) extents.of[0].push_back(type.bytes());
  for (const TensorType& type : plan.outputs) extents.of[1].push_back(type.bytes());
  const size_t steps = reader.count("the number of steps", 1024);
  for (size_t i = 0; i < steps; ++i) plan.steps.push_back(read_launch(reader, extents));
  if (!reader.at_end()) malformed("words follow its end");
  return plan;
}

}  // namespace onnxfuse
