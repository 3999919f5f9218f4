// Opening sessions for bodies, and running them.
#include "body_session.h"

#include <algorithm>
#include <stdexcept>

#include "export.h"
#include "kernel.h"

namespace onnxfuse {
namespace {

constexpr const char* kCpuProvider = "CPUExecutionProvider";
constexpr int kLogFatal = 4;
constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING
constexpr unsigned kNoTiming = 2;     // CU_EVENT_DISABLE_TIMING

template <class T>
using Owned = std::unique_ptr<T, void (*)(T*)>;

// Calls `make`, which stores an object at the address that it gets, and returns the object.
template <class T, class Make>
Owned<T> made(const Ort& ort, void (*release)(T*), Make make) {
  T* object = nullptr;
  check(ort, make(&object));
  return {object, release};
}

std::vector<std::string> names(const char* prefix, size_t count) {
  std::vector<std::string> result;
  for (size_t i = 0; i < count; ++i) result.push_back(prefix + std::to_string(i));
  return result;
}

std::vector<const char*> pointers(const std::vector<std::string>& texts) {
  std::vector<const char*> result;
  for (const std::string& text : texts) result.push_back(text.c_str());
  return result;
}

Owned<OrtMemoryInfo> host_memory(const Ort& ort) {
  return made<OrtMemoryInfo>(ort, ort.ReleaseMemoryInfo,
                             [&](OrtMemoryInfo** memory) { return ort.CreateCpuMemoryInfo(0, 0, memory); });
}

// Returns a tensor whose data lies elsewhere.
Owned<OrtValue> tensor(const Ort& ort, const OrtMemoryInfo* memory, void* data, const TensorType& type) {
  return made<OrtValue>(ort, ort.ReleaseValue, [&](OrtValue** value) {
    return ort.CreateTensorWithDataAsOrtValue(memory, data, static_cast<size_t>(type.bytes()), type.shape.data(),
                                              type.shape.size(), type.dtype, value);
  });
}

// Adds the CUDA provider, with the user's options that change results, and the stream to run on.
void add_cuda(const Ort& ort, OrtSessionOptions* options, int device, bool tf32, Stream stream) {
  const auto cuda = made<OrtCUDAProviderOptionsV2>(ort, ort.ReleaseCUDAProviderOptions, ort.CreateCUDAProviderOptions);
  const std::string ordinal = std::to_string(device);
  const char* keys[] = {"device_id", "use_tf32"};
  const char* values[] = {ordinal.c_str(), tf32 ? "1" : "0"};
  check(ort, ort.UpdateCUDAProviderOptions(cuda.get(), keys, values, 2));
  check(ort, ort.UpdateCUDAProviderOptionsWithValue(cuda.get(), "user_compute_stream", stream));
  check(ort, ort.SessionOptionsAppendExecutionProvider_CUDA_V2(options, cuda.get()));
}

}  // namespace

SideStream::SideStream(const Driver& driver) : driver_(driver) {
  driver.check(driver.cuStreamCreate(&stream, kNonBlocking), "cuStreamCreate");
  const int code = driver.cuEventCreate(&event_, kNoTiming);
  if (code) driver.cuStreamDestroy_v2(stream);
  driver.check(code, "cuEventCreate");
}

SideStream::~SideStream() {
  // Without a current context, driver 580.159 returns CUDA_SUCCESS for both.
  driver_.cuStreamDestroy_v2(stream);
  driver_.cuEventDestroy_v2(event_);
}

void SideStream::order(Stream earlier, Stream later) const {
  driver_.check(driver_.cuEventRecord(event_, earlier), "cuEventRecord");
  driver_.check(driver_.cuStreamWaitEvent(later, event_, 0), "cuStreamWaitEvent");
}

BodySession::BodySession(const Ort& ort, const std::string& provider, int device, bool tf32, std::string_view model)
    : ort_(ort), driver_(Driver::get()), device_(device) {
  const CurrentContext current(driver_, driver_.context_of(device));
  side_ = std::make_unique<SideStream>(driver_);
  open(provider, tf32, model);
}

void BodySession::open(const std::string& provider, bool tf32, std::string_view model) {
  const auto options = made<OrtSessionOptions>(ort_, ort_.ReleaseSessionOptions, ort_.CreateSessionOptions);
  // A body that does not accept the dtypes is not an error of the user's.
  check(ort_, ort_.SetSessionLogSeverityLevel(options.get(), kLogFatal));
  // With memory patterns, the second run allocates memory, maybe while a CUDA graph is captured.
  check(ort_, ort_.DisableMemPattern(options.get()));
  // The default, one thread for each processor, would compete with the compiler.
  check(ort_, ort_.SetIntraOpNumThreads(options.get(), 1));
  if (provider != kCpuProvider) add_cuda(ort_, options.get(), device_, tf32, side_->stream);
  const auto environment = made<OrtEnv>(ort_, ort_.ReleaseEnv, [&](OrtEnv** env) {  // the process has one
    return ort_.CreateEnv(kLogWarning, "onnxfuse", env);
  });
  auto session = made<OrtSession>(ort_, ort_.ReleaseSession, [&](OrtSession** opened) {
    return ort_.CreateSessionFromArray(environment.get(), model.data(), model.size(), options.get(), opened);
  });
  size_t inputs = 0, outputs = 0;
  check(ort_, ort_.SessionGetInputCount(session.get(), &inputs));
  check(ort_, ort_.SessionGetOutputCount(session.get(), &outputs));
  inputs_ = names("i", inputs);
  outputs_ = names("o", outputs);
  session_ = session.release();
}

BodySession::~BodySession() {
  // onnxruntime would free the memory in a callback of the stream, where CUDA refuses it, which ends the process.
  if (holds_memory_) static_cast<void>(side_.release());
  else ort_.ReleaseSession(session_);
}

void BodySession::run(const std::vector<const OrtValue*>& inputs, const std::vector<size_t>& numbers,
                      const OrtMemoryInfo* memory, Stream stream, const TakeOutput& take) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const CurrentContext current(driver_, driver_.context_of(device_));
  captured_ = captured_ || driver_.is_capturing(stream);
  const auto options = made<OrtRunOptions>(ort_, ort_.ReleaseRunOptions, ort_.CreateRunOptions);
  const auto binding = made<OrtIoBinding>(
      ort_, ort_.ReleaseIoBinding, [&](OrtIoBinding** made) { return ort_.CreateIoBinding(session_, made); });
  if (captured_) {
    check(ort_, ort_.AddRunConfigEntry(options.get(), "disable_synchronize_execution_providers", "1"));
    side_->order(stream, side_->stream);
  } else {  // binding copies, at once, inputs that the body reads in host memory
    driver_.check(driver_.cuStreamSynchronize(stream), "cuStreamSynchronize");
  }
  bind_inputs(binding.get(), inputs, numbers);
  for (const std::string& name : outputs_) check(ort_, ort_.BindOutputToDevice(binding.get(), name.c_str(), memory));
  holds_memory_ = true;
  Owned<OrtStatus> status(ort_.RunWithBinding(session_, options.get(), binding.get()), ort_.ReleaseStatus);
  if (captured_) side_->order(side_->stream, stream);  // a graph that lacks this cannot be made
  check(ort_, status.release());
  holds_memory_ = captured_;
  take_outputs(binding.get(), take);
}

