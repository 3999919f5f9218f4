// Starting the steps of a plan.
#pragma once

#include "driver.h"
#include "plan.h"

namespace onnxfuse {

// Starts all steps on a stream of the device.  Throws std::runtime_error if an input overlaps an output although the
// plan forbids it, or if a step cannot be started.
void run_steps(const Plan& plan, int device, void* const* inputs, void* const* outputs, void* scratch, Stream stream);

}  // namespace onnxfuse
