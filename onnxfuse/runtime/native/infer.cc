// The dtypes and ranks of a fused node's outputs, which onnxruntime requests when a session is created.
#include "infer.h"

#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernel.h"

namespace onnxfuse {
namespace {

std::atomic<uint64_t> next_size{1};

// Returns an attribute that is a list of ints; an empty list if it is absent.
std::vector<int64_t> ints(const Ort& ort, const OrtShapeInferContext* context, const char* name) {
  const OrtOpAttr* attribute = nullptr;
  int64_t values[64];
  size_t bytes = 0;
  if (OrtStatus* status = ort.ShapeInferContext_GetAttribute(context, name, &attribute)) {
    ort.ReleaseStatus(status);
    return {};
  }
  if (!attribute) return {};
  check(ort, ort.ReadOpAttr(attribute, kAttributeInts, values, sizeof values, &bytes));
  return {values, values + bytes / sizeof(int64_t)};
}

int64_t rank_of_first_input(const Ort& ort, const OrtShapeInferContext* context) {
  size_t count = 0, rank = 0;
  check(ort, ort.ShapeInferContext_GetInputCount(context, &count));
  if (count == 0) return -1;
  OrtTensorTypeAndShapeInfo* info = nullptr;  // owned by the context
  check(ort, ort.ShapeInferContext_GetInputTypeShape(context, 0, &info));
  check(ort, ort.GetDimensionsCount(info, &rank));
  return rank ? static_cast<int64_t>(rank) : -1;  // onnxruntime reports an unknown rank as 0
}

// Gives every size a name of its own, because onnxruntime treats sizes of one name as equal.
void set_output(const Ort& ort, OrtShapeInferContext* context, size_t index, int64_t dtype, int64_t rank) {
  std::vector<std::string> names;
  std::vector<const char*> pointers;
  for (int64_t i = 0; i < rank; ++i) names.push_back("onnxfuse_size_" + std::to_string(next_size++));
  for (const std::string& name : names) pointers.push_back(name.c_str());
  const std::vector<int64_t> sizes(names.size(), -1);
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(ort, ort.CreateTensorTypeAndShapeInfo(&info));
  OrtStatus* status = ort.SetTensorElementType(info, static_cast<int>(dtype));
  if (!status) status = ort.SetDimensions(info, sizes.data(), sizes.size());
  if (!status) status = ort.SetSymbolicDimensions(info, pointers.data(), pointers.size());
  if (!status) status = ort.ShapeInferContext_SetOutputTypeShape(context, index, info);
  ort.ReleaseTensorTypeAndShapeInfo(info);
  check(ort, status);
}

}  // namespace

void infer_outputs(const Ort& ort, OrtShapeInferContext* context) {
  const std::vector<int64_t> dtypes = ints(ort, context, "output_types");
  const std::vector<int64_t> ranks = ints(ort, context, "output_ranks");
  if (dtypes.empty()) throw std::runtime_error("the attribute output_types is missing");
  for (size_t i = 0; i < dtypes.size(); ++i) {
    const int64_t rank = i < ranks.size() ? ranks[i] : rank_of_first_input(ort, context);
    if (rank >= 0 && rank <= kMaxRank) set_output(ort, context, i, dtypes[i], rank);
  }
}

}  // namespace onnxfuse
