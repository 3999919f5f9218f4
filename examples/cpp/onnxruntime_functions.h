// The part of onnxruntime's C API that run_model.cc uses, so that it builds against the library without its headers.
//
// onnxruntime's functions stand in one table, to which every version appends; a position never changes its meaning.  In
// a project that has onnxruntime's headers, use these instead: the calls are the same.
#pragma once

#include <cstddef>
#include <cstdint>

struct OrtStatus;
struct OrtEnv;
struct OrtSession;
struct OrtSessionOptions;
struct OrtRunOptions;
struct OrtValue;
struct OrtAllocator;
struct OrtTypeInfo;
struct OrtTensorTypeAndShapeInfo;
struct OrtCUDAProviderOptionsV2;

constexpr uint32_t kApiVersion = 23;  // of onnxruntime 1.23, the oldest that onnxfuse runs in
enum LoggingLevel { kWarning = 2 };
enum ElementType { kFloat = 1, kInt32 = 6, kInt64 = 7, kBool = 9, kFloat16 = 10 };

// X(function, position, parameters); each returns an OrtStatus*, which is null if it did not fail.
#define ORT_FUNCTIONS(X)                                                                                       \
  X(CreateEnv, 3, (int level, const char* name, OrtEnv**))                                                     \
  X(CreateSession, 7, (const OrtEnv*, const char* path, const OrtSessionOptions*, OrtSession**))               \
  X(Run, 9, (OrtSession*, const OrtRunOptions*, const char* const* names, const OrtValue* const* inputs,       \
             size_t count, const char* const* output_names, size_t output_count, OrtValue** outputs))          \
  X(CreateSessionOptions, 10, (OrtSessionOptions**))                                                           \
  X(SessionGetInputCount, 30, (const OrtSession*, size_t*))                                                    \
  X(SessionGetOutputCount, 31, (const OrtSession*, size_t*))                                                   \
  X(SessionGetInputTypeInfo, 33, (const OrtSession*, size_t, OrtTypeInfo**))                                   \
  X(SessionGetInputName, 36, (const OrtSession*, size_t, OrtAllocator*, char**))                               \
  X(SessionGetOutputName, 37, (const OrtSession*, size_t, OrtAllocator*, char**))                              \
  X(CreateTensorAsOrtValue, 48, (OrtAllocator*, const int64_t* shape, size_t rank, int type, OrtValue**))      \
  X(GetTensorMutableData, 51, (OrtValue*, void**))                                                             \
  X(CastTypeInfoToTensorInfo, 55, (const OrtTypeInfo*, const OrtTensorTypeAndShapeInfo**))                     \
  X(GetTensorElementType, 60, (const OrtTensorTypeAndShapeInfo*, int* type))                                   \
  X(GetDimensionsCount, 61, (const OrtTensorTypeAndShapeInfo*, size_t*))                                       \
  X(GetDimensions, 62, (const OrtTensorTypeAndShapeInfo*, int64_t*, size_t))                                   \
  X(GetTensorShapeElementCount, 64, (const OrtTensorTypeAndShapeInfo*, size_t*))                               \
  X(GetTensorTypeAndShape, 65, (const OrtValue*, OrtTensorTypeAndShapeInfo**))                                 \
  X(GetAllocatorWithDefaultOptions, 78, (OrtAllocator**))                                                      \
  X(AddSessionConfigEntry, 130, (OrtSessionOptions*, const char* key, const char* value))                      \
  X(SessionOptionsAppendExecutionProvider_CUDA_V2, 204, (OrtSessionOptions*, const OrtCUDAProviderOptionsV2*)) \
  X(CreateCUDAProviderOptions, 205, (OrtCUDAProviderOptionsV2**))                                              \
  X(RegisterCustomOpsLibrary_V2, 228, (OrtSessionOptions*, const char* path))

struct OrtApiBase {
  const void* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};
extern "C" const OrtApiBase* OrtGetApiBase();

// The table of the onnxruntime that this program is linked with.
struct Ort {
#define X(name, position, parameters) OrtStatus*(*name)parameters;
  ORT_FUNCTIONS(X)
#undef X
  const char* (*GetErrorMessage)(const OrtStatus*);
  void (*ReleaseSession)(OrtSession*);
  void (*ReleaseValue)(OrtValue*);
  void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo*);

  // Leaves all functions null if the onnxruntime is too old.
  Ort() : Ort(static_cast<void* const*>(OrtGetApiBase()->GetApi(kApiVersion))) {}

 private:
  explicit Ort(void* const* table) {
    const auto at = [&](int position) { return table ? table[position] : nullptr; };
#define X(name, position, parameters) name = reinterpret_cast<OrtStatus*(*)parameters>(at(position));
    ORT_FUNCTIONS(X)
#undef X
    GetErrorMessage = reinterpret_cast<const char* (*)(const OrtStatus*)>(at(2));
    ReleaseSession = reinterpret_cast<void (*)(OrtSession*)>(at(95));
    ReleaseValue = reinterpret_cast<void (*)(OrtValue*)>(at(96));
    ReleaseTensorTypeAndShapeInfo = reinterpret_cast<void (*)(OrtTensorTypeAndShapeInfo*)>(at(99));
  }
};