void BodySession::bind_inputs(OrtIoBinding* binding, const std::vector<const OrtValue*>& inputs,
                              const std::vector<size_t>& numbers) const {
  if (inputs.size() != inputs_.size()) throw std::runtime_error("the body has another number of inputs");
  const auto host = host_memory(ort_);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const OrtValue* value = inputs[i];
    Owned<OrtValue> number(nullptr, ort_.ReleaseValue);
    if (std::binary_search(numbers.begin(), numbers.end(), i)) {  // the model has rank 1 for it, as the key has
      void* data = nullptr;
      check(ort_, ort_.GetTensorMutableData(const_cast<OrtValue*>(value), &data));
      number = tensor(ort_, host.get(), data, TensorType{kInt32, {1}});
      value = number.get();
    }
    check(ort_, ort_.BindInput(binding, inputs_[i].c_str(), value));
  }
}

void BodySession::take_outputs(const OrtIoBinding* binding, const TakeOutput& take) const {
  OrtAllocator* allocator = nullptr;  // onnxruntime's own, which nobody releases
  check(ort_, ort_.GetAllocatorWithDefaultOptions(&allocator));
  OrtValue** found = nullptr;
  size_t count = 0;
  check(ort_, ort_.GetBoundOutputValues(binding, allocator, &found, &count));
  std::vector<Owned<OrtValue>> values;
  for (size_t i = 0; i < count; ++i) values.emplace_back(found[i], ort_.ReleaseValue);
  if (found) check(ort_, ort_.AllocatorFree(allocator, found));
  for (size_t i = 0; i < count; ++i) take(i, values[i].get());
}

void BodySession::run_on_zeros(const std::vector<TensorType>& inputs) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto host = host_memory(ort_);
  std::vector<std::vector<char>> zeros;
  std::vector<Owned<OrtValue>> values;
  std::vector<const OrtValue*> given;
  for (const TensorType& type : inputs) {
    auto& data = zeros.emplace_back(static_cast<size_t>(type.bytes()));
    values.push_back(tensor(ort_, host.get(), data.data(), type));
    given.push_back(values.back().get());
  }
  std::vector<OrtValue*> found(outputs_.size());
  OrtStatus* status = ort_.Run(session_, nullptr, pointers(inputs_).data(), given.data(), given.size(),
                               pointers(outputs_).data(), found.size(), found.data());
  for (OrtValue* value : found) ort_.ReleaseValue(value);
  check(ort_, status);
}

}  // namespace onnxfuse

using namespace onnxfuse;

// Opens a session for a body in the onnxruntime that Python uses.  The node that gets it closes it, or else
// onnxfuse_close_body.
ONNXFUSE_EXPORT const char* onnxfuse_open_body(const char* provider, int device, int tf32, const char* model,
                                               size_t size, void** body) {
  return reported([&] {
    const RelaxedCapture relaxed(Driver::get());
    *body = new BodySession(ort_of_python(), provider, device, tf32 != 0, {model, size});
  });
}

// Runs a body on zeros of the types that `key` lists.
ONNXFUSE_EXPORT const char* onnxfuse_run_on_zeros(void* body, const int64_t* key, size_t size) {
  return reported([&] {
    const RelaxedCapture relaxed(Driver::get());
    static_cast<BodySession*>(body)->run_on_zeros(types_of(Key(key, key + size)));
  });
}

ONNXFUSE_EXPORT void onnxfuse_close_body(void* body) {
  const RelaxedCapture relaxed(Driver::get());
  delete static_cast<BodySession*>(body);
}
