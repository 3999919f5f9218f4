// Templates of plan files (the plans of a node for all sizes) that sessions use, with their kernels loaded on a GPU.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "plan_file.h"
#include "template.h"

namespace onnxfuse {

class Module;  // a loaded cubin

struct GivenTemplate {
  bool tf32, shared;  // as in StoredTemplate
  std::shared_ptr<Template> plans;
  std::vector<std::shared_ptr<const Module>> modules;  // they stay loaded as long as this object lives
};

using PlanFiles = std::vector<std::shared_ptr<const PlanFile>>;

// Returns text such as "a.plans (for NVIDIA H200 (sm_90, 132 multiprocessors)), b.plans (for ...)".
std::string describe(const PlanFiles& files);

// Returns the templates that files have for nodes of this identity on a GPU; equal nodes share them.  Loads their
// kernels.  Throws std::runtime_error if a file was made for another cuBLASLt or cuDNN, or if a kernel or a plan cannot
// be loaded.
std::vector<std::shared_ptr<const GivenTemplate>> given_templates(const PlanFiles& files, const std::string& node,
                                                                  const std::vector<int64_t>& output_dtypes,
                                                                  int device);

}  // namespace onnxfuse
