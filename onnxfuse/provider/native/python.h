// The calls into Python: make a plan, forget a kernel, stop the program.
#pragma once

#include <cstdint>
#include <string>

namespace onnxfuse {

// What Python is told about a node that meets new shapes.  Layout shared with native.py.
struct PlanRequest {
  uint64_t kernel;  // identifies the kernel instance until it is dropped
  const char* provider;
  const char* op;
  const char* node;
  const char* attributes;  // as written by read_attributes
  uint64_t attributes_size;
  const int64_t* words;  // the key
  uint64_t word_count;
  int32_t device;
  int32_t settings;  // of the session, as onnxfuse_prepare was given them
};

// Returns 0 after replying with a plan, anything else after replying with an error text: kStop where what was raised is
// to stop the program, as Ctrl-C is.
using PlanCallback = int (*)(const PlanRequest*, void* reply);
using DropCallback = void (*)(uint64_t kernel);
using StopCallback = void (*)();  // as Ctrl-C does; without Python's lock
constexpr int kStop = 2;

void set_callbacks(PlanCallback plan, DropCallback drop, StopCallback stop);
// A plan's bytes; throws std::runtime_error with Python's text.  No lock may be held.
std::string ask_for_plan(const PlanRequest& request);
void tell_dropped(uint64_t kernel);

}  // namespace onnxfuse
