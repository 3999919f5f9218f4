// The CUDA driver's API: symbols, errors, launches, modules.
#include "driver.h"

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>

#include "symbols.h"

namespace onnxfuse {
namespace {

std::atomic<const Driver*> opened_driver{nullptr};
std::mutex driver_mutex;

// CUlaunchAttribute and CUlaunchConfig of the driver API (CUDA 11.8 and later).
struct CudaLaunchAttribute {
  int id;
  char pad[4];
  union {
    char bytes[64];
    Dim cluster;
    int flag;
  } value;
};
struct CudaLaunchConfig {
  Dim grid, block;
  unsigned shared;
  Stream stream;
  CudaLaunchAttribute* attributes;
  unsigned count;
};
static_assert(sizeof(CudaLaunchAttribute) == 72 && sizeof(CudaLaunchConfig) == 56);
static_assert(offsetof(CudaLaunchConfig, stream) == 32);
constexpr int kClusterDimension = 4;            // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
constexpr int kProgrammaticSerialization = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
constexpr int kMinCudaForPdl = 12030;          // the first CUDA whose graphs can hold programmatic dependent launches
constexpr int kMaxDynamicShared = 8;           // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kNonPortableCluster = 14;        // CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
constexpr int kMultiprocessors = 16;           // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
constexpr int kMajor = 75, kMinor = 76;        // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
constexpr int kInvalidValue = 1;               // CUDA_ERROR_INVALID_VALUE
constexpr int kSharedOptIn = 97;               // CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN

}  // namespace

std::string describe(const DeviceKind& kind) {
  return kind.name + " (sm_" + std::to_string(kind.arch) + ", " + std::to_string(kind.multiprocessors) +
         " multiprocessors)";
}

std::string describe(const std::vector<DeviceKind>& kinds) {
  std::string text;
  for (const DeviceKind& kind : kinds) text += (text.empty() ? "" : ", ") + describe(kind);
  return text.empty() ? "no GPU" : text;
}

void Driver::open() {
  const char* path = std::getenv("ONNXFUSE_LIBCUDA");
  open(path && *path ? path : "libcuda.so.1");
}

void Driver::open(const std::string& path) {
  std::lock_guard<std::mutex> lock(driver_mutex);
  const Driver* known = opened_driver.load();
  if (known && known->path == path) return;
  if (known) throw std::runtime_error("the CUDA driver is already open as " + known->path);
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    throw std::runtime_error(std::string("cannot open the CUDA driver: ") + dlerror() +
                             "; ONNXFUSE_LIBCUDA may name it");
  }
  auto* driver = new Driver();  // never deleted: sessions may outlive static objects
  driver->path = path;
#define FIND(name, required) find_symbol(library, "the CUDA driver", #name, driver->name, required)
  FIND(cuInit, true);
  FIND(cuDriverGetVersion, true);
  FIND(cuDeviceGet, true);
  FIND(cuDeviceGetCount, true);
  FIND(cuDeviceGetName, true);
  FIND(cuDeviceGetAttribute, true);
  FIND(cuDevicePrimaryCtxRetain, true);
  FIND(cuCtxGetCurrent, true);
  FIND(cuCtxPushCurrent_v2, true);
  FIND(cuCtxPopCurrent_v2, true);
  FIND(cuLaunchKernel, true);
  FIND(cuLaunchKernelEx, false);
  FIND(cuTensorMapEncodeTiled, false);
  FIND(cuTensorMapEncodeIm2col, false);
  FIND(cuMemcpyDtoDAsync_v2, true);
  FIND(cuStreamCreate, true);
  FIND(cuStreamDestroy_v2, true);
  FIND(cuStreamSynchronize, true);
  FIND(cuStreamWaitEvent, true);
  FIND(cuEventCreate, true);
  FIND(cuEventDestroy_v2, true);
  FIND(cuEventRecord, true);
  FIND(cuStreamIsCapturing, true);
  FIND(cuThreadExchangeStreamCaptureMode, true);
  FIND(cuModuleLoadData, true);
  FIND(cuModuleUnload, true);
  FIND(cuModuleGetFunction, true);
  FIND(cuFuncSetAttribute, true);
  FIND(cuFuncGetParamInfo, false);
  FIND(cuGetErrorName, true);
  FIND(cuGetErrorString, true);
#undef FIND
  driver->check(driver->cuInit(0), "cuInit");
  driver->check(driver->cuDriverGetVersion(&driver->version), "cuDriverGetVersion");
  opened_driver.store(driver);
}

