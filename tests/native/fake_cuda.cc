// A stand-in for libcuda on machines without a GPU: its kernels are host functions, which a launch runs at once.
// The functions fake_... tell tests about launches, and let calls fail.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Dim {
  unsigned x, y, z;
};
struct Entry {
  const char* name;
  void (*run)(void** arguments, Dim grid);
  std::vector<size_t> parameters;  // their bytes; none if that is not known
};
struct Launched {
  Dim grid, block;
  unsigned shared, cluster;
  bool pdl;
  void* stream;
  void* context;
};

#ifdef WITHOUT_TENSOR_MAPS
constexpr int kVersion = 11080;
#else
constexpr int kVersion = 13000;
#endif
constexpr unsigned kStaticShared = 1024;  // bytes; every kernel has so much static shared memory
std::mutex mutex;
std::map<void*, unsigned> dynamic_limits;  // by kernel; others may use what static memory leaves of 48 KB
Launched last{};
std::atomic<int64_t> launches{0}, modules{0}, streams{0};
std::atomic<int> synchronized{0};
std::atomic<int> earlier{0}, later{0};  // waits of streams for the default stream, and of it for others
std::atomic<int> fail_event{0};
std::atomic<int> fail_with{0}, capturing{0}, shared_limit{0};
std::atomic<int> gpus{2};
std::atomic<bool> other_captures{false}, has_all_functions{false};
std::atomic<int> second_multiprocessors{132};  // of device 1
std::atomic<int> last_mode{0};
thread_local std::vector<void*> contexts;
thread_local int capture_mode = 0;  // CU_STREAM_CAPTURE_MODE_GLOBAL

// Returns CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED if another thread captures a graph and this one is not in relaxed mode.
int refuse_during_capture() { return other_captures && capture_mode != 2 ? 900 : 0; }

template <class T>
T value(void* argument) {
  T result;
  std::memcpy(&result, argument, sizeof result);
  return result;
}

// Arguments x, bias, y, n, d: y[i] = x[i] + bias[i % d].
void shift(void** a, Dim) {
  const auto* x = value<const float*>(a[0]);
  const auto* bias = value<const float*>(a[1]);
  auto* y = value<float*>(a[2]);
  const auto n = value<int64_t>(a[3]);
  const auto d = value<int32_t>(a[4]);
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] + bias[i % d];
}

// Arguments x, y, bytes: y = x.
void copy(void** a, Dim) {
  std::memcpy(value<void*>(a[1]), value<void*>(a[0]), static_cast<size_t>(value<int64_t>(a[2])));
}

// Arguments x, y, n, factor: y[i] = x[i] * factor.
void scale(void** a, Dim) {
  const auto* x = value<const float*>(a[0]);
  auto* y = value<float*>(a[1]);
  for (int64_t i = 0; i < value<int64_t>(a[2]); ++i) y[i] = x[i] * value<float>(a[3]);
}

// The argument of shift_by_struct: padding follows `more`.
struct Shift {
  int32_t d;
  float factor;
  const float* x;
  float more;
  const float* bias;
  float* y;
  int64_t n;
};

// y[i] = x[i] * factor + bias[i % d] + more.
void shift_by_struct(void** a, Dim) {
  const auto all = value<Shift>(a[0]);
  for (int64_t i = 0; i < all.n; ++i) all.y[i] = all.x[i] * all.factor + all.bias[i % all.d] + all.more;
}

// Arguments x, r, sum, difference, n.
void pair(void** a, Dim) {
  const auto* x = value<const float*>(a[0]);
  const auto* r = value<const float*>(a[1]);
  auto* sum = value<float*>(a[2]);
  auto* difference = value<float*>(a[3]);
  for (int64_t i = 0; i < value<int64_t>(a[4]); ++i) {
    sum[i] = x[i] + r[i];
    difference[i] = x[i] - r[i];
  }
}

