// Running the steps of a plan.
#include "run.h"

#include <stdexcept>
#include <string>

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

void check_apart(const Apart& pair, void* const* inputs, void* const* outputs) {
  const auto input = reinterpret_cast<uintptr_t>(inputs[pair.input]);
  const auto output = reinterpret_cast<uintptr_t>(outputs[pair.output]);
  if (pair.input_bytes == 0 || input >= output + pair.output_bytes || output >= input + pair.input_bytes) return;
  if (pair.together && input == output) return;
  throw std::runtime_error("input " + std::to_string(pair.input) + " and output " + std::to_string(pair.output) +
                           " overlap in memory; required apart" + (pair.together ? ", or from one address on" : ""));
}

}  // namespace

void run(const Plan& plan, int device, void* const* inputs, void* const* outputs, void* scratch, Stream stream) {
  if (plan.steps.empty()) throw std::runtime_error("the plan has no step, but the outputs have elements");
  for (const Apart& pair : plan.apart) check_apart(pair, inputs, outputs);
  const Driver& driver = Driver::get();
  const Current current(driver, driver.context_of(device));
  const Memory memory{inputs, outputs, scratch, plan.scratch.data()};
  for (const auto& step : plan.steps) {
    if (const auto* launch = std::get_if<Launch>(&step)) {
      start(driver, *launch, memory, stream);
    } else {
      std::get<1>(step)->run(memory, stream);
    }
  }
}

}  // namespace onnxfuse
