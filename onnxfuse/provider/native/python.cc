// Calling Python, as long as it runs.
#include "python.h"

#include <atomic>
#include <stdexcept>

namespace onnxfuse {
namespace {

std::atomic<PlanCallback> plan_callback{nullptr};
std::atomic<DropCallback> drop_callback{nullptr};

}  // namespace

void set_callbacks(PlanCallback plan, DropCallback drop) {
  plan_callback = plan;
  drop_callback = drop;
}

std::string ask_for_plan(const PlanRequest& request) {
  const PlanCallback plan = plan_callback;
  if (!plan) throw std::runtime_error("these shapes are new, and Python, which would plan them, has shut down");
  std::string reply;
  if (plan(&request, &reply) != 0) {
    throw std::runtime_error(reply.empty() ? "planning failed without a message" : reply);
  }
  return reply;
}

void tell_dropped(uint64_t kernel) {
  if (const DropCallback drop = drop_callback) drop(kernel);
}

}  // namespace onnxfuse
