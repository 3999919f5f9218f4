// Elements of float32 (type 0), float16 (2) and bfloat16 (any other), for the stand-ins of CUDA's libraries.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

inline float float_of_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float sign = bits & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return fraction ? NAN : sign * INFINITY;
  return sign * (exponent ? std::ldexp(1024.0f + fraction, exponent - 25) : std::ldexp(float(fraction), -24));
}

inline uint16_t half_of_float(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float size = std::fabs(value);
  if (std::isnan(value)) return 0x7e00;
  if (size >= 65520.0f) return sign | 0x7c00;
  if (size < std::ldexp(1.0f, -14)) return sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(size, 24)));
  int exponent = 0;
  const float fraction = std::frexp(size, &exponent);  // in [0.5, 1)
  const auto digits = static_cast<uint32_t>(std::nearbyint(std::ldexp(fraction, 11)));
  return static_cast<uint16_t>(sign | ((static_cast<uint32_t>(exponent + 13) << 10) + digits));
}

inline float load_value(const void* from, int type, int64_t index) {
  if (type == 0) return static_cast<const float*>(from)[index];
  const uint16_t bits = static_cast<const uint16_t*>(from)[index];
  if (type == 2) return float_of_half(bits);
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

inline void store_value(void* to, int type, int64_t index, float value) {
  if (type == 0) {
    static_cast<float*>(to)[index] = value;
  } else if (type == 2) {
    static_cast<uint16_t*>(to)[index] = half_of_float(value);
  } else {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    static_cast<uint16_t*>(to)[index] = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}
