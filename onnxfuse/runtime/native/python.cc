// The calls into Python, which are possible until Python exits.
#include "python.h"

#include <atomic>
#include <cstring>
#include <stdexcept>

#include "body_session.h"

namespace onnxfuse {
namespace {

std::atomic<PlanCallback> plan_callback{nullptr};
std::atomic<BodyCallback> body_callback{nullptr};
std::atomic<DropCallback> drop_callback{nullptr};
std::atomic<const Interrupt*> interrupt{nullptr};

// Raises KeyboardInterrupt in Python's main thread.
//
// onnxruntime reports every failure of a node as an ordinary exception, which a program may catch and ignore; but
// a KeyboardInterrupt or SystemExit that Python code raised during planning must stop the program nevertheless.  So
// this function sets the exception on the state of the main thread.  The reasons for doing it here and in this way are:
//  - The callback cannot set it: Python would raise it in the callback's own code, and ctypes would discard it.
//  - At this point, onnxruntime has not seen the error yet.  If the main thread runs the session, it executes C++ until
//    the error arrives; Python then raises the exception at the first call or loop of the code that receives the error.
//  - PyErr_SetInterrupt, which simulates Ctrl-C, is not enough: it does nothing if SIGINT is ignored, as it is in jobs
//    that a shell script starts in the background.
void interrupt_main_thread() {
  const Interrupt* python = interrupt;
  if (!python) return;
  const int state = python->ensure_gil();
  python->set_exception(python->main_thread, python->keyboard_interrupt);
  python->release_gil(state);
}

void check_code(int code, const std::string& reply) {
  if (code == kInterrupt) interrupt_main_thread();
  if (code != 0) throw std::runtime_error(reply.empty() ? "Python failed without a message" : reply);
}

}  // namespace

void set_callbacks(PlanCallback plan, BodyCallback body, DropCallback drop, const Interrupt* of_main_thread) {
  plan_callback = plan;
  body_callback = body;
  drop_callback = drop;
  interrupt = of_main_thread;
}

std::optional<std::string> ask_for_plan(const PlanRequest& request) {
  const PlanCallback plan = plan_callback;
  if (!plan) throw std::runtime_error("these shapes are new, and Python, which would plan them, has shut down");
  std::string reply;
  const int code = plan(&request, &reply);
  if (code == kBody) return std::nullopt;
  check_code(code, reply);
  return reply;
}

std::shared_ptr<BodySession> ask_for_body(const PlanRequest& request) {
  const BodyCallback body = body_callback;
  if (!body) throw std::runtime_error("its body runs, and Python, which would open a session for it, has shut down");
  std::string reply;
  check_code(body(&request, &reply), reply);
  BodySession* session = nullptr;
  if (reply.size() != sizeof session) throw std::runtime_error("Python did not reply with an address");
  std::memcpy(&session, reply.data(), sizeof session);
  return std::shared_ptr<BodySession>(session);
}

void tell_dropped(uint64_t kernel) {
  if (const DropCallback drop = drop_callback) drop(kernel);
}

}  // namespace onnxfuse
