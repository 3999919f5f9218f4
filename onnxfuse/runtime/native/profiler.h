// NVTX ranges, by which a profiler such as Nsight Systems shows the node of each kernel.
#pragma once

#include <string>

namespace onnxfuse {

// Returns why runs have no ranges although a profiler is attached; empty if they have, or if no profiler is.
std::string missing_ranges();

// A range of this thread from the object's construction to its destruction; nothing if no profiler is attached.
class ProfilerRange {
 public:
  ProfilerRange(const std::string& op, const std::string& node);
  ~ProfilerRange();
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;
};

}  // namespace onnxfuse
