// A fused node of one session: its plans, and how it runs.
#pragma once

#include <atomic>
#include <memory>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ort_api.h"
#include "plan.h"

namespace onnxfuse {

// Throws std::runtime_error with the status's message, and releases it, unless it is null.
void check(const Ort& ort, OrtStatus* status);

struct AttributeName {
  std::string name;
  char type;  // i f s: one; I F: a list
  bool operator==(const AttributeName& other) const { return name == other.name && type == other.type; }
};

// The attributes of a node that are in `names`: per attribute
// u32 name size, name, u8 type, u32 count, then count int64, float32 or bytes.
std::string read_attributes(const Ort& ort, const OrtKernelInfo* info, const std::vector<AttributeName>& names);

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 1469598103934665603u;
    for (const int64_t word : key) hash = (hash ^ static_cast<uint64_t>(word)) * 1099511628211u;
    return hash ^ (hash >> 29);
  }
};

class FusedKernel {
 public:
  FusedKernel(const Ort& ort, const OrtKernelInfo* info, std::string op, std::string provider,
              int settings, const std::vector<AttributeName>& names);
  ~FusedKernel();
  FusedKernel(const FusedKernel&) = delete;
  FusedKernel& operator=(const FusedKernel&) = delete;

  void compute(OrtKernelContext* context);
  // "layer_norm 'node' (float32[2,3], float32[3])", for messages
  std::string describe(const Key* key) const;
  static int64_t alive();

 private:
  using Entry = std::pair<const Key, Plan>;

  const Entry* find(const Key& key);
  const Entry* make(const Key& key, Stream stream);

  const Ort& ort_;
  const uint64_t id_;
  const std::string op_, provider_;
  const int settings_;
  std::string node_, attributes_;
  std::vector<int64_t> output_dtypes_;
  std::vector<bool> constants_;  // of the inputs: whether the model holds their values
  OrtAllocator* allocator_ = nullptr;
  const OrtMemoryInfo* memory_ = nullptr;
  int device_ = 0;
  std::shared_mutex mutex_;  // of plans_; entries stay where they are until the kernel goes
  std::unordered_map<Key, Plan, KeyHash> plans_;
  std::atomic<const Entry*> last_{nullptr};
};

}  // namespace onnxfuse
