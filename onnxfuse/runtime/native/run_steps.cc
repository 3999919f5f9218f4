// Starting the steps of a plan.
#include "run_steps.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "stream_use.h"

namespace onnxfuse {
namespace {

void launch(const Driver& driver, const Launch& step, const Memory& memory, Stream stream, bool may_be_early) {
  uint64_t values[kMaxArgumentWords];
  void* arguments[kMaxArguments];
  EncodedTensorMap maps[kMaxTensorMaps];
  std::copy(step.values.begin(), step.values.end(), values);
  for (size_t i = 0; i < step.starts.size(); ++i) arguments[i] = values + step.starts[i];
  for (const PointerArgument& pointer : step.pointers) {
    values[pointer.word] = reinterpret_cast<uint64_t>(memory(pointer.pointer));
  }
  for (size_t i = 0; i < step.maps.size(); ++i) {
    const TensorMapArgument& map = step.maps[i];
    encode(driver, map.map, memory(map.map.pointer), maps[i]);
    arguments[map.argument] = &maps[i];
  }
  LaunchConfig config = step.config;
  config.pdl = config.pdl && may_be_early;
  driver.launch(config, stream, arguments);
}

void check_no_alias(const NoAlias& pair, void* const* inputs, void* const* outputs) {
  const auto input = reinterpret_cast<uintptr_t>(inputs[pair.input]);
  const auto output = reinterpret_cast<uintptr_t>(outputs[pair.output]);
  if (pair.input_bytes == 0 || input >= output + pair.output_bytes || output >= input + pair.input_bytes) return;
  if (pair.same_start && input == output) return;
  throw std::runtime_error("input " + std::to_string(pair.input) + " and output " + std::to_string(pair.output) +
                           " overlap in memory; required no overlap" + (pair.same_start ? ", or the same start" : ""));
}

// A launch that starts early holds registers and shared memory while it waits; kernels of other streams could use them.
// A captured graph keeps its early launches, because other streams may have no work when it runs.
bool may_start_early(const Driver& driver, int device, Stream stream) {
  return !shares_device(device, stream) || driver.is_capturing(stream);
}

}  // namespace

void run_steps(const Plan& plan, int device, void* const* inputs, void* const* outputs, void* scratch, Stream stream) {
  if (plan.steps.empty()) throw std::runtime_error("the plan has no step, but the outputs have elements");
  for (const NoAlias& pair : plan.no_alias) check_no_alias(pair, inputs, outputs);
  const Driver& driver = Driver::get();
  const CurrentContext current(driver, driver.context_of(device));
  const Memory memory{inputs, outputs, scratch, plan.scratch.data()};
  const bool may_be_early = may_start_early(driver, device, stream);
  for (const Step& step : plan.steps) {
    if (const auto* kernel = std::get_if<Launch>(&step)) {
      launch(driver, *kernel, memory, stream, may_be_early);
    } else if (const auto* product = std::get_if<std::unique_ptr<const CublasMatmul>>(&step)) {
      (*product)->run(memory, stream);
    } else {
      std::get<std::unique_ptr<const CudnnConvolution>>(step)->run(memory, stream);
    }
  }
}

}  // namespace onnxfuse
