// The custom operator, which is registered under the names of all fused ops.
#include "operator.h"

#include <algorithm>
#include <stdexcept>

#include "infer.h"
#include "utf8.h"

namespace onnxfuse {
namespace {

const FusedOp& self(const OrtCustomOp* op) { return *static_cast<const FusedOp*>(op); }

// The number of inputs that are declared one by one: all inputs up to the last that is an int32 in host memory.
size_t declared_inputs(const OrtCustomOp* op) {
  const std::vector<size_t>& numbers = self(op).numbers;
  return numbers.empty() ? 0 : numbers.back() + 1;
}

// The object that onnxruntime holds for a node.
struct KernelOfOrt {
  const Ort& ort;
  FusedKernel kernel;
};

OrtStatus* create_kernel(const OrtCustomOp* op, const void*, const OrtKernelInfo* info, void** kernel) {
  const FusedOp& fused = self(op);
  return guarded(fused.ort, [&] {
    try {
      *kernel = new KernelOfOrt{
          fused.ort, {fused.ort, info, fused.name, fused.setup, fused.attributes(), fused.numbers}};
    } catch (const std::exception& error) {
      throw std::runtime_error(fused.name + ": " + error.what());
    }
  });
}

OrtStatus* compute(void* kernel, OrtKernelContext* context) {
  auto* own = static_cast<KernelOfOrt*>(kernel);
  return guarded(own->ort, [&] { own->kernel.compute(context); });
}

OrtStatus* infer(const OrtCustomOp* op, OrtShapeInferContext* context) {
  const FusedOp& fused = self(op);
  return guarded(fused.ort, [&] { infer_outputs(fused.ort, context); });
}

}  // namespace

FusedOp::FusedOp(const Ort& ort_functions, Setup of_sessions, std::string op_name, std::vector<size_t> op_numbers)
    : OrtCustomOp{}, ort(ort_functions), setup(std::move(of_sessions)), name(std::move(op_name)),
      numbers(std::move(op_numbers)) {
  version = kCustomOpVersion;
  GetName = [](const OrtCustomOp* op) { return self(op).name.c_str(); };
  GetExecutionProviderType = [](const OrtCustomOp* op) { return self(op).setup.provider.c_str(); };
  GetInputType = GetOutputType = [](const OrtCustomOp*, size_t) { return 0; };  // 0 (undefined): any type
  // The inputs after those of `declared_inputs` are one variadic input, which lies in one kind of memory.
  GetInputTypeCount = [](const OrtCustomOp* op) { return declared_inputs(op) + 1; };
  GetInputCharacteristic = [](const OrtCustomOp* op, size_t i) -> int {
    return i < declared_inputs(op) ? kRequired : kVariadic;
  };
  GetInputMemoryType = [](const OrtCustomOp* op, size_t i) {
    const std::vector<size_t>& numbers = self(op).numbers;
    return std::binary_search(numbers.begin(), numbers.end(), i) ? kHostInput : 0;  // 0: memory of the device
  };
  GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
  GetOutputCharacteristic = [](const OrtCustomOp*, size_t) -> int { return kVariadic; };
  GetVariadicInputMinArity = [](const OrtCustomOp* op) { return declared_inputs(op) ? 0 : 1; };
  GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
  GetVariadicInputHomogeneity = GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
  GetStartVersion = [](const OrtCustomOp*) { return 1; };
  GetEndVersion = [](const OrtCustomOp*) { return 1; };
  CreateKernelV2 = create_kernel;
  KernelComputeV2 = compute;
  KernelDestroy = [](void* kernel) { delete static_cast<KernelOfOrt*>(kernel); };
  InferOutputShapeFn = infer;
}

std::vector<AttributeName> FusedOp::attributes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return names_;
}

void FusedOp::add_attributes(const std::vector<AttributeName>& more) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const AttributeName& attribute : more) {
    if (std::find(names_.begin(), names_.end(), attribute) == names_.end()) names_.push_back(attribute);
  }
}

OrtStatus* failed(const Ort& ort, const char* message) {
  return ort.CreateStatus(kRuntimeException, utf8(std::string("onnxfuse: ") + message).c_str());
}

}  // namespace onnxfuse
