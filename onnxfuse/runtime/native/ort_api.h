// The part of onnxruntime's C API that this library uses, by position in its append-only table of functions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace onnxfuse {

struct OrtStatus;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtValue;
struct OrtTensorTypeAndShapeInfo;
struct OrtAllocator;
struct OrtMemoryInfo;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtShapeInferContext;
struct OrtOpAttr;
struct OrtLogger;
struct OrtEnv;
struct OrtSession;
struct OrtRunOptions;
struct OrtIoBinding;
struct OrtCUDAProviderOptionsV2;

constexpr uint32_t kMinApi = 23;            // onnxruntime 1.23
constexpr uint32_t kShapeReferenceApi = 29;  // from this version on, a tensor's shape can be read without a copy

enum ErrorCode { kFail = 1, kInvalidArgument = 2, kRuntimeException = 6 };
constexpr int kLogWarning = 2;
enum AttributeType { kAttributeInts = 2 };
// Resources of the CUDA provider, from onnxruntime's cuda_resource.h.
constexpr int kCudaResourceVersion = 3;
constexpr int kCudaUseTf32 = 10011;

// X(function, slot, result, parameters)
#define ONNXFUSE_ORT_FUNCTIONS(X)                                                                                     \
  X(CreateStatus, 0, OrtStatus*, (int code, const char* message))                                                     \
  X(GetErrorMessage, 2, const char*, (const OrtStatus*))                                                              \
  X(CreateEnv, 3, OrtStatus*, (int severity, const char* id, OrtEnv**))                                               \
  X(CreateSessionFromArray, 8, OrtStatus*,                                                                            \
    (const OrtEnv*, const void*, size_t, const OrtSessionOptions*, OrtSession**))                                     \
  X(Run, 9, OrtStatus*,                                                                                               \
    (OrtSession*, const OrtRunOptions*, const char* const* names, const OrtValue* const* inputs, size_t,              \
     const char* const* output_names, size_t, OrtValue** outputs))                                                    \
  X(CreateSessionOptions, 10, OrtStatus*, (OrtSessionOptions**))                                                      \
  X(DisableMemPattern, 17, OrtStatus*, (OrtSessionOptions*))                                                          \
  X(SetSessionLogSeverityLevel, 22, OrtStatus*, (OrtSessionOptions*, int))                                            \
  X(SetIntraOpNumThreads, 24, OrtStatus*, (OrtSessionOptions*, int))                                                  \
  X(CreateCustomOpDomain, 26, OrtStatus*, (const char* domain, OrtCustomOpDomain**))                                  \
  X(CustomOpDomain_Add, 27, OrtStatus*, (OrtCustomOpDomain*, const struct OrtCustomOp*))                              \
  X(AddCustomOpDomain, 28, OrtStatus*, (OrtSessionOptions*, OrtCustomOpDomain*))                                      \
  X(SessionGetInputCount, 30, OrtStatus*, (const OrtSession*, size_t*))                                               \
  X(SessionGetOutputCount, 31, OrtStatus*, (const OrtSession*, size_t*))                                              \
  X(CreateRunOptions, 39, OrtStatus*, (OrtRunOptions**))                                                              \
  X(CreateTensorWithDataAsOrtValue, 49, OrtStatus*,                                                                   \
    (const OrtMemoryInfo*, void*, size_t bytes, const int64_t* shape, size_t rank, int type, OrtValue**))             \
  X(GetTensorMutableData, 51, OrtStatus*, (OrtValue*, void**))                                                        \
  X(CreateTensorTypeAndShapeInfo, 57, OrtStatus*, (OrtTensorTypeAndShapeInfo**))                                      \
  X(SetTensorElementType, 58, OrtStatus*, (OrtTensorTypeAndShapeInfo*, int type))                                     \
  X(SetDimensions, 59, OrtStatus*, (OrtTensorTypeAndShapeInfo*, const int64_t*, size_t))                              \
  X(GetTensorElementType, 60, OrtStatus*, (const OrtTensorTypeAndShapeInfo*, int* type))                              \
  X(GetDimensionsCount, 61, OrtStatus*, (const OrtTensorTypeAndShapeInfo*, size_t*))                                  \
  X(GetDimensions, 62, OrtStatus*, (const OrtTensorTypeAndShapeInfo*, int64_t*, size_t))                              \
  X(GetTensorTypeAndShape, 65, OrtStatus*, (const OrtValue*, OrtTensorTypeAndShapeInfo**))                            \
  X(CreateCpuMemoryInfo, 69, OrtStatus*, (int allocator_type, int memory_type, OrtMemoryInfo**))                      \
  X(MemoryInfoGetId, 72, OrtStatus*, (const OrtMemoryInfo*, int*))                                                    \
  X(AllocatorFree, 76, OrtStatus*, (OrtAllocator*, void*))                                                            \
  X(AllocatorGetInfo, 77, OrtStatus*, (const OrtAllocator*, const OrtMemoryInfo**))                                   \
  X(GetAllocatorWithDefaultOptions, 78, OrtStatus*, (OrtAllocator**))                                                 \
  X(KernelInfoGetAttribute_float, 85, OrtStatus*, (const OrtKernelInfo*, const char*, float*))                        \
  X(KernelInfoGetAttribute_int64, 86, OrtStatus*, (const OrtKernelInfo*, const char*, int64_t*))                      \
  X(KernelInfoGetAttribute_string, 87, OrtStatus*, (const OrtKernelInfo*, const char*, char*, size_t*))               \
  X(KernelContext_GetInputCount, 88, OrtStatus*, (const OrtKernelContext*, size_t*))                                  \
  X(KernelContext_GetInput, 90, OrtStatus*, (const OrtKernelContext*, size_t, const OrtValue**))                      \
  X(KernelContext_GetOutput, 91, OrtStatus*, (OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**))         \
  X(ReleaseEnv, 92, void, (OrtEnv*))                                                                                  \
  X(ReleaseStatus, 93, void, (OrtStatus*))                                                                            \
  X(ReleaseMemoryInfo, 94, void, (OrtMemoryInfo*))                                                                    \
  X(ReleaseSession, 95, void, (OrtSession*))                                                                          \
  X(ReleaseValue, 96, void, (OrtValue*))                                                                              \
  X(ReleaseRunOptions, 97, void, (OrtRunOptions*))                                                                    \
  X(ReleaseTensorTypeAndShapeInfo, 99, void, (OrtTensorTypeAndShapeInfo*))                                            \
  X(ReleaseSessionOptions, 100, void, (OrtSessionOptions*))                                                           \
  X(ReleaseAllocator, 132, void, (OrtAllocator*))                                                                     \
  X(RunWithBinding, 133, OrtStatus*, (OrtSession*, const OrtRunOptions*, const OrtIoBinding*))                        \
  X(CreateIoBinding, 134, OrtStatus*, (OrtSession*, OrtIoBinding**))                                                  \
  X(ReleaseIoBinding, 135, void, (OrtIoBinding*))                                                                     \
  X(BindInput, 136, OrtStatus*, (OrtIoBinding*, const char* name, const OrtValue*))                                   \
  X(BindOutputToDevice, 138, OrtStatus*, (OrtIoBinding*, const char* name, const OrtMemoryInfo*))                     \
  X(GetBoundOutputValues, 140, OrtStatus*, (const OrtIoBinding*, OrtAllocator*, OrtValue***, size_t*))                \
  X(KernelInfoGetAttributeArray_float, 162, OrtStatus*, (const OrtKernelInfo*, const char*, float*, size_t*))         \
  X(KernelInfoGetAttributeArray_int64, 163, OrtStatus*, (const OrtKernelInfo*, const char*, int64_t*, size_t*))       \
  X(AddRunConfigEntry, 165, OrtStatus*, (OrtRunOptions*, const char* key, const char* value))                         \
  X(KernelContext_GetGPUComputeStream, 193, OrtStatus*, (const OrtKernelContext*, void**))                            \
  X(SessionOptionsAppendExecutionProvider_CUDA_V2, 204, OrtStatus*,                                                   \
    (OrtSessionOptions*, const OrtCUDAProviderOptionsV2*))                                                            \
  X(CreateCUDAProviderOptions, 205, OrtStatus*, (OrtCUDAProviderOptionsV2**))                                         \
  X(UpdateCUDAProviderOptions, 206, OrtStatus*,                                                                       \
    (OrtCUDAProviderOptionsV2*, const char* const* keys, const char* const* values, size_t))                          \
  X(ReleaseCUDAProviderOptions, 208, void, (OrtCUDAProviderOptionsV2*))                                               \
  X(KernelInfo_GetInputCount, 230, OrtStatus*, (const OrtKernelInfo*, size_t*))                                       \
  X(HasSessionConfigEntry, 237, OrtStatus*, (const OrtSessionOptions*, const char* key, int* has))                    \
  X(GetSessionConfigEntry, 238, OrtStatus*, (const OrtSessionOptions*, const char* key, char* value, size_t* size))   \
  X(KernelInfo_GetNodeName, 244, OrtStatus*, (const OrtKernelInfo*, char*, size_t*))                                  \
  X(KernelInfo_GetLogger, 245, OrtStatus*, (const OrtKernelInfo*, const OrtLogger**))                                 \
  X(KernelContext_GetLogger, 246, OrtStatus*, (const OrtKernelContext*, const OrtLogger**))                           \
  X(Logger_LogMessage, 247, OrtStatus*,                                                                               \
    (const OrtLogger*, int severity, const char* text, const char* file, int line, const char* function))             \
  X(KernelInfoGetConstantInput_tensor, 249, OrtStatus*,                                                               \
    (const OrtKernelInfo*, size_t, int* is_constant, const OrtValue**))                                               \
  X(UpdateCUDAProviderOptionsWithValue, 263, OrtStatus*, (OrtCUDAProviderOptionsV2*, const char* key, void* value))   \
  X(KernelContext_GetResource, 265, OrtStatus*, (const OrtKernelContext*, int version, int resource, void**))         \
  X(ShapeInferContext_GetInputCount, 267, OrtStatus*, (const OrtShapeInferContext*, size_t*))                         \
  X(ShapeInferContext_GetInputTypeShape, 268, OrtStatus*,                                                             \
    (const OrtShapeInferContext*, size_t, OrtTensorTypeAndShapeInfo**))                                               \
  X(ShapeInferContext_GetAttribute, 269, OrtStatus*, (const OrtShapeInferContext*, const char*, const OrtOpAttr**))   \
  X(ShapeInferContext_SetOutputTypeShape, 270, OrtStatus*,                                                            \
    (const OrtShapeInferContext*, size_t, const OrtTensorTypeAndShapeInfo*))                                          \
  X(SetSymbolicDimensions, 271, OrtStatus*, (OrtTensorTypeAndShapeInfo*, const char**, size_t))                       \
  X(ReadOpAttr, 272, OrtStatus*, (const OrtOpAttr*, int type, void* data, size_t length, size_t* needed))             \
  X(KernelContext_GetScratchBuffer, 277, OrtStatus*, (const OrtKernelContext*, const OrtMemoryInfo*, size_t, void**)) \
  X(KernelInfoGetAllocator, 278, OrtStatus*, (const OrtKernelInfo*, int memory_type, OrtAllocator**))

