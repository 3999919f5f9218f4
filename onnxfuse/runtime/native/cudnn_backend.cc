// Opening cuDNN: symbols, errors, handles and descriptors.
#include "cudnn_backend.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "symbols.h"

namespace onnxfuse {
namespace {

std::atomic<const Cudnn*> opened_cudnn{nullptr};
std::mutex cudnn_mutex;
constexpr const char* kCudnnName = "libcudnn.so.9";
constexpr size_t kMinCudnn = 9'00'00, kMaxCudnn = 9'99'99;  // major, minor, patch

void* load_cudnn(const char* path) {
  if (path) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error(std::string("cannot open cuDNN: ") + dlerror());
    return library;
  }
  if (void* library = dlopen(kCudnnName, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD)) return library;
  throw std::runtime_error(std::string("cuDNN (") + kCudnnName + ") is not loaded in this process");
}

void find_all(void* library, Cudnn& cudnn) {
#define FIND(name) find_symbol(library, "cuDNN", #name, cudnn.name)
  FIND(cudnnGetVersion);
  FIND(cudnnGetErrorString);
  FIND(cudnnGetLastErrorString);
  FIND(cudnnCreate);
  FIND(cudnnSetStream);
  FIND(cudnnBackendCreateDescriptor);
  FIND(cudnnBackendDestroyDescriptor);
  FIND(cudnnBackendFinalize);
  FIND(cudnnBackendSetAttribute);
  FIND(cudnnBackendGetAttribute);
  FIND(cudnnBackendExecute);
#undef FIND
}

struct HandlePool {
  std::vector<void*> unused;  // has room for all handles that were made, so that giving a handle back never fails
  size_t made = 0;
};

// The pool of a device; never destroyed, because sessions may outlive static objects.  The caller holds the mutex.
HandlePool& pool_of(int device) {
  static auto* pools = new std::map<int, HandlePool>();
  return (*pools)[device];
}

}  // namespace

void Cudnn::open(const char* path) {
  std::lock_guard<std::mutex> lock(cudnn_mutex);
  if (opened_cudnn.load()) return;
  void* library = load_cudnn(path);
  auto cudnn = std::make_unique<Cudnn>();
  cudnn->path = path ? path : "already loaded";
  // First, because other versions lack the other functions.
  find_symbol(library, "cuDNN", "cudnnGetVersion", cudnn->cudnnGetVersion);
  const size_t version = cudnn->cudnnGetVersion();
  if (version < kMinCudnn || version > kMaxCudnn) {
    throw std::runtime_error("cuDNN 9 is required, found version " + std::to_string(version) + " (" + cudnn->path +
                             ")");
  }
  find_all(library, *cudnn);
  opened_cudnn.store(cudnn.release());  // never deleted: sessions may outlive static objects
}

const Cudnn& Cudnn::get() {
  const Cudnn* cudnn = opened_cudnn.load(std::memory_order_acquire);
  if (!cudnn) {  // Python, which searches more places, has not opened it
    const char* chosen = std::getenv("ONNXFUSE_LIBCUDNN");
    const bool is_loaded = dlopen(kCudnnName, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    try {
      open(chosen && *chosen ? chosen : is_loaded ? nullptr : kCudnnName);
    } catch (const std::exception& error) {
      throw std::runtime_error(std::string(error.what()) + "; ONNXFUSE_LIBCUDNN may name it");
    }
    cudnn = opened_cudnn.load();
  }
  return *cudnn;
}

void Cudnn::check(int code, const std::string& what) const {
  if (code == 0) return;
  char text[1024] = "";
  cudnnGetLastErrorString(text, sizeof text);
  text[sizeof text - 1] = '\0';
  const char* name = cudnnGetErrorString(code);
  throw std::runtime_error(what + " failed: " + (name ? name : "an unknown status") + " (" +
                           (*text ? text : "no description") + ")");
}

CudnnHandle::CudnnHandle(const Cudnn& cudnn, int device) : device_(device) {
  {
    std::lock_guard<std::mutex> lock(cudnn_mutex);
    HandlePool& pool = pool_of(device);
    if (!pool.unused.empty()) {
      handle_ = pool.unused.back();
      pool.unused.pop_back();
      return;
    }
    pool.unused.reserve(++pool.made);
  }
  const RelaxedCapture relaxed(Driver::get());  // making a handle may allocate memory on the device
  const int code = cudnn.cudnnCreate(&handle_);
  if (code) cudnn.check(code, "cudnnCreate");
}

CudnnHandle::~CudnnHandle() {
  std::lock_guard<std::mutex> lock(cudnn_mutex);
  pool_of(device_).unused.push_back(handle_);
}

CudnnDescriptor::CudnnDescriptor(const Cudnn& cudnn, CudnnDescriptorType type) : cudnn_(cudnn) {
  const int code = cudnn.cudnnBackendCreateDescriptor(static_cast<int>(type), &raw_);
  if (code) cudnn.check(code, "cudnnBackendCreateDescriptor " + std::to_string(static_cast<int>(type)));
}

CudnnDescriptor::~CudnnDescriptor() {
  if (raw_) cudnn_.cudnnBackendDestroyDescriptor(raw_);
}

void CudnnDescriptor::set(CudnnAttribute attribute, CudnnType type, int64_t count, const void* elements) {
  const int code = cudnn_.cudnnBackendSetAttribute(raw_, static_cast<int>(attribute), static_cast<int>(type), count,
                                                   elements);
  if (code) cudnn_.check(code, "cudnnBackendSetAttribute " + std::to_string(static_cast<int>(attribute)));
}

void CudnnDescriptor::finalize() {
  const int code = cudnn_.cudnnBackendFinalize(raw_);
  if (code) cudnn_.check(code, "cudnnBackendFinalize");
}

bool CudnnDescriptor::finalize_if_supported() {
  const int code = cudnn_.cudnnBackendFinalize(raw_);
  if (Cudnn::is_unsupported(code)) return false;
  if (code) cudnn_.check(code, "cudnnBackendFinalize");
  return true;
}

int64_t CudnnDescriptor::get(CudnnAttribute attribute, CudnnType type, int64_t room, void* elements) const {
  int64_t count = 0;
  const int code = cudnn_.cudnnBackendGetAttribute(raw_, static_cast<int>(attribute), static_cast<int>(type), room,
                                                   &count, elements);
  if (code) cudnn_.check(code, "cudnnBackendGetAttribute " + std::to_string(static_cast<int>(attribute)));
  return std::min(count, room);
}

int64_t CudnnDescriptor::get_int64(CudnnAttribute attribute) const {
  int64_t value = 0;
  if (get(attribute, CudnnType::kInt64, 1, &value) != 1) {
    throw std::runtime_error("cuDNN has no value of attribute " + std::to_string(static_cast<int>(attribute)));
  }
  return value;
}

}  // namespace onnxfuse
