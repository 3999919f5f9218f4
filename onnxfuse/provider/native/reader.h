// The words of a plan, in order, each checked against what it may be.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace onnxfuse {

constexpr int64_t kMaxBytes = int64_t{1} << 46;

[[noreturn]] inline void malformed(const std::string& what) {
  throw std::runtime_error("the plan is malformed: " + what);
}

class Reader {
 public:
  explicit Reader(const std::string& bytes) : words_(bytes.size() / 8) {
    if (bytes.size() % 8 != 0) malformed("its size is not a multiple of 8 bytes");
    if (!bytes.empty()) std::memcpy(words_.data(), bytes.data(), bytes.size());
  }
  int64_t next(const char* what, int64_t low, int64_t high) {
    if (at_ == words_.size()) malformed(std::string("it ends before ") + what);
    const int64_t word = words_[at_++];
    if (word < low || word > high) {
      malformed(std::string(what) + " is " + std::to_string(word) + ", required " + std::to_string(low) + " to " +
                std::to_string(high));
    }
    return word;
  }
  // A count of things that take at least one word each.
  size_t count(const char* what, int64_t most) { return static_cast<size_t>(next(what, 0, most)); }
  bool flag(const char* what) { return next(what, 0, 1) != 0; }
  uint64_t bits(const char* what) {
    constexpr auto limits = std::numeric_limits<int64_t>();
    return static_cast<uint64_t>(next(what, limits.min(), limits.max()));
  }
  bool at_end() const { return at_ == words_.size(); }

 private:
  std::vector<int64_t> words_;
  size_t at_ = 0;
};

}  // namespace onnxfuse
