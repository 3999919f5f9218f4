// The calls into Python: make a template, open a session for a body (a node's ONNX function), forget a node, interrupt
// the program.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace onnxfuse {

class BodySession;

// Flags of a session's settings: TF32 is allowed, the runs of each plan are counted, the session's aim is throughput,
// and runs wait for the compiler.
constexpr int kTf32 = 1, kCountRuns = 8, kShared = 64, kWait = 128;
// Flag of a request: all kernels of the template must be loaded, not only the kernels for the present shapes.
constexpr int kAllKernels = 32;

// A request to Python for a template (the plans of a node for all sizes), because a node gets new input shapes.
// native_library.py declares the same layout.
struct PlanRequest {
  uint64_t kernel;  // identifies the node of a session until DropCallback reports that it is gone
  const char* provider;
  const char* op;
  const char* node;
  const char* attributes;  // as read_attributes writes them
  uint64_t attributes_size;
  const int64_t* key;
  uint64_t key_size;
  int32_t device;
  int32_t settings;  // flags of the session, as onnxfuse_prepare received them, and of the request
};

// Replies with a template and returns 0, or returns kBody if the node's body must run for these inputs, or replies with
// the text of an error and returns another number: kInterrupt if the error was KeyboardInterrupt or SystemExit.
using PlanCallback = int (*)(const PlanRequest*, void* reply);
// Replies with the address of a BodySession for the node, which the library deletes; returns as PlanCallback does.
using BodyCallback = PlanCallback;
using DropCallback = void (*)(uint64_t kernel);
constexpr int kInterrupt = 2, kBody = 3;

// How to raise KeyboardInterrupt in the main thread: functions of Python's C API, and their arguments.
// native_library.py declares the same layout.
struct Interrupt {
  int (*ensure_gil)();                                              // PyGILState_Ensure
  void (*release_gil)(int state);                                   // PyGILState_Release
  int (*set_exception)(unsigned long thread, void* exception_type);  // PyThreadState_SetAsyncExc
  unsigned long main_thread;
  void* keyboard_interrupt;
};

// The pointers must stay valid until other ones, or null pointers, replace them.
void set_callbacks(PlanCallback plan, BodyCallback body, DropCallback drop, const Interrupt* interrupt);
// Returns the bytes of a template, or nothing if the node's body must run.  Throws std::runtime_error with Python's
// text.  The caller may hold no lock.
std::optional<std::string> ask_for_plan(const PlanRequest& request);
// Throws std::runtime_error with Python's text.  The caller may hold no lock.
std::shared_ptr<BodySession> ask_for_body(const PlanRequest& request);
void tell_dropped(uint64_t kernel);

}  // namespace onnxfuse
