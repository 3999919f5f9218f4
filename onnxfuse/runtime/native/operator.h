// The custom operator, which is registered under the names of all fused ops.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "kernel.h"

namespace onnxfuse {

constexpr const char* kDomain = "onnxfuse";

// One fused op.  It lives as long as the process, because sessions point to it and do not report when they end.
struct FusedOp : OrtCustomOp {
  FusedOp(const Ort& ort, Setup setup, std::string name, std::vector<size_t> numbers);
  std::vector<AttributeName> attributes() const;
  // Adds attributes that nodes may have.
  void add_attributes(const std::vector<AttributeName>& more);

  const Ort& ort;
  const Setup setup;
  const std::string name;
  const std::vector<size_t> numbers;  // see OperatorName

 private:
  std::vector<AttributeName> names_{{"attributes", 's'}};  // an attribute that lists the names of all others
  mutable std::mutex mutex_;
};

// Returns a status with a message.
OrtStatus* failed(const Ort& ort, const char* message);

// Runs `body`, and returns its exception as a status.
template <class Body>
OrtStatus* guarded(const Ort& ort, Body body) {
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    return failed(ort, error.what());
  } catch (...) {
    return failed(ort, "unknown error");
  }
}

}  // namespace onnxfuse
