// The elements of tensors on the CPU, by their type: filling and reading them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "onnxruntime_functions.h"

[[noreturn]] inline void fail(const std::string& message) {
  std::fprintf(stderr, "run_model: %s\n", message.c_str());
  std::exit(1);
}

// Integers are 1, which every vocabulary and mask has; floats lie between 0.25 and 0.5.
inline void fill(void* data, size_t count, int type) {
  for (size_t i = 0; i < count; ++i) {
    if (type == kFloat) static_cast<float*>(data)[i] = 0.25f + static_cast<float>(i % 1024) / 4096;
    else if (type == kFloat16) static_cast<uint16_t*>(data)[i] = static_cast<uint16_t>(0x3400 + i % 1024);
    else if (type == kInt32) static_cast<int32_t*>(data)[i] = 1;
    else if (type == kInt64) static_cast<int64_t*>(data)[i] = 1;
    else if (type == kBool) static_cast<bool*>(data)[i] = true;
    else fail("an input is of element type " + std::to_string(type) + ", which this example does not fill");
  }
}

inline double element(const void* data, size_t i, int type) {
  if (type == kFloat) return static_cast<const float*>(data)[i];
  if (type == kInt32) return static_cast<const int32_t*>(data)[i];
  if (type == kInt64) return static_cast<double>(static_cast<const int64_t*>(data)[i]);
  if (type == kBool) return static_cast<const bool*>(data)[i];
  if (type != kFloat16) return NAN;
  const int bits = static_cast<const uint16_t*>(data)[i], exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const double size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                                     : std::ldexp(exponent ? mantissa + 1024 : mantissa, std::max(exponent, 1) - 25);
  return bits >> 15 ? -size : size;
}
