// SHA-256, as FIPS 180-4 defines it: a plan file holds the digest of its contents.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace onnxfuse {

std::array<uint8_t, 32> sha256(const void* data, size_t size);

}  // namespace onnxfuse
