// The CUDA driver's API, opened at run time, because the library must load on machines without a driver.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace onnxfuse {

using Function = void*;  // CUfunction
using Stream = void*;    // CUstream
using Context = void*;   // CUcontext
using Event = void*;     // CUevent

struct Dim {
  uint32_t x, y, z;
};

using Parameters = std::vector<size_t>;  // the bytes of each parameter of a function

struct LaunchConfig {
  Function function;
  Dim grid, block;
  uint32_t shared;   // bytes of dynamic shared memory
  uint32_t cluster;  // blocks, along x
  bool pdl;          // programmatic dependent launch: the kernel may start while the one before it ends
};

// The properties that two GPUs must share to run the same plans.
struct DeviceKind {
  std::string name;
  int64_t arch;  // 90 is compute capability 9.0
  int64_t multiprocessors;
  int64_t shared_per_block;  // bytes of dynamic shared memory that a block may opt in to
  bool operator==(const DeviceKind& other) const {
    return name == other.name && arch == other.arch && multiprocessors == other.multiprocessors &&
           shared_per_block == other.shared_per_block;
  }
};
// Returns text such as "NVIDIA H200 (sm_90, 132 multiprocessors)".
std::string describe(const DeviceKind& kind);
std::string describe(const std::vector<DeviceKind>& kinds);

struct Driver {
  // Opens $ONNXFUSE_LIBCUDA, or else the libcuda that the system finds.  Throws std::runtime_error.
  static void open();
  // Opens libcuda; later calls with the same path do nothing.  Throws std::runtime_error.
  static void open(const std::string& path);
  // Throws std::runtime_error if `open` has not been called.
  static const Driver& get();

  int device_count() const;
  DeviceKind kind_of(int device) const;
  // Returns the device's primary context, which onnxruntime and CuPy use too.
  Context context_of(int device) const;
  bool is_capturing(Stream stream) const;
  void launch(const LaunchConfig& config, Stream stream, void** arguments) const;
  // Loads a cubin and returns its entry; `module` receives the CUmodule.
  Function load(const void* image, const char* entry, void** module) const;
  // Allows launches with this much dynamic shared memory and, if `large_cluster`, clusters of more than 8 blocks.
  void configure(Function function, uint32_t shared, bool large_cluster) const;
  // Returns the sizes of a function's parameters; nothing if the driver cannot report them (before CUDA 12.4).
  std::optional<Parameters> parameters_of(Function function) const;
  void unload(void* module) const;
  // Throws "<what> failed: CUDA_ERROR_… (…)" unless the code is 0.
  void check(int code, const char* what) const;

  std::string path;
  int version;  // 13000 is CUDA 13.0
  int (*cuInit)(unsigned);
  int (*cuDriverGetVersion)(int*);
  int (*cuDeviceGet)(int*, int);
  int (*cuDeviceGetCount)(int*);
  int (*cuDeviceGetName)(char*, int size, int device);
  int (*cuDeviceGetAttribute)(int*, int attribute, int device);
  int (*cuDevicePrimaryCtxRetain)(Context*, int);
  int (*cuCtxGetCurrent)(Context*);
  int (*cuCtxPushCurrent_v2)(Context);
  int (*cuCtxPopCurrent_v2)(Context*);
  int (*cuLaunchKernel)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**,
                        void**);
  int (*cuLaunchKernelEx)(const void*, Function, void**, void**);  // null before CUDA 11.8
  int (*cuTensorMapEncodeTiled)(void*, int type, uint32_t rank, void*, const uint64_t* sizes, const uint64_t* strides,
                                const uint32_t* box, const uint32_t* element_strides, int interleave, int swizzle,
                                int promotion, int fill);  // null before CUDA 12.0
  int (*cuTensorMapEncodeIm2col)(void*, int type, uint32_t rank, void*, const uint64_t* sizes, const uint64_t* strides,
                                 const int* lower, const int* upper, uint32_t channels, uint32_t pixels,
                                 const uint32_t* element_strides, int interleave, int swizzle, int promotion,
                                 int fill);  // null before CUDA 12.0
  int (*cuMemcpyDtoDAsync_v2)(void* to, const void* from, size_t bytes, Stream);
  int (*cuStreamCreate)(Stream*, unsigned flags);
  int (*cuStreamDestroy_v2)(Stream);
  int (*cuStreamSynchronize)(Stream);
  int (*cuStreamWaitEvent)(Stream, Event, unsigned flags);
  int (*cuEventCreate)(Event*, unsigned flags);
  int (*cuEventDestroy_v2)(Event);
  int (*cuEventRecord)(Event, Stream);
  int (*cuStreamIsCapturing)(Stream, int*);
  int (*cuThreadExchangeStreamCaptureMode)(int*);
  int (*cuModuleLoadData)(void**, const void*);
  int (*cuModuleUnload)(void*);
  int (*cuModuleGetFunction)(Function*, void*, const char*);
  int (*cuFuncSetAttribute)(Function, int, int);
  int (*cuFuncGetParamInfo)(Function, size_t index, size_t* offset, size_t* size);  // null before CUDA 12.4
  int (*cuGetErrorName)(int, const char**);
  int (*cuGetErrorString)(int, const char**);
};

// Makes a context current as long as this object lives.
class CurrentContext {
 public:
  CurrentContext(const Driver& driver, Context context) : driver_(driver) {
    Context now = nullptr;
    driver.check(driver.cuCtxGetCurrent(&now), "cuCtxGetCurrent");
    if (now != context) {
      driver.check(driver.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent");
      pushed_ = true;
    }
  }
  ~CurrentContext() {
    Context popped = nullptr;
    if (pushed_) driver_.cuCtxPopCurrent_v2(&popped);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  const Driver& driver_;
  bool pushed_ = false;
};

// Lets this thread load, unload and allocate while another thread captures a CUDA graph.  Otherwise the driver refuses
// these calls, and the capture of the other thread fails.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver& driver) : driver_(driver) { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Driver& driver_;
  int mode_ = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED; after the exchange, the thread's own mode
};

}  // namespace onnxfuse
