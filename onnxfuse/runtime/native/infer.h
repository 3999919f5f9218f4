// The dtypes and ranks of a fused node's outputs, which onnxruntime requests when a session is created.
#pragma once

#include "ort_api.h"

namespace onnxfuse {

// Sets the dtypes to the attribute output_types, and the ranks to the attribute output_ranks or, without it, to the
// rank of the first input.  Sizes stay unknown, because the plan determines them.  Throws std::runtime_error.
void infer_outputs(const Ort& ort, OrtShapeInferContext* context);

}  // namespace onnxfuse
