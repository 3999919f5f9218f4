// Types and ranks of a fused node's outputs, when a session is created.
#pragma once

#include "ort_api.h"

namespace onnxfuse {

// Types are the attribute output_types; ranks are the attribute output_ranks, or where it is absent the rank of the
// first input.  Sizes stay open: they are what a plan says.  Throws std::runtime_error.
void infer_outputs(const Ort& ort, OrtShapeInferContext* context);

}  // namespace onnxfuse
