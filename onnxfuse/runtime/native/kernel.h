// A fused node of one session, which holds its plans and runs them.
#pragma once

#include <memory>
#include <shared_mutex>
#include <string>
#include <vector>

#include "ort_api.h"
#include "template.h"

namespace onnxfuse {

// Throws std::runtime_error with the status's message and releases the status, unless it is null.
void check(const Ort& ort, OrtStatus* status);

struct AttributeName {
  std::string name;
  char type;  // i, f or s: an integer, a float or a string; I or F: a list of integers or floats
  bool operator==(const AttributeName& other) const { return name == other.name && type == other.type; }
};

// Returns those attributes of a node that are in `names`, each as u32 size of its name, name, u8 type, u32 count, and
// then as many int64, float32 or bytes.
std::string read_attributes(const Ort& ort, const OrtKernelInfo* info, const std::vector<AttributeName>& names);

class FusedKernel {
 public:
  FusedKernel(const Ort& ort, const OrtKernelInfo* info, std::string op, std::string provider,
              int settings, const std::vector<AttributeName>& names);
  ~FusedKernel();
  FusedKernel(const FusedKernel&) = delete;
  FusedKernel& operator=(const FusedKernel&) = delete;

  void compute(OrtKernelContext* context);
  // Returns text such as "layer_norm 'node' (float32[2,3], float32[3])".
  std::string describe(const Key* key) const;
  static int64_t alive();

 private:
  using SharedPlan = Template::SharedPlan;
  using Templates = std::vector<std::shared_ptr<Template>>;

  SharedPlan known(const Key& key);
  SharedPlan make(const Key& key, Stream stream);
  std::shared_ptr<Template> ask(const Key& key, Stream stream);

  const Ort& ort_;
  const Driver& driver_;
  const uint64_t id_;
  const std::string op_, provider_;
  const int settings_;
  std::string node_, attributes_;
  std::vector<int64_t> output_dtypes_;
  std::vector<bool> constants_;  // by input: whether the model holds its values
  OrtAllocator* allocator_ = nullptr;
  const OrtMemoryInfo* memory_ = nullptr;
  int device_ = 0;
  std::shared_mutex mutex_;  // guards the templates
  Templates templates_;      // which equal nodes share; the one that came last is the first
};

}  // namespace onnxfuse
