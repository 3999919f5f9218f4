// A fused node of one session: its plans, and how it runs.
#pragma once

#include <memory>
#include <shared_mutex>
#include <string>
#include <unordered_map>
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
  // So many shapes of a node that take turns are planned once; memory is held for up to two times as many.
  static void keep_plans(size_t count);

 private:
  using SharedPlan = std::shared_ptr<const Plan>;  // a run holds its own: other threads may make room meanwhile
  using Plans = std::unordered_map<Key, SharedPlan, KeyHash>;

  SharedPlan find(const Key& key);
  SharedPlan make(const Key& key, Stream stream);
  SharedPlan keep(const Key& key, SharedPlan plan);  // the lock must be held

  const Ort& ort_;
  const Driver& driver_;
  const uint64_t id_;
  const std::string op_, provider_;
  const int settings_;
  std::string node_, attributes_;
  std::vector<int64_t> output_dtypes_;
  std::vector<bool> constants_;  // of the inputs: whether the model holds their values
  OrtAllocator* allocator_ = nullptr;
  const OrtMemoryInfo* memory_ = nullptr;
  int device_ = 0;
  std::shared_mutex mutex_;  // of the plans
  Plans recent_, earlier_;   // when recent ones are many they become the earlier, and those that were are gone
};

}  // namespace onnxfuse
