// Which streams of a GPU have work, as far as the launches of this library tell.
#pragma once

#include "driver.h"

namespace onnxfuse {

// Notes that kernels are started on a stream of the device now.  Returns whether they were on another one lately.
// Several threads may call it at once.
bool shares_device(int device, Stream stream);

}  // namespace onnxfuse
