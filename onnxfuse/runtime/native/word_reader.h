// Reading the 64-bit words of a plan in order, each checked against the values that it may have.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace onnxfuse {

constexpr int64_t kMaxBytes = int64_t{1} << 46;  // of a tensor or buffer

[[noreturn]] inline void malformed(const std::string& what) {
  throw std::runtime_error("the plan is malformed: " + what);
}

// Every method throws std::runtime_error that names `what` if the word is missing or not allowed.
class WordReader {
 public:
  explicit WordReader(const std::string& bytes) : words_(bytes.size() / 8) {
    if (bytes.size() % 8 != 0) malformed("its size is not a multiple of 8 bytes");
    if (!bytes.empty()) std::memcpy(words_.data(), bytes.data(), bytes.size());
  }
  int64_t next(const char* what, int64_t low, int64_t high) {
    if (position_ == words_.size()) malformed(std::string("it ends before ") + what);
    const int64_t word = words_[position_++];
    if (word < low || word > high) {
      malformed(std::string(what) + " is " + std::to_string(word) + ", required " + std::to_string(low) + " to " +
                std::to_string(high));
    }
    return word;
  }
  size_t count(const char* what, int64_t max) { return static_cast<size_t>(next(what, 0, max)); }
  bool flag(const char* what) { return next(what, 0, 1) != 0; }
  uint64_t bits(const char* what) {
    constexpr auto limits = std::numeric_limits<int64_t>();
    return static_cast<uint64_t>(next(what, limits.min(), limits.max()));
  }
  bool at_end() const { return position_ == words_.size(); }

 private:
  std::vector<int64_t> words_;
  size_t position_ = 0;
};

}  // namespace onnxfuse
