// Where a step's memory is: in an input, an output or the scratch buffer, whose addresses a run supplies.
#pragma once

#include <cstddef>
#include <cstdint>

namespace onnxfuse {

constexpr uint64_t kScratchAlignment = 256;  // of every scratch buffer

enum class Place : int64_t { kInput = 0, kOutput = 1, kScratch = 2 };

struct Address {
  Place place;
  size_t index;
  uint64_t offset;
};

// The memory of one run.
struct Memory {
  void* const* inputs;
  void* const* outputs;
  void* scratch;
  const uint64_t* scratch_offsets;

  void* operator()(const Address& address) const {
    char* start = address.place == Place::kInput    ? static_cast<char*>(inputs[address.index])
                  : address.place == Place::kOutput ? static_cast<char*>(outputs[address.index])
                                                    : static_cast<char*>(scratch) + scratch_offsets[address.index];
    return start + address.offset;
  }
};

}  // namespace onnxfuse
