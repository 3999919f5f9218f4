// Opening cuBLASLt: symbols, errors, and a handle for each device.
#include "cublas_lt.h"

#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "symbols.h"

namespace onnxfuse {
namespace {

std::atomic<const CublasLt*> opened_cublas_lt{nullptr};
std::mutex cublas_lt_mutex;
constexpr const char* kCublasLtNames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
constexpr size_t kMinCublasLt = 12'00'00, kMaxCublasLt = 13'99'99;  // major, minor, patch

void* load_cublas_lt(const char* path) {
  if (path) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error(std::string("cannot open cuBLASLt: ") + dlerror());
    return library;
  }
  for (const char* name : kCublasLtNames) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD)) return library;
  }
  throw std::runtime_error("cuBLASLt (libcublasLt.so.13 or .12) is not loaded in this process");
}

// Opens cuBLASLt if Python, which searches more places, has not opened it.
void open_any() {
  const char* chosen = std::getenv("ONNXFUSE_LIBCUBLASLT");
  if (chosen && *chosen) return CublasLt::open(chosen);
  for (const int only_loaded : {RTLD_NOLOAD, 0}) {
    for (const char* name : kCublasLtNames) {
      if (dlopen(name, RTLD_NOW | RTLD_LOCAL | only_loaded)) return CublasLt::open(name);
    }
  }
  throw std::runtime_error(std::string("matrix products need cuBLASLt: ") + dlerror() +
                           "; ONNXFUSE_LIBCUBLASLT may name it");
}

void find_all(void* library, CublasLt& lt) {
#define FIND(name) find_symbol(library, "cuBLASLt", #name, lt.name)
  FIND(cublasLtGetVersion);
  FIND(cublasLtGetStatusName);
  FIND(cublasLtGetStatusString);
  FIND(cublasLtCreate);
  FIND(cublasLtMatmulDescInit_internal);
  FIND(cublasLtMatmulDescSetAttribute);
  FIND(cublasLtMatrixLayoutInit_internal);
  FIND(cublasLtMatrixLayoutSetAttribute);
  FIND(cublasLtMatmulPreferenceInit_internal);
  FIND(cublasLtMatmulPreferenceSetAttribute);
  FIND(cublasLtMatmulAlgoGetHeuristic);
  FIND(cublasLtMatmulAlgoCheck);
  FIND(cublasLtMatmul);
#undef FIND
}

}  // namespace

void CublasLt::open(const char* path) {
  std::lock_guard<std::mutex> lock(cublas_lt_mutex);
  if (opened_cublas_lt.load()) return;
  void* library = load_cublas_lt(path);
  auto lt = std::make_unique<CublasLt>();
  lt->path = path ? path : "already loaded";
  find_all(library, *lt);
  const size_t version = lt->cublasLtGetVersion();
  if (version < kMinCublasLt || version > kMaxCublasLt) {
    throw std::runtime_error("cuBLASLt 12 or 13 is required, found version " + std::to_string(version) + " (" +
                             lt->path + ")");
  }
  opened_cublas_lt.store(lt.release());  // never deleted: sessions may outlive static objects
}

const CublasLt& CublasLt::get() {
  const CublasLt* lt = opened_cublas_lt.load(std::memory_order_acquire);
  if (!lt) {
    open_any();
    lt = opened_cublas_lt.load();
  }
  return *lt;
}

void* CublasLt::handle_of(int device) const {
  static auto* handles = new std::map<int, void*>();  // one per process, never destroyed
  std::lock_guard<std::mutex> lock(cublas_lt_mutex);
  void*& handle = (*handles)[device];
  if (!handle) check(cublasLtCreate(&handle), "cublasLtCreate");
  return handle;
}

void CublasLt::check(int code, const char* what) const {
  if (code == 0) return;
  const char* name = cublasLtGetStatusName(code);
  const char* text = cublasLtGetStatusString(code);
  throw std::runtime_error(std::string(what) + " failed: " + (name ? name : "an unknown status") + " (" +
                           (text ? text : "no description") + ")");
}

}  // namespace onnxfuse
