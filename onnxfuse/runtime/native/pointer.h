// A pointer of a plan: into an input, an output or scratch memory, whose addresses are known when a node runs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace onnxfuse {

constexpr uint64_t kScratchAlignment = 256;  // bytes; every scratch buffer starts at a multiple of it
constexpr uint64_t kAlignment = 16;          // bytes; tensors that are `aligned` start at multiples of it

enum class MemoryKind : int64_t { kInput = 0, kOutput = 1, kScratch = 2 };

struct Pointer {
  MemoryKind kind;
  size_t index;
  uint64_t offset;  // bytes
};

// The memory of one run, which converts pointers of a plan to addresses.
struct Memory {
  void* const* inputs;
  void* const* outputs;
  void* scratch;
  const uint64_t* scratch_offsets;

  void* operator()(const Pointer& pointer) const {
    char* start = pointer.kind == MemoryKind::kInput    ? static_cast<char*>(inputs[pointer.index])
                  : pointer.kind == MemoryKind::kOutput ? static_cast<char*>(outputs[pointer.index])
                                                        : static_cast<char*>(scratch) + scratch_offsets[pointer.index];
    return start + pointer.offset;
  }
};

}  // namespace onnxfuse
