// A plan file, as onnxfuse.runtime.plan_file describes it: templates, machine code and operators for kinds of GPUs.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "attributes.h"
#include "driver.h"

namespace onnxfuse {

constexpr int64_t kPlanFileFormat = 9;       // FORMAT of onnxfuse.runtime.plan_file
constexpr uint32_t kMaxPortableCluster = 8;  // blocks, which every GPU that has clusters can run at once

// An entry of a cubin for GPUs of one kind, and what its launches take.
struct StoredKernel {
  size_t device, code;
  std::string entry;
  uint32_t shared;  // bytes of dynamic shared memory
  uint32_t cluster;
};

// A template for nodes of one identity on GPUs of one kind; its functions are kernels by number.
struct StoredTemplate {
  size_t device;
  bool tf32;                     // whether it is for sessions that allow TF32
  bool shared;                   // whether it is for sessions whose aim is throughput
  int64_t libraries;             // that its plans call: the flags below
  std::string_view node, words;  // `node` is what node_identity returns
};
constexpr int64_t kCallsCublasLt = 1, kNamesAlgorithm = 2, kCallsCudnn = 4, kNamesEngine = 8;

struct PlanFile {
  // Returns what a file holds: the same object as long as the file does not change.  Throws std::runtime_error that
  // begins with the path if it cannot be read, is no plan file, is damaged or is of another format.
  static std::shared_ptr<const PlanFile> load(const std::string& path);

  // Returns the number of the kind among `devices` whose plans a GPU runs: its own, or else that of the same compute
  // capability which is the most similar, if none of its kernels needs more than every such GPU has.
  std::optional<size_t> kind_for(const DeviceKind& here) const;

  // Returns whether a GPU runs a template, which is for that kind: algorithms of libraries are for one kind only.
  bool runs(const StoredTemplate& stored, const DeviceKind& here) const;

  std::string path;
  std::string data;  // the views point into it
  uint64_t cublaslt = 0, cudnn = 0;  // the versions whose algorithms and engines the templates name; 0 without any
  std::vector<DeviceKind> devices;
  std::vector<std::string_view> codes;  // cubins
  std::vector<StoredKernel> kernels;
  std::vector<OperatorName> operators;
  std::vector<StoredTemplate> templates;
};

}  // namespace onnxfuse