// What the stand-in stores in a tensor map.
struct Map {
  void* address;
  uint32_t type, rank, interleave, swizzle, promotion, fill;
  uint32_t sizes[5], box[5];
  uint64_t strides[4];
};
static_assert(sizeof(Map) <= 128);

// Arguments the map of a float32 matrix, y: y = the matrix without gaps between its rows.
void unmap(void** a, Dim) {
  const auto map = value<Map>(a[0]);
  auto* y = value<float*>(a[1]);
  for (uint64_t row = 0; row < map.sizes[1]; ++row) {
    const char* from = static_cast<const char*>(map.address) + row * map.strides[0];
    std::memcpy(y + row * map.sizes[0], from, map.sizes[0] * sizeof(float));
  }
}

thread_local Map last_map{};
thread_local int last_walk[8]{};  // of the first two spatial axes: lower, upper, steps; then channels and pixels

void noop(void**, Dim) {}

const Entry entries[] = {{"noop", noop, {}}, {"shift", shift, {8, 8, 8, 8, 4}}, {"copy", copy, {8, 8, 8}},
                         {"scale", scale, {8, 8, 8, 4}}, {"pair", pair, {8, 8, 8, 8, 8}}, {"unmap", unmap, {128, 8}},
                         {"shift_by_struct", shift_by_struct, {sizeof(Shift)}}};

int run(void* function, const Launched& launch, void** arguments) {
  if (const int code = fail_with.exchange(0)) return code;
  if (contexts.empty()) return 201;
  last_mode = capture_mode;
  {
    std::lock_guard<std::mutex> lock(mutex);
    const auto limit = dynamic_limits.find(function);
    if (launch.shared > (limit == dynamic_limits.end() ? 48 * 1024 - kStaticShared : limit->second)) return 1;
    ++launches;
    last = launch;
    last.context = contexts.back();
  }
  static_cast<const Entry*>(function)->run(arguments, launch.grid);
  return 0;
}

struct Attribute {
  int id;
  char pad[4];
  union {
    char bytes[64];
    Dim cluster;
    int flag;
  } value;
};
struct Config {
  Dim grid, block;
  unsigned shared;
  void* stream;
  Attribute* attributes;
  unsigned count;
};

}  // namespace

