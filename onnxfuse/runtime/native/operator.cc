// The custom operator, which is registered under the names of all fused ops.
#include "operator.h"

#include <algorithm>
#include <stdexcept>

#include "infer.h"
#include "utf8.h"

namespace onnxfuse {
namespace {

const FusedOp& self(const OrtCustomOp* op) { return *static_cast<const FusedOp*>(op); }

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
          fused.ort, {fused.ort, info, fused.name, fused.setup, fused.attributes()}};
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

FusedOp::FusedOp(const Ort& ort_functions, Setup of_sessions, std::string op_name)
    : OrtCustomOp{}, ort(ort_functions), setup(std::move(of_sessions)), name(std::move(op_name)) {
  version = kCustomOpVersion;
  GetName = [](const OrtCustomOp* op) { return self(op).name.c_str(); };
  GetExecutionProviderType = [](const OrtCustomOp* op) { return self(op).setup.provider.c_str(); };
  GetInputType = GetOutputType = [](const OrtCustomOp*, size_t) { return 0; };  // 0 (undefined): any type
  GetInputTypeCount = GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
  GetInputCharacteristic = GetOutputCharacteristic = [](const OrtCustomOp*, size_t) -> int { return kVariadic; };
  GetInputMemoryType = [](const OrtCustomOp*, size_t) { return 0; };  // 0: memory of the provider's device
  GetVariadicInputMinArity = GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
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
