// Which streams of a GPU have work, as far as this library's launches show.
#pragma once

#include "driver.h"

namespace onnxfuse {

// Records that kernels start on a stream of the device now.  Returns whether any started on another stream lately.
// Several threads may call the function at once.
bool shares_device(int device, Stream stream);

}  // namespace onnxfuse
