// The functions that Python calls to answer requests of nodes, and to load kernels.
#include "export.h"
#include "kernel.h"
#include "python.h"

using namespace onnxfuse;

ONNXFUSE_EXPORT int onnxfuse_abi() { return 17; }

ONNXFUSE_EXPORT void onnxfuse_set_callbacks(PlanCallback plan, BodyCallback body, DropCallback drop,
                                            const Interrupt* interrupt) {
  set_callbacks(plan, body, drop, interrupt);
}

ONNXFUSE_EXPORT void onnxfuse_reply(void* reply, const char* bytes, size_t size) {
  static_cast<std::string*>(reply)->assign(bytes, size);
}

// Sets how many recently used plans a template keeps, and returns the earlier number.
ONNXFUSE_EXPORT size_t onnxfuse_keep_plans(size_t count) { return Template::set_max_recent_plans(count); }

// Calls `each` for all inputs at which a node, or a node equal to it, ran since the last call.  The arguments of `each`
// are the inputs as words, and the number of runs with these inputs.
ONNXFUSE_EXPORT void onnxfuse_take_runs(uint64_t kernel, void (*each)(const int64_t* key, size_t size, uint64_t runs)) {
  std::vector<std::pair<Key, uint64_t>> found;
  FusedKernel::with(kernel, [&](FusedKernel& node) { found = node.take_runs(); });
  for (const auto& [key, runs] : found) each(key.data(), key.size(), runs);
}

// Calls `each` with the nodes that have no templates yet, as requests without inputs.
ONNXFUSE_EXPORT void onnxfuse_new_nodes(void (*each)(const PlanRequest*)) {
  // No lock is held in this loop, because `each` may delete a node, which takes the lock.
  for (const NewNode& node : FusedKernel::new_nodes()) {
    const PlanRequest request{node.id, node.provider.c_str(), node.op.c_str(), node.node.c_str(),
                              node.attributes.data(), node.attributes.size(), nullptr, 0, node.device, node.settings};
    each(&request);
  }
}

ONNXFUSE_EXPORT int onnxfuse_has_node(uint64_t kernel) {
  bool found = false;
  FusedKernel::with(kernel, [&](FusedKernel&) { found = true; });
  return found;
}

// Makes later runs of a node use the plans of a template; does nothing if the node is gone.
ONNXFUSE_EXPORT const char* onnxfuse_give(uint64_t kernel, const char* bytes, size_t size) {
  return reported([&] { FusedKernel::with(kernel, [&](FusedKernel& node) { node.give({bytes, size}); }); });
}

ONNXFUSE_EXPORT void onnxfuse_drop_bodies(uint64_t kernel) {
  const RelaxedCapture relaxed(Driver::get());
  FusedKernel::drop_bodies(kernel);
}

ONNXFUSE_EXPORT uint64_t onnxfuse_next_number() { return FusedKernel::next_number(); }

// Lets nodes from this number on wait for templates that Python makes, rather than ask for one.
ONNXFUSE_EXPORT void onnxfuse_expect_templates(uint64_t first) { FusedKernel::expect_templates(first); }

ONNXFUSE_EXPORT int64_t onnxfuse_plans_made() { return Template::plans_made(); }

ONNXFUSE_EXPORT int64_t onnxfuse_plans_alive() { return Template::plans_alive(); }

ONNXFUSE_EXPORT int64_t onnxfuse_kernels_alive() { return FusedKernel::alive(); }

ONNXFUSE_EXPORT const char* onnxfuse_open_driver(const char* path) {
  return reported([&] { Driver::open(path); });
}

ONNXFUSE_EXPORT const char* onnxfuse_load(int device, const void* image, const char* entry, void** module,
                                          void** function) {
  return reported([&] {
    const Driver& driver = Driver::get();
    const CurrentContext current(driver, driver.context_of(device));
    const RelaxedCapture relaxed(driver);
    *function = driver.load(image, entry, module);
  });
}

// Allows a function this much dynamic shared memory and, if `large_cluster`, clusters of more than 8 blocks.
ONNXFUSE_EXPORT const char* onnxfuse_configure(int device, void* function, uint32_t shared, int large_cluster) {
  return reported([&] {
    const Driver& driver = Driver::get();
    const CurrentContext current(driver, driver.context_of(device));
    const RelaxedCapture relaxed(driver);
    driver.configure(function, shared, large_cluster != 0);
  });
}

ONNXFUSE_EXPORT const char* onnxfuse_unload(int device, void* module) {
  return reported([&] {
    const Driver& driver = Driver::get();
    const CurrentContext current(driver, driver.context_of(device));
    const RelaxedCapture relaxed(driver);
    driver.unload(module);
  });
}
