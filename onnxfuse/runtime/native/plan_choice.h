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

// Returns whether `missing` is "body": where plans are missing, the bodies of fused nodes run.  The alternative, which
// is the default, is "refuse".  Throws std::runtime_error for another word.
bool bodies_may_run(const Ort* ort, const OrtSessionOptions* options);

// Returns the files that the config entry onnxfuse.plans names, separated by colons; throws what PlanFile::load throws.
PlanFiles configured_files(const Ort& ort, const OrtSessionOptions* options);

// The operators of plan files that sessions can run on the GPUs of this process.
struct Runnable {
  PlanFiles files;
  std::vector<OperatorName> operators;
  std::string left_out;  // the names of operators that only some GPUs have plans for, if all must have them
};

// Finds plan files by the setting `plans`, or beside this library: <library>.plans, or else all *.plans in its folder.
// Returns the files for the GPUs of this process and the operators that some GPU, or, if `on_all`, every GPU, has plans
// for.  Throws std::runtime_error if there are no such files or operators.
Runnable find_runnable(const Ort& ort, const OrtSessionOptions* options, bool on_all);

}  // namespace onnxfuse
