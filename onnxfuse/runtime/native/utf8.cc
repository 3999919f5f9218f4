// Finding bytes that are not UTF-8.
#include "utf8.h"

#include <string_view>

namespace onnxfuse {
namespace {

// Returns how many bytes the first character has, 0 if it is not valid: see table 3-7 of the Unicode standard.
size_t character(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return 1;
  const size_t size = first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 0;
  if (size == 0 || size > text.size()) return 0;
  const unsigned char low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
  const unsigned char high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
  if (byte(1) < low || byte(1) > high) return 0;
  for (size_t i = 2; i < size; ++i) {
    if (byte(i) < 0x80 || byte(i) > 0xbf) return 0;
  }
  return size;
}

}  // namespace

std::string utf8(std::string text) {
  for (size_t i = 0; i < text.size();) {
    const size_t size = character(std::string_view(text).substr(i));
    if (size == 0) text[i] = '?';
    i += size == 0 ? 1 : size;
  }
  return text;
}

}  // namespace onnxfuse
