// Running the steps of a plan.
#pragma once

#include "address.h"
#include "driver.h"
#include "plan.h"

namespace onnxfuse {

// Start all steps on a stream of the device.  Throws std::runtime_error where one cannot be started.
void run(const Plan& plan, int device, void* const* inputs, void* const* outputs, void* scratch, Stream stream);

}  // namespace onnxfuse
