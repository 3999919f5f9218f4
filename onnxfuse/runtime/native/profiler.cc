// Finding NVTX. Profilers set NVTX_INJECTION64_PATH in the processes that they start; NVTX loads the library it names.
#include "profiler.h"

#include <dlfcn.h>

#include <cstdlib>

namespace onnxfuse {
namespace {

constexpr const char* kNvtxName = "libnvtx3interop.so.1";  // NVTX for programs that do not include its headers

struct Nvtx {
  int (*push)(const char*) = nullptr;
  int (*pop)() = nullptr;
  std::string missing;  // why NVTX cannot be used

  Nvtx() {
    const char* profiler = std::getenv("NVTX_INJECTION64_PATH");
    if (!profiler || !*profiler) return;
    const char* chosen = std::getenv("ONNXFUSE_LIBNVTX");
    void* library = dlopen(chosen && *chosen ? chosen : kNvtxName, RTLD_NOW | RTLD_LOCAL);
    if (library) {
      push = reinterpret_cast<int (*)(const char*)>(dlsym(library, "nvtxRangePushA"));
      pop = reinterpret_cast<int (*)()>(dlsym(library, "nvtxRangePop"));
    }
    if (push && pop) return;
    push = nullptr;
    missing = std::string("a profiler is attached, but NVTX cannot be opened: ") + dlerror() +
              "; install nvidia-nvtx, and let ONNXFUSE_LIBNVTX name its " + kNvtxName;
  }
};

const Nvtx& nvtx() {
  static const auto* found = new Nvtx();  // never deleted: sessions may outlive static objects
  return *found;
}

}  // namespace

std::string missing_ranges() { return nvtx().missing; }

ProfilerRange::ProfilerRange(const std::string& op, const std::string& node) {
  if (nvtx().push) nvtx().push((op + " " + node).c_str());
}

ProfilerRange::~ProfilerRange() {
  if (nvtx().push) nvtx().pop();
}

}  // namespace onnxfuse
