// Which plan files a session uses, and what happens if they do not fit: settings for processes without Python.
#pragma once

#include <string>
#include <vector>

#include "attributes.h"
#include "given_templates.h"
#include "ort_api.h"

namespace onnxfuse {

// Returns a setting of session options or the environment: the config entry onnxfuse.<name>, or else $ONNXFUSE_<NAME>.
// Returns an empty string if neither is set.  `ort` may be null: then only the environment counts.
std::string setting(const Ort* ort, const OrtSessionOptions* options, const char* name);

// Returns whether the bodies of fused nodes run where plans are missing: whether the setting `missing` is "body".  Its
// default is "refuse".  Throws std::runtime_error if the setting has another value.
bool bodies_may_run(const Ort* ort, const OrtSessionOptions* options);

// Returns the files that the config entry onnxfuse.plans names, separated by colons; throws what PlanFile::load throws.
PlanFiles configured_files(const Ort& ort, const OrtSessionOptions* options);

// The operators of plan files that sessions can run on the GPUs of this process.
struct Runnable {
  PlanFiles files;
  std::vector<OperatorName> operators;
  std::string left_out;  // if `on_all`: the names of operators for which only some GPUs have plans
};

// Finds plan files by the setting `plans`, or beside this library: <library>.plans, or else all *.plans in its folder.
// Returns the files for the GPUs of this process, and the operators for which these GPUs have plans: every GPU if
// `on_all`, else at least one.  Throws std::runtime_error if there are no such files or operators.
Runnable find_runnable(const Ort& ort, const OrtSessionOptions* options, bool on_all);

}  // namespace onnxfuse