EXPORT int cuInit(unsigned) { return 0; }
EXPORT int cuDriverGetVersion(int* version) {
  *version = kVersion;
  return 0;
}
EXPORT int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal < 2 ? 0 : 101;
}
EXPORT int cuDeviceGetCount(int* count) {
  *count = gpus;
  return gpus < 0 ? 100 : 0;
}
EXPORT int cuDeviceGetName(char* name, int size, int) {
  std::strncpy(name, "stand-in", static_cast<size_t>(size));
  return 0;
}
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int device) {
  switch (attribute) {
    case 16: *value = device == 0 ? 132 : second_multiprocessors.load(); return 0;
    case 75: *value = 9; return 0;
    case 76: *value = 0; return 0;
    case 97: *value = 227 * 1024; return 0;
    default: return 1;
  }
}
EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = reinterpret_cast<void*>(static_cast<intptr_t>(0x1000 + device));
  return 0;
}
EXPORT int cuCtxGetCurrent(void** context) {
  *context = contexts.empty() ? nullptr : contexts.back();
  return 0;
}
EXPORT int cuCtxPushCurrent_v2(void* context) {
  contexts.push_back(context);
  return 0;
}
EXPORT int cuCtxPopCurrent_v2(void** context) {
  *context = contexts.back();
  contexts.pop_back();
  return 0;
}
EXPORT int cuMemcpyDtoDAsync_v2(void* to, const void* from, size_t bytes, void*) {
  std::memcpy(to, from, bytes);
  return 0;
}
EXPORT int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void* stream, void** arguments, void**) {
  return run(function, {{gx, gy, gz}, {bx, by, bz}, shared, 1, false, stream, nullptr}, arguments);
}
EXPORT int cuLaunchKernelEx(const void* configuration, void* function, void** arguments, void**) {
  const auto& config = *static_cast<const Config*>(configuration);
  Launched launch{config.grid, config.block, config.shared, 1, false, config.stream, nullptr};
  for (unsigned i = 0; i < config.count; ++i) {
    const Attribute& attribute = config.attributes[i];
    if (attribute.id == 4) launch.cluster = attribute.value.cluster.x;
    else if (attribute.id == 6 && kVersion >= 12030) launch.pdl = attribute.value.flag == 1;
    else return 1;
  }
  return run(function, launch, arguments);
}
#ifndef WITHOUT_TENSOR_MAPS
EXPORT int cuTensorMapEncodeTiled(void* map, int type, uint32_t rank, void* address, const uint64_t* sizes,
                                  const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                                  int interleave, int swizzle, int promotion, int fill) {
  const bool aligned = reinterpret_cast<uintptr_t>(map) % 64 == 0 && reinterpret_cast<uintptr_t>(address) % 16 == 0;
  if (!aligned || rank < 1 || rank > 5) return 1;
  auto& kept = last_map;
  kept = {address, static_cast<uint32_t>(type), rank, static_cast<uint32_t>(interleave),
          static_cast<uint32_t>(swizzle), static_cast<uint32_t>(promotion), static_cast<uint32_t>(fill), {}, {}, {}};
  for (uint32_t i = 0; i < rank; ++i) {
    if (element_strides[i] != 1) return 1;
    kept.sizes[i] = static_cast<uint32_t>(sizes[i]);
    kept.box[i] = box[i];
    if (i + 1 < rank) kept.strides[i] = strides[i];
  }
  std::memset(map, 0, 128);
  std::memcpy(map, &kept, sizeof kept);
  return 0;
}
EXPORT int cuTensorMapEncodeIm2col(void* map, int type, uint32_t rank, void* address, const uint64_t* sizes,
                                   const uint64_t* strides, const int* lower, const int* upper, uint32_t channels,
                                   uint32_t pixels, const uint32_t* element_strides, int interleave, int swizzle,
                                   int promotion, int fill) {
  if (rank < 3 || rank > 5 || element_strides[0] != 1 || element_strides[rank - 1] != 1) return 1;
  constexpr uint32_t kOnes[] = {1, 1, 1, 1, 1};
  const uint32_t box[] = {channels, pixels, 1, 1, 1};
  std::memset(last_walk, 0, sizeof last_walk);
  for (uint32_t i = 0; i < 2 && i < rank - 2; ++i) {
    last_walk[i] = lower[i];
    last_walk[2 + i] = upper[i];
    last_walk[4 + i] = static_cast<int>(element_strides[1 + i]);
  }
  last_walk[6] = static_cast<int>(channels);
  last_walk[7] = static_cast<int>(pixels);
  return cuTensorMapEncodeTiled(map, type, rank, address, sizes, strides, box, kOnes, interleave, swizzle, promotion,
                                fill);
}
#endif
EXPORT int cuStreamCreate(void** stream, unsigned) {
  ++streams;
  *stream = new int;
  return 0;
}
EXPORT int cuStreamDestroy_v2(void* stream) {
  --streams;
  delete static_cast<int*>(stream);
  return 0;
}
EXPORT int cuStreamSynchronize(void*) {
  ++synchronized;
  return 0;
}
EXPORT int cuEventCreate(void** event, unsigned) {
  const int code = fail_event.exchange(0);
  if (!code) *event = new void*(nullptr);
  return code;
}
EXPORT int cuEventDestroy_v2(void* event) {
  delete static_cast<void**>(event);
  return 0;
}
EXPORT int cuEventRecord(void* event, void* stream) {
  *static_cast<void**>(event) = stream;
  return 0;
}
EXPORT int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  ++(stream ? earlier : later);
  return 0;
}
EXPORT int cuStreamIsCapturing(void*, int* status) {
  *status = capturing;
  return 0;
}
EXPORT int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(capture_mode, *mode);
  return 0;
}
EXPORT int cuModuleLoadData(void** module, const void* image) {
  if (const int code = refuse_during_capture()) return code;
  if (std::strncmp(static_cast<const char*>(image), "fake:", 5) != 0) return 200;
  *module = new int(++modules);
  return 0;
}
EXPORT int cuModuleUnload(void* module) {
  if (const int code = refuse_during_capture()) return code;
  delete static_cast<int*>(module);
  --modules;
  return 0;
}
EXPORT int cuModuleGetFunction(void** function, void*, const char* name) {
  for (const Entry& entry : entries) {
    if (std::strcmp(entry.name, name) == 0) {
      *function = const_cast<Entry*>(&entry);
      return 0;
    }
  }
  *function = has_all_functions ? new Entry{"noop", noop, {}} : nullptr;
  return has_all_functions ? 0 : 500;
}
EXPORT int cuFuncGetParamInfo(void* function, size_t index, size_t* offset, size_t* size) {
  const auto& parameters = static_cast<const Entry*>(function)->parameters;
  if (parameters.empty()) return 801;  // CUDA_ERROR_NOT_SUPPORTED
  if (index >= parameters.size()) return 1;
  *offset = 0;
  for (size_t i = 0; i < index; ++i) *offset += parameters[i];
  *size = parameters[index];
  return 0;
}
EXPORT int cuFuncSetAttribute(void* function, int attribute, int setting) {
  std::lock_guard<std::mutex> lock(mutex);
  if (attribute == 8) dynamic_limits[function] = shared_limit = setting;
  return 0;
}
EXPORT int cuGetErrorName(int code, const char** name) {
  *name = code == 200   ? "CUDA_ERROR_INVALID_IMAGE"
          : code == 201 ? "CUDA_ERROR_INVALID_CONTEXT"
          : code == 500 ? "CUDA_ERROR_NOT_FOUND"
          : code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS"
          : code == 900 ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
                        : nullptr;
  return *name ? 0 : 1;
}
EXPORT int cuGetErrorString(int, const char** text) {
  *text = "said the stand-in";
  return 0;
}

