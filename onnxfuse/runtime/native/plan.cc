// Reading and checking plans.
#include "plan.h"

#include <stdexcept>

#include "word_reader.h"
#include "steps.h"

namespace onnxfuse {
namespace {

struct Dtype {
  const char* name;
  int bits;  // bits per element; below 8, several elements share a byte
};
// Indexed by ONNX's TensorProto.DataType; onnxruntime's enumeration has the same numbers.
constexpr Dtype kDtypes[] = {
    {nullptr, 0},    {"float32", 32}, {"uint8", 8},  {"int8", 8},   {"uint16", 16},   {"int16", 16},
    {"int32", 32},   {"int64", 64},   {nullptr, 0},  {"bool", 8},   {"float16", 16},  {"float64", 64},
    {"uint32", 32},  {"uint64", 64},  {nullptr, 0},  {nullptr, 0},  {"bfloat16", 16}, {"float8e4m3fn", 8},
    {"float8e4m3fnuz", 8}, {"float8e5m2", 8}, {"float8e5m2fnuz", 8}, {"uint4", 4}, {"int4", 4},
};

const Dtype* dtype_of(int dtype) {
  const bool known = dtype > 0 && dtype < static_cast<int>(sizeof(kDtypes) / sizeof(Dtype)) && kDtypes[dtype].name;
  return known ? &kDtypes[dtype] : nullptr;
}

TensorType read_output(WordReader& reader, int64_t dtype) {
  TensorType type;
  type.dtype = static_cast<int>(reader.next("an output's dtype", 1, 1000));
  if (type.dtype != dtype) {
    malformed("an output is " + dtype_name(type.dtype) + ", the node declares " + dtype_name(static_cast<int>(dtype)));
  }
  reader.next("an output's flags", 0, kAligned | kIsConstant);
  type.shape.resize(reader.count("an output's rank", kMaxRank));
  for (int64_t& size : type.shape) size = reader.next("an output's dimension", 0, kMaxBytes);
  type.bytes();
  return type;
}

NoAlias read_no_alias(WordReader& reader, const Extents& extents) {
  const auto index = [&](const char* what, size_t of) {
    return static_cast<size_t>(reader.next(what, 0, static_cast<int64_t>(extents.of[of].size()) - 1));
  };
  const size_t input = index("a no-alias input", 0), output = index("a no-alias output", 1);
  const auto bytes = [&](size_t of, size_t index) { return static_cast<uint64_t>(extents.of[of][index].bytes); };
  return {input, output, bytes(0, input), bytes(1, output), reader.flag("whether both may start at one address")};
}

}  // namespace

int64_t TensorType::bytes() const {
  const Dtype* known = dtype_of(dtype);
  if (!known) throw std::runtime_error("a tensor of " + dtype_name(dtype) + " cannot be passed to a kernel");
  int64_t bits = known->bits;
  for (const int64_t size : shape) {
    if (size == 0) return 0;
    if (size < 0 || bits > 8 * kMaxBytes / size) {
      throw std::runtime_error("the tensor " + describe(*this) + " is too large");
    }
    bits *= size;
  }
  return (bits + 7) / 8;
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
  for (size_t position = 0; position + 2 < key.size();) {
    TensorType type;
    type.dtype = static_cast<int>(key[position]);
    type.aligned = (key[position + 1] & kAligned) != 0;
    const auto rank = static_cast<size_t>(key[position + 2]);
    position += 3;
    const auto start = key.begin() + static_cast<ptrdiff_t>(position);
    type.shape.assign(start, start + static_cast<ptrdiff_t>(rank));
    types.push_back(std::move(type));
    position += rank;
  }
  return types;
}

Plan read_plan(const std::string& bytes, const std::vector<TensorType>& inputs,
               const std::vector<int64_t>& output_dtypes, int device) {
  WordReader reader(bytes);
  Plan plan;
  Extents extents;
  reader.next("the format mark", kPlanMark, kPlanMark);
  const auto outputs = static_cast<int64_t>(output_dtypes.size());
  reader.next("the number of outputs", outputs, outputs);
  for (const int64_t dtype : output_dtypes) plan.outputs.push_back(read_output(reader, dtype));
  const size_t scratch = reader.count("the number of scratch buffers", 64);
  for (size_t i = 0; i < scratch; ++i) {
    const int64_t size = reader.next("a scratch size", 0, kMaxBytes);
    plan.scratch.push_back(plan.scratch_bytes);
    plan.scratch_bytes += (static_cast<uint64_t>(size) + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
    extents.of[2].push_back({size, true});
  }
  // If all inputs are marked as unaligned, the outputs may be unaligned, too: without_alignment sets these marks in the
  // key of the plan for unaligned outputs.
  bool any_aligned = inputs.empty();
  for (const TensorType& type : inputs) {
    extents.of[0].push_back({type.bytes(), type.aligned});
    any_aligned = any_aligned || type.aligned;
  }
  for (const TensorType& type : plan.outputs) extents.of[1].push_back({type.bytes(), any_aligned});
  const size_t steps = reader.count("the number of steps", 1024);
  plan.steps.reserve(steps);
  for (size_t i = 0; i < steps; ++i) plan.steps.push_back(read_step(reader, extents, device));
  const size_t no_alias = reader.count("the number of no-alias pairs", 64);
  for (size_t i = 0; i < no_alias; ++i) plan.no_alias.push_back(read_no_alias(reader, extents));
  if (!reader.at_end()) malformed("words follow its end");
  return plan;
}

}  // namespace onnxfuse
