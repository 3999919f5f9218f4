// The calls into Python: make a plan, forget a kernel, interrupt the program.
#pragma once

#include <cstdint>
#include <string>

namespace onnxfuse {

// Flags of a session's settings: TF32 is allowed, the runs of each plan are counted, its aim is throughput.
constexpr int kTf32 = 1, kCountRuns = 8, kShared = 64;
// Flag of a request: no kernel of the template may be missing, not only none for these shapes.
constexpr int kAllKernels = 32;

// What Python is told about a node that meets new input shapes.  native_library.py declares the same layout.
struct PlanRequest {
  uint64_t kernel;  // identifies the node of a session until Python is told that it is dropped
  const char* provider;
  const char* op;
  const char* node;
  const char* attributes;  // as read_attributes writes them
  uint64_t attributes_size;
  const int64_t* key;
  uint64_t key_size;
  int32_t device;
  int32_t settings;  // of the session, as onnxfuse_prepare received them, and of the request
};

// Replies with a template and returns 0, or replies with the text of an error and returns another number: kInterrupt if the
// error was KeyboardInterrupt or SystemExit.
using PlanCallback = int (*)(const PlanRequest*, void* reply);
using DropCallback = void (*)(uint64_t kernel);
constexpr int kInterrupt = 2;

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
void set_callbacks(PlanCallback plan, DropCallback drop, const Interrupt* interrupt);
// Returns the bytes of a template; throws std::runtime_error with Python's text.  The caller may hold no lock.
std::string ask_for_plan(const PlanRequest& request);
void tell_dropped(uint64_t kernel);

}  // namespace onnxfuse
