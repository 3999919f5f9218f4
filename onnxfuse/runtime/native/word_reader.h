// Reading the 64-bit words of a plan in order, each checked against the values that it may have.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>

namespace onnxfuse {

constexpr int64_t kMaxBytes = int64_t{1} << 46;  // of a tensor or buffer

[[noreturn]] inline void malformed(const std::string& what) {
  throw std::runtime_error("the plan is malformed: " + what);
}

// Reads words from bytes, which must outlive the reader.  Every method throws std::runtime_error that names `what` if
// the word is missing or not allowed.
class WordReader {
 public:
  explicit WordReader(std::string_view bytes) : bytes_(bytes) {
    if (bytes.size() % kWord != 0) malformed("its size is not a multiple of 8 bytes");
  }
  int64_t next(const char* what, int64_t low, int64_t high) {
    if (at_end()) malformed(std::string("it ends before ") + what);
    int64_t word;
    std::memcpy(&word, bytes_.data() + position_, kWord);
    position_ += kWord;
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
  // Reads the number of items that follow; each takes at least one word.
  size_t count(const char* what) { return count(what, static_cast<int64_t>((bytes_.size() - position_) / kWord)); }
  // Returns bytes, which are preceded by their number and padded to whole words.
  std::string_view text(const char* what) {
    const size_t left = bytes_.size() - position_;
    const size_t size = count(what, static_cast<int64_t>(left ? left - kWord : 0));
    const std::string_view found = bytes_.substr(position_, size);
    position_ += (size + kWord - 1) / kWord * kWord;  // whole words are left, so that the padding is there
    return found;
  }
  bool at_end() const { return position_ == bytes_.size(); }

 private:
  static constexpr size_t kWord = 8;  // bytes
  std::string_view bytes_;
  size_t position_ = 0;
};

}  // namespace onnxfuse