const Driver& Driver::get() {
  const Driver* driver = opened_driver.load(std::memory_order_acquire);
  if (!driver) throw std::runtime_error("the CUDA driver has not been opened");
  return *driver;
}

void Driver::check(int code, const char* what) const {
  if (code == 0) return;
  const char* name = nullptr;
  const char* text = nullptr;
  if (cuGetErrorName(code, &name) != 0 || !name) name = "an unknown CUDA error";
  if (cuGetErrorString(code, &text) != 0 || !text) text = "no description";
  throw std::runtime_error(std::string(what) + " failed: " + name + " (" + text + ")");
}

int Driver::device_count() const {
  int count = 0;
  check(cuDeviceGetCount(&count), "cuDeviceGetCount");
  return count;
}

DeviceKind Driver::kind_of(int device) const {
  int handle = 0;
  char name[256] = "";
  check(cuDeviceGet(&handle, device), "cuDeviceGet");
  check(cuDeviceGetName(name, sizeof name - 1, handle), "cuDeviceGetName");
  const auto attribute = [&](int number) {
    int value = 0;
    check(cuDeviceGetAttribute(&value, number, handle), "cuDeviceGetAttribute");
    return value;
  };
  return {name, 10 * attribute(kMajor) + attribute(kMinor), attribute(kMultiprocessors), attribute(kSharedOptIn)};
}

Context Driver::context_of(int device) const {
  static auto* contexts = new std::map<int, Context>();  // retained once per process, never released
  std::lock_guard<std::mutex> lock(driver_mutex);
  Context& context = (*contexts)[device];
  if (!context) {
    int handle = 0;
    check(cuDeviceGet(&handle, device), "cuDeviceGet");
    check(cuDevicePrimaryCtxRetain(&context, handle), "cuDevicePrimaryCtxRetain");
  }
  return context;
}

bool Driver::is_capturing(Stream stream) const {
  if (!stream) return false;
  int status = 0;
  check(cuStreamIsCapturing(stream, &status), "cuStreamIsCapturing");
  return status != 0;
}

void Driver::launch(const LaunchConfig& launch, Stream stream, void** arguments) const {
  const auto& [function, grid, block, shared, cluster, wants_pdl] = launch;
  const bool pdl = wants_pdl && version >= kMinCudaForPdl;
  if (cluster == 1 && !pdl) {
    check(cuLaunchKernel(function, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared, stream, arguments,
                         nullptr),
          "cuLaunchKernel");
    return;
  }
  if (!cuLaunchKernelEx) throw std::runtime_error("the CUDA driver is too old for thread block clusters");
  CudaLaunchAttribute attributes[2]{};
  CudaLaunchConfig config{grid, block, shared, stream, attributes, 0};
  if (cluster != 1) {
    attributes[config.count].id = kClusterDimension;
    attributes[config.count++].value.cluster = {cluster, 1, 1};
  }
  if (pdl) {
    attributes[config.count].id = kProgrammaticSerialization;
    attributes[config.count++].value.flag = 1;
  }
  check(cuLaunchKernelEx(&config, function, arguments, nullptr), "cuLaunchKernelEx");
}

Function Driver::load(const void* image, const char* entry, void** module) const {
  Function function = nullptr;
  check(cuModuleLoadData(module, image), "cuModuleLoadData");
  const int code = cuModuleGetFunction(&function, *module, entry);
  if (code != 0) cuModuleUnload(*module);
  check(code, "cuModuleGetFunction");
  return function;
}

void Driver::configure(Function function, uint32_t shared, bool large_cluster) const {
  if (shared) {  // even less than 48 KB may need the attribute: static shared memory counts toward the limit of 48 KB
    check(cuFuncSetAttribute(function, kMaxDynamicShared, static_cast<int>(shared)), "cuFuncSetAttribute");
  }
  if (large_cluster) check(cuFuncSetAttribute(function, kNonPortableCluster, 1), "cuFuncSetAttribute");
}

std::optional<Parameters> Driver::parameters_of(Function function) const {
  if (!cuFuncGetParamInfo) return std::nullopt;
  Parameters found;
  size_t offset = 0, size = 0;
  int code = 0;
  while ((code = cuFuncGetParamInfo(function, found.size(), &offset, &size)) == 0) found.push_back(size);
  if (code != kInvalidValue) return std::nullopt;  // the code for an index after the last parameter
  return found;
}

void Driver::unload(void* module) const { check(cuModuleUnload(module), "cuModuleUnload"); }

}  // namespace onnxfuse
