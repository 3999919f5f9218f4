// The functions that Python calls to answer requests of nodes, and to load kernels.
#include "export.h"
#include "kernel.h"
#include "python.h"

using namespace onnxfuse;

ONNXFUSE_EXPORT int onnxfuse_abi() { return 10; }

ONNXFUSE_EXPORT void onnxfuse_set_callbacks(PlanCallback plan, DropCallback drop,
                                            const Interrupt* interrupt) {
  set_callbacks(plan, drop, interrupt);
}

ONNXFUSE_EXPORT void onnxfuse_reply(void* reply, const char* bytes, size_t size) {
  static_cast<std::string*>(reply)->assign(bytes, size);
}

// Sets how many plans a template keeps while they take turns, and returns the earlier number.
ONNXFUSE_EXPORT size_t onnxfuse_keep_plans(size_t count) { return Template::set_max_recent_plans(count); }

ONNXFUSE_EXPORT int64_t onnxfuse_plans_made() { return Template::plans_made(); }

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