// Writes type, rank, interleave, swizzle, promotion and fill of this thread's last tensor map.
EXPORT void fake_last_walk(int* out) { std::memcpy(out, last_walk, sizeof last_walk); }
EXPORT void fake_last_map(unsigned* out) { std::memcpy(out, &last_map.type, 6 * sizeof *out); }
// The capture mode that the thread of the last launch had.
EXPORT int fake_last_mode() { return last_mode; }
EXPORT int fake_last_pdl() { return last.pdl; }
EXPORT int64_t fake_launches() { return launches; }
EXPORT int64_t fake_modules() { return modules; }
EXPORT int64_t fake_streams() { return streams; }
// Writes how often a stream was synchronized, and how often streams waited for the default stream and it for others.
EXPORT void fake_waits(int* out) {
  const int counts[] = {synchronized, earlier, later};
  std::memcpy(out, counts, sizeof counts);
}
EXPORT void fake_fail_event(int code) { fail_event = code; }
EXPORT int fake_shared_limit() { return shared_limit; }
EXPORT void fake_fail_next(int code) { fail_with = code; }
// Sets the number of GPUs; a negative one lets the driver fail as it does where there is no GPU.
EXPORT void fake_gpus(int count) { gpus = count; }
EXPORT void fake_capture(int on) { capturing = on; }
EXPORT void fake_second_multiprocessors(int count) { second_multiprocessors = count; }
// Lets modules have functions of all names, which do nothing.
EXPORT void fake_have_all_functions(int on) { has_all_functions = on; }
EXPORT void fake_other_captures(int on) { other_captures = on; }
EXPORT void fake_last(unsigned* out) {
  std::lock_guard<std::mutex> lock(mutex);
  const unsigned words[] = {last.grid.x, last.grid.y, last.grid.z, last.block.x, last.block.y,
                            last.block.z, last.shared, last.cluster};
  std::memcpy(out, words, sizeof words);
}
