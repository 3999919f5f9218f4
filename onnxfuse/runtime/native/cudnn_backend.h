// cuDNN 9's backend API, opened at run time.  The part of it that we use is declared here, as in cudnn_graph.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "driver.h"

namespace onnxfuse {

enum class CudnnDescriptorType : int {
  kPointwise = 0,
  kConvolution = 1,
  kEngine = 2,
  kEngineConfig = 3,
  kEngineHeuristic = 4,
  kExecutionPlan = 5,
  kKnobChoice = 7,
  kConvolutionForward = 10,
  kConvolutionBackwardData = 12,
  kPointwiseOperation = 13,
  kOperationGraph = 15,
  kVariantPack = 16,
  kTensor = 17,
};

// The types of attributes, and in brackets the C++ type of an element.
enum class CudnnType : int {
  kHandle = 0,           // [void*]
  kDataType = 1,         // [int]
  kBoolean = 2,          // [bool]
  kInt64 = 3,            // [int64_t]
  kFloat = 4,            // [float]
  kVoidPointer = 6,      // [void*]
  kConvolutionMode = 7,  // [int]
  kHeuristicMode = 8,    // [int]
  kKnobType = 9,         // [int]
  kNumericalNote = 11,   // [int]
  kPointwiseMode = 14,   // [int]
  kDescriptor = 15,      // [void*]
  kBehaviorNote = 19,    // [int]
};

enum class CudnnAttribute : int {
  kPointwiseMode = 0,
  kPointwiseMathPrecision = 1,
  kPointwiseReluLowerClip = 3,
  kPointwiseReluUpperClip = 4,
  kPointwiseReluLowerClipSlope = 5,
  kPointwiseEluAlpha = 6,
  kPointwiseSwishBeta = 8,
  kConvolutionComputeType = 100,
  kConvolutionMode = 101,
  kConvolutionDilations = 102,
  kConvolutionStrides = 103,
  kConvolutionPadsEnd = 104,
  kConvolutionPadsBegin = 105,
  kConvolutionSpatialDims = 106,
  kHeuristicMode = 200,
  kHeuristicOperationGraph = 201,
  kHeuristicResults = 202,
  kEngineConfigEngine = 300,
  kEngineConfigKnobChoices = 302,
  kEngineConfigWorkspaceSize = 303,  // from cuDNN 9.2 on
  kExecutionPlanHandle = 400,
  kExecutionPlanEngineConfig = 401,
  kExecutionPlanWorkspaceSize = 402,
  kKnobChoiceType = 600,
  kKnobChoiceValue = 601,
  kForwardAlpha = 700,
  kForwardBeta = 701,
  kForwardConvolution = 702,
  kForwardW = 703,
  kForwardX = 704,
  kForwardY = 705,
  kBackwardDataAlpha = 706,
  kBackwardDataBeta = 707,
  kBackwardDataConvolution = 708,
  kBackwardDataW = 709,
  kBackwardDataDx = 710,
  kBackwardDataDy = 711,
  kOperationPointwise = 750,
  kOperationPointwiseX = 751,
  kOperationPointwiseB = 752,
  kOperationPointwiseY = 753,
  kOperationGraphHandle = 800,
  kOperationGraphOperations = 801,
  kTensorByteAlignment = 900,
  kTensorDataType = 901,
  kTensorDimensions = 902,
  kTensorStrides = 903,
  kTensorUniqueId = 906,
  kTensorIsVirtual = 907,
  kVariantPackUniqueIds = 1000,
  kVariantPackDataPointers = 1001,
  kVariantPackWorkspace = 1003,
  kEngineOperationGraph = 1300,
  kEngineGlobalIndex = 1301,
  kEngineNumericalNotes = 1303,
  kEngineBehaviorNotes = 1305,
};

enum CudnnDataType : int { kCudnnFloat32 = 0, kCudnnFloat16 = 2, kCudnnBfloat16 = 9 };
enum CudnnConvolutionMode : int { kCrossCorrelation = 1 };
enum CudnnHeuristicMode : int { kHeuristicB = 1, kHeuristicFallback = 2, kHeuristicA = 3 };
enum CudnnPointwiseMode : int {
  kPointwiseAdd = 0,
  kPointwiseRelu = 100,
  kPointwiseTanh = 101,
  kPointwiseSigmoid = 102,
  kPointwiseElu = 103,
  kPointwiseGelu = 104,
  kPointwiseSoftplus = 105,
  kPointwiseSwish = 106,
  kPointwiseGeluTanh = 107,
};
enum CudnnNumericalNote : int {
  kNoteTensorCore = 0,
  kNoteDownConvertInputs = 1,
  kNoteReducedPrecisionReduction = 2,
  kNoteFft = 3,
  kNoteNondeterministic = 4,
  kNoteWinograd = 5,
};
enum CudnnBehaviorNote : int { kNoteRuntimeCompilation = 0 };
constexpr int64_t kMaxNotes = 16;  // per engine; cuDNN 9.28 knows ten numerical notes
constexpr int64_t kMaxKnobs = 64;  // per engine; cuDNN 9.28 knows 46 types of knobs

struct Cudnn {
  // Opens the library at `path`, or, if `path` is null, the one that this process has loaded.  Does nothing if one is
  // open.  Throws std::runtime_error.
  static void open(const char* path);
  // Unless one is open, opens $ONNXFUSE_LIBCUDNN, the library that this process has loaded, or the one that the system
  // finds.  Throws std::runtime_error if there is none.
  static const Cudnn& get();

