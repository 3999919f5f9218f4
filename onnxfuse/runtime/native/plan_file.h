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
constexpr uint32_t kMaxPortableCluster = 8;  // blocks in the largest cluster that every GPU with clusters can run

// An entry of a cubin for GPUs of one kind, and the shared memory and cluster size that its launches need.
struct StoredKernel {
  size_t device, code;
  std::string entry;
  uint32_t shared;  // bytes of dynamic shared memory
  uint32_t cluster;
};

// A template for nodes with equal attributes on GPUs of one kind; its functions are indices into PlanFile::kernels.
struct StoredTemplate {
  size_t device;
  bool tf32;                     // whether the template is for sessions that allow TF32
  bool shared;                   // whether the template is for sessions whose aim is throughput
  int64_t libraries;             // libraries that the template's plans call, as flags
  std::string_view node, words;  // `node` is the result of node_identity
};
constexpr int64_t kCallsCublasLt = 1, kNamesAlgorithm = 2, kCallsCudnn = 4, kNamesEngine = 8;

struct PlanFile {
  // Returns the content of a file: the same object as long as the file does not change.  Throws std::runtime_error,
  // whose text begins with the path, if the file cannot be read, is not a plan file, is damaged or has another format.
  static std::shared_ptr<const PlanFile> load(const std::string& path);

  // Returns the index in `devices` of the kind whose plans a GPU runs: its own kind, or else the most similar kind of
  // the same compute capability, if the GPU has the shared memory that the kernels of that kind need, and if these
  // kernels have no cluster of more than kMaxPortableCluster blocks.
  std::optional<size_t> kind_for(const DeviceKind& here) const;

  // Returns whether a GPU can run a template that was made for the kind that kind_for chose.  If that is not the GPU's
  // own kind, the template may name no algorithm of cuBLASLt and no engine of cuDNN.
  bool runs(const StoredTemplate& stored, const DeviceKind& here) const;

  std::string path;
  std::string data;  // the string_views of the other members point into this string
  uint64_t cublaslt = 0, cudnn = 0;  // the versions whose algorithms and engines the templates name; 0 without any
  std::vector<DeviceKind> devices;
  std::vector<std::string_view> codes;  // cubins
  std::vector<StoredKernel> kernels;
  std::vector<OperatorName> operators;
  std::vector<StoredTemplate> templates;
};

}  // namespace onnxfuse