struct OrtApiBase {
  const void* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

// The functions of one loaded onnxruntime.
struct Ort {
#define X(name, slot, result, parameters) result(*name) parameters;
  ONNXFUSE_ORT_FUNCTIONS(X)
#undef X
  // Null before kShapeReferenceApi.
  OrtStatus* (*GetTensorElementTypeAndShapeDataReference)(const OrtValue*, int*, const int64_t**, size_t*);

  Ort(const void* table, bool has_shape_reference) {
    const auto* slots = static_cast<void* const*>(table);
#define X(name, slot, result, parameters) name = reinterpret_cast<result(*) parameters>(slots[slot]);
    ONNXFUSE_ORT_FUNCTIONS(X)
#undef X
    using Reference = decltype(GetTensorElementTypeAndShapeDataReference);
    GetTensorElementTypeAndShapeDataReference = has_shape_reference ? reinterpret_cast<Reference>(slots[414]) : nullptr;
  }
};

// A custom operator as onnxruntime reads it; `version` determines the number of fields.
struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const void* api, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  int (*GetInputType)(const OrtCustomOp*, size_t);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  int (*GetOutputType)(const OrtCustomOp*, size_t);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void*, OrtKernelContext*);
  void (*KernelDestroy)(void*);
  int (*GetInputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetOutputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetInputMemoryType)(const OrtCustomOp*, size_t);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const void* api, const OrtKernelInfo*, void** kernel);
  OrtStatus* (*KernelComputeV2)(void*, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, OrtShapeInferContext*);
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
  size_t (*GetMayInplace)(int**, int**);
  void (*ReleaseMayInplace)(int*, int*);
  size_t (*GetAliasMap)(int**, int**);
  void (*ReleaseAliasMap)(int*, int*);
};
constexpr uint32_t kCustomOpVersion = 17;  // has the fields up to GetEndVersion
constexpr int kHostInput = -2;  // OrtMemTypeCPUInput
enum Characteristic { kRequired = 0, kOptional = 1, kVariadic = 2 };
static_assert(sizeof(void*) != 8 || (sizeof(OrtCustomOp) == 208 && offsetof(OrtCustomOp, InferOutputShapeFn) == 152));

}  // namespace onnxfuse
