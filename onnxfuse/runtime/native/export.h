// The functions that Python calls, and how they report errors.
#pragma once

#include <exception>
#include <string>

#define ONNXFUSE_EXPORT extern "C" __attribute__((visibility("default")))

namespace onnxfuse {

// Runs `body`; returns null, or the message of its exception, which stays valid until the thread's next call.
template <class Body>
const char* reported(Body body) {
  thread_local std::string last_error;
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    last_error = error.what();
    return last_error.c_str();
  }
}

}  // namespace onnxfuse
