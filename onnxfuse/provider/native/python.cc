// Calling Python, as long as it runs.
#include "python.h"

#include <atomic>
#include <stdexcept>

namespace onnxfuse {
namespace {

std::atomic<PlanCallback> plan_callback{nullptr};
std::atomic<DropCallback> drop_callback{nullptr};
std::atomic<StopCallback> stop_callback{nullptr};

}  // namespace

void set_callbacks(PlanCallback plan, DropCallback drop, StopCallback stop) {
  plan_callback = plan;
  drop_callback = drop;
  stop_callback = stop;
}

std::string ask_for_plan(const PlanRequest& request) {
  const PlanCallback plan = plan_callback;
  if (!plan) throw std::runtime_error("these shapes are new, and Python, which would plan them, has shut down");
  std::string reply;
  const int code = plan(&request, &reply);
  // An error of onnxruntime may be caught and passed over, so that the program is stopped besides: from here, because
  // what is raised inside of the callback ends there.
  if (const StopCallback stop = stop_callback; stop && code == kStop) stop();
  if (code != 0) {
    throw std::runtime_error(reply.empty() ? "planning failed without a message" : reply);
  }
  return reply;
}

void tell_dropped(uint64_t kernel) {
  if (const DropCallback drop = drop_callback) drop(kernel);
}

}  // namespace onnxfuse