  // Whether a status says that cuDNN does not support the operation, rather than that the call was wrong.
  static bool is_unsupported(int code) { return code >= 3000 && code < 4000; }
  // Throws "<what> failed: CUDNN_STATUS_… (cuDNN's own text)" unless the code is 0.
  void check(int code, const std::string& what) const;

  std::string path;
  size_t (*cudnnGetVersion)();
  const char* (*cudnnGetErrorString)(int);
  void (*cudnnGetLastErrorString)(char* message, size_t size);
  int (*cudnnCreate)(void** handle);
  int (*cudnnSetStream)(void* handle, Stream);
  int (*cudnnBackendCreateDescriptor)(int type, void** descriptor);
  int (*cudnnBackendDestroyDescriptor)(void* descriptor);
  int (*cudnnBackendFinalize)(void* descriptor);
  int (*cudnnBackendSetAttribute)(void* descriptor, int attribute, int type, int64_t count, const void* elements);
  int (*cudnnBackendGetAttribute)(void* descriptor, int attribute, int type, int64_t requested, int64_t* count,
                                  void* elements);
  int (*cudnnBackendExecute)(void* handle, void* plan, void* variant_pack);
};

// A cuDNN handle of a device for this thread alone.  When this object is deleted, the handle returns to the device's
// pool, which grows to the largest number of threads that used handles at one time.  The device's context must be
// current.
class CudnnHandle {
 public:
  CudnnHandle(const Cudnn& cudnn, int device);
  ~CudnnHandle();
  CudnnHandle(const CudnnHandle&) = delete;
  CudnnHandle& operator=(const CudnnHandle&) = delete;
  void* get() const { return handle_; }

 private:
  const int device_;
  void* handle_ = nullptr;
};

// A descriptor of the backend API.  Its methods throw std::runtime_error with cuDNN's own text where a call fails.
class CudnnDescriptor {
 public:
  CudnnDescriptor(const Cudnn& cudnn, CudnnDescriptorType type);
  ~CudnnDescriptor();
  CudnnDescriptor(CudnnDescriptor&& other) noexcept : cudnn_(other.cudnn_), raw_(std::exchange(other.raw_, nullptr)) {}
  CudnnDescriptor(const CudnnDescriptor&) = delete;
  CudnnDescriptor& operator=(const CudnnDescriptor&) = delete;
  void* raw() const { return raw_; }

  void set(CudnnAttribute attribute, CudnnType type, int64_t count, const void* elements);
  void set(CudnnAttribute attribute, const std::vector<int64_t>& values) {
    set(attribute, CudnnType::kInt64, static_cast<int64_t>(values.size()), values.data());
  }
  void set(CudnnAttribute attribute, int64_t value) { set(attribute, CudnnType::kInt64, 1, &value); }
  void set(CudnnAttribute attribute, float value) { set(attribute, CudnnType::kFloat, 1, &value); }
  void set(CudnnAttribute attribute, bool value) { set(attribute, CudnnType::kBoolean, 1, &value); }
  // Sets a number of the enumeration that `type` names.
  void set(CudnnAttribute attribute, CudnnType type, int value) { set(attribute, type, 1, &value); }
  void set(CudnnAttribute attribute, CudnnType type, void* value) { set(attribute, type, 1, &value); }
  void set(CudnnAttribute attribute, const CudnnDescriptor& value) {
    set(attribute, CudnnType::kDescriptor, value.raw_);
  }

  void finalize();
  // Returns false, instead of throwing, if cuDNN does not support the content of the descriptor.
  bool finalize_if_supported();

  // Reads up to `room` elements and returns how many it has read.
  int64_t get(CudnnAttribute attribute, CudnnType type, int64_t room, void* elements) const;
  int64_t get_int64(CudnnAttribute attribute) const;

 private:
  const Cudnn& cudnn_;
  void* raw_ = nullptr;
};

}  // namespace onnxfuse
