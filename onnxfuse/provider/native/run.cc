// Running the steps of a plan.
#include "run.h"

#include <stdexcept>

namespace onnxfuse {
namespace {

void start(const Driver& driver, const Launch& step, const Memory& memory, Stream stream) {
  uint64_t values[kMaxArguments];
  void* arguments[kMaxArguments];
  EncodedTensorMap maps[kMaxTensorMaps];
  for (size_t i = 0; i < step.values.size(); ++i) {
    values[i] = step.values[i];
    arguments[i] = &values[i];
  }
  for (const PointerArgument& pointer : step.pointers) {
    values[pointer.argument] = reinterpret_cast<uint64_t>(memory(pointer.address));
  }
  for (size_t i = 0; i < step.maps.size(); ++i) {
    const TensorMapArgument& map = step.maps[i];
    encode(driver, map.map, memory(map.map.address), maps[i]);
    arguments[map.argument] = &maps[i];
  }
  driver.launch(step.start, stream, arguments);
}

}  // namespace

void run(const Plan& plan, int device, void* const* inputs, void* const* outputs, void* scratch, Stream stream) {
  if (plan.steps.empty()) throw std::runtime_error("the plan has no step, but the outputs have elements");
  const Driver& driver = Driver::get();
  const Current current(driver, driver.context_of(device));
  const Memory memory{inputs, outputs, scratch, plan.scratch.data()};
  for (const auto& step : plan.steps) {
    if (const auto* launch = std::get_if<Launch>(&step)) {
      start(driver, *launch, memory, stream);
    } else {
      std::get<Matmul>(step).run(memory, stream);
    }
  }
}

}  // namespace onnxfuse
