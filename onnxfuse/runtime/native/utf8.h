// Text for messages: names of a model or plan file may hold any bytes, and Python decodes messages as UTF-8.
#pragma once

#include <string>

namespace onnxfuse {

// Returns the text with a question mark in place of each byte that is not part of a character in UTF-8.
std::string utf8(std::string text);

}  // namespace onnxfuse
