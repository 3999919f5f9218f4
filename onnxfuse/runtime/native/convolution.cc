// A convolution by cuDNN.
#include "convolution.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <stdexcept>
#include <utility>

namespace onnxfuse {
namespace {

using Attribute = CudnnAttribute;
using Type = CudnnType;
using Sizes = std::vector<int64_t>;

enum TensorId : int64_t { kX = 1, kW = 2, kY = 3, kBias = 4, kResidual = 5, kFirstVirtual = 16 };
// According to cuDNN, mode B is the more precise estimate.  The fallback has engines for convolutions for
// which modes A and B have none.
constexpr CudnnHeuristicMode kHeuristicModes[] = {kHeuristicB, kHeuristicA, kHeuristicFallback};

const char* name_of(CudnnDataType type) {
  return type == kCudnnFloat16 ? "float16" : type == kCudnnBfloat16 ? "bfloat16" : "float32";
}

// Returns values for two or three spatial axes, as cuDNN requires: if there is a value for one axis only, `first` is
// put before that value.
Sizes at_least_two(const Sizes& values, int64_t first) {
  return values.size() > 1 ? values : Sizes{first, values.front()};
}

Sizes joined(int64_t first, int64_t second, const Sizes& spatial) {
  Sizes dims{first, second};
  const Sizes padded = at_least_two(spatial, 1);
  dims.insert(dims.end(), padded.begin(), padded.end());
  return dims;
}

// Returns the strides of a contiguous tensor whose dims are in the order N, C, and then the spatial axes.
Sizes strides_of(const Sizes& dims, bool channels_last) {
  Sizes strides(dims.size());
  int64_t stride = channels_last ? dims[1] : 1;
  for (size_t i = dims.size() - 1; i >= 2; --i) {
    strides[i] = stride;
    stride *= dims[i];
  }
  strides[1] = channels_last ? 1 : stride;
  strides[0] = channels_last ? stride : stride * dims[1];
  return strides;
}

// Returns the largest power of two, up to 16, that is known to divide the address of a tensor.
int64_t alignment_of(const Convolution& convolution, const Pointer& pointer) {
  const bool aligned = convolution.aligned || pointer.kind == MemoryKind::kScratch;
  const int64_t start = aligned ? kAlignment : convolution.element_bytes();
  const auto offset = static_cast<int64_t>(pointer.offset);
  return offset ? std::min(start, offset & -offset) : start;
}

// --- the operations --------------------------------------------------------------------------------------------------

// Makes the descriptors of a convolution and its epilogue.  They are kept until the execution plan is gone.
class Graph {
 public:
  Graph(const Cudnn& cudnn, const Convolution& convolution, const CudnnHandle& handle)
      : cudnn_(cudnn), convolution_(convolution) {
    supported_ = add_operations() && add_graph(handle);
  }
  // Whether cuDNN accepts the operations; if it does not, no other method may be called.
  bool supported() const { return supported_; }
  const CudnnDescriptor& operations() const { return descriptors_.back(); }
  std::vector<CudnnDescriptor> release() { return std::move(descriptors_); }

 private:
  CudnnDescriptor& add(CudnnDescriptorType type) {
    descriptors_.emplace_back(cudnn_, type);
    return descriptors_.back();
  }

  // Adds a tensor and returns its descriptor; nullptr if cuDNN does not support it.
  void* add_tensor(int64_t id, const Sizes& dims, const Sizes& strides, int type, int64_t alignment, bool is_virtual) {
    CudnnDescriptor& tensor = add(CudnnDescriptorType::kTensor);
    tensor.set(Attribute::kTensorDataType, Type::kDataType, type);
    tensor.set(Attribute::kTensorDimensions, dims);
    tensor.set(Attribute::kTensorStrides, strides);
    tensor.set(Attribute::kTensorByteAlignment, alignment);
    tensor.set(Attribute::kTensorUniqueId, id);
    tensor.set(Attribute::kTensorIsVirtual, is_virtual);
    return tensor.finalize_if_supported() ? tensor.raw() : nullptr;
  }

  void* add_operand(int64_t id, const Pointer& pointer, const Sizes& dims, bool channels_last) {
    return add_tensor(id, dims, strides_of(dims, channels_last), convolution_.type,
                      alignment_of(convolution_, pointer), false);
  }

  // Adds the result of an operation: y for the last operation, else a virtual tensor in float32.
  void* add_result(bool last) {
    const Sizes dims = joined(convolution_.n, convolution_.m, convolution_.y_sizes);
    if (last) return add_operand(kY, convolution_.y, dims, convolution_.channels_last);
    return add_tensor(next_virtual_++, dims, strides_of(dims, convolution_.channels_last), kCudnnFloat32, kAlignment,
                      true);
  }

  void* add_residual() {
    const Sizes dims = joined(convolution_.n, convolution_.m, convolution_.y_sizes);
    return add_operand(kResidual, convolution_.residual, dims, convolution_.channels_last);
  }

  void* add_bias() {
    return add_operand(kBias, convolution_.bias, joined(1, convolution_.m, Sizes(convolution_.sizes.size(), 1)), true);
  }

  // Adds an operation; false if cuDNN does not support it.
  bool add_convolution(bool last) {
    const Convolution& conv = convolution_;
    CudnnDescriptor& shape = add(CudnnDescriptorType::kConvolution);
    const void* const shape_raw = shape.raw();
    shape.set(Attribute::kConvolutionComputeType, Type::kDataType, int{kCudnnFloat32});
    shape.set(Attribute::kConvolutionMode, Type::kConvolutionMode, int{kCrossCorrelation});
    shape.set(Attribute::kConvolutionSpatialDims, static_cast<int64_t>(at_least_two(conv.sizes, 1).size()));
    shape.set(Attribute::kConvolutionDilations, at_least_two(conv.dilations, 1));
    shape.set(Attribute::kConvolutionStrides, at_least_two(conv.strides, 1));
    shape.set(Attribute::kConvolutionPadsBegin, at_least_two(conv.pads_begin, 0));
    shape.set(Attribute::kConvolutionPadsEnd, at_least_two(conv.pads_end, 0));
    if (!shape.finalize_if_supported()) return false;
    void* const x = add_operand(kX, conv.x, joined(conv.n, conv.c, conv.sizes), conv.channels_last);
    // A transposed convolution is the data gradient of a convolution that reads y and writes x.  Both have the same w.
    // The first two dims of w are therefore the channels of x, and the channels of y in one group.
    const Sizes w_dims = conv.transposed ? joined(conv.c, conv.m / conv.group, conv.kernel)
                                         : joined(conv.m, conv.c / conv.group, conv.kernel);
    void* const w = add_operand(kW, conv.w, w_dims, conv.w_channels_last);
    result_ = add_result(last);
    if (!x || !w || !result_) return false;
    CudnnDescriptor& operation = add(conv.transposed ? CudnnDescriptorType::kConvolutionBackwardData
                                                     : CudnnDescriptorType::kConvolutionForward);
    const auto set = [&](Attribute forward, Attribute backward, const void* descriptor) {
      operation.set(conv.transposed ? backward : forward, Type::kDescriptor, const_cast<void*>(descriptor));
    };
    set(Attribute::kForwardConvolution, Attribute::kBackwardDataConvolution, shape_raw);
    set(Attribute::kForwardX, Attribute::kBackwardDataDy, x);
    set(Attribute::kForwardW, Attribute::kBackwardDataW, w);
    set(Attribute::kForwardY, Attribute::kBackwardDataDx, result_);
    operation.set(conv.transposed ? Attribute::kBackwardDataAlpha : Attribute::kForwardAlpha, 1.0f);
    operation.set(conv.transposed ? Attribute::kBackwardDataBeta : Attribute::kForwardBeta, 0.0f);
    return finish(operation);
  }

  bool add_sum(void* operand, bool last) {
    if (!operand) return false;
    CudnnDescriptor& add_mode = add(CudnnDescriptorType::kPointwise);
    set_mode(add_mode, kPointwiseAdd);
    return add_pointwise(add_mode, operand, last);
  }

  bool add_activation(bool last) {
    CudnnDescriptor& mode = add(CudnnDescriptorType::kPointwise);
    const float alpha = convolution_.alpha, beta = convolution_.beta;
    switch (convolution_.activation) {
      case ConvolutionActivation::kNone: break;
      case ConvolutionActivation::kRelu: set_mode(mode, kPointwiseRelu); break;
      case ConvolutionActivation::kSilu: set_mode(mode, kPointwiseSwish); break;
      case ConvolutionActivation::kGelu: set_mode(mode, kPointwiseGelu); break;
      case ConvolutionActivation::kGeluTanh: set_mode(mode, kPointwiseGeluTanh); break;
      case ConvolutionActivation::kSigmoid: set_mode(mode, kPointwiseSigmoid); break;
      case ConvolutionActivation::kTanh: set_mode(mode, kPointwiseTanh); break;
      case ConvolutionActivation::kSoftplus: set_mode(mode, kPointwiseSoftplus); break;
      case ConvolutionActivation::kClip:  // alpha is the least value, beta the largest one
        set_mode(mode, kPointwiseRelu);
        mode.set(Attribute::kPointwiseReluLowerClip, std::max(alpha, std::numeric_limits<float>::lowest()));
        mode.set(Attribute::kPointwiseReluUpperClip, std::min(beta, std::numeric_limits<float>::max()));
        break;
      case ConvolutionActivation::kLeakyRelu:
        set_mode(mode, kPointwiseRelu);
        mode.set(Attribute::kPointwiseReluLowerClipSlope, alpha);
        break;
      case ConvolutionActivation::kElu:
        set_mode(mode, kPointwiseElu);
        mode.set(Attribute::kPointwiseEluAlpha, alpha);
        break;
      case ConvolutionActivation::kQuickGelu:
        set_mode(mode, kPointwiseSwish);
        mode.set(Attribute::kPointwiseSwishBeta, 1.702f);
        break;
    }
    return add_pointwise(mode, nullptr, last);
  }

  void set_mode(CudnnDescriptor& pointwise, int mode) {
    pointwise.set(Attribute::kPointwiseMode, Type::kPointwiseMode, mode);
    pointwise.set(Attribute::kPointwiseMathPrecision, Type::kDataType, int{kCudnnFloat32});
  }

  // Adds an operation whose operands are the last result and, unless it is null, `operand`.
  bool add_pointwise(CudnnDescriptor& mode, void* operand, bool last) {
    void* const mode_raw = mode.raw();
    if (!mode.finalize_if_supported()) return false;
    void* const result = add_result(last);
    if (!result) return false;
    CudnnDescriptor& operation = add(CudnnDescriptorType::kPointwiseOperation);
    operation.set(Attribute::kOperationPointwise, Type::kDescriptor, mode_raw);
    operation.set(Attribute::kOperationPointwiseX, Type::kDescriptor, result_);
    if (operand) operation.set(Attribute::kOperationPointwiseB, Type::kDescriptor, operand);
    operation.set(Attribute::kOperationPointwiseY, Type::kDescriptor, result);
    result_ = result;
    return finish(operation);
  }

  bool finish(CudnnDescriptor& operation) {
    if (!operation.finalize_if_supported()) return false;
    operations_.push_back(operation.raw());
    return true;
  }

  // Adds the convolution and its epilogue.  The residual comes before the bias, as cuDNN's precompiled engines require;
  // only they compute float32 exactly.
  bool add_operations() {
    const Convolution& conv = convolution_;
    std::vector<std::function<bool(bool)>> epilogue;
    const auto residual = [this](bool last) { return add_sum(add_residual(), last); };
    if (conv.has_residual && conv.residual_first) epilogue.emplace_back(residual);
    if (conv.has_bias) epilogue.emplace_back([this](bool last) { return add_sum(add_bias(), last); });
    if (conv.activation != ConvolutionActivation::kNone) {
      epilogue.emplace_back([this](bool last) { return add_activation(last); });
    }
    if (conv.has_residual && !conv.residual_first) epilogue.emplace_back(residual);
    if (!add_convolution(epilogue.empty())) return false;
    for (size_t i = 0; i < epilogue.size(); ++i) {
      if (!epilogue[i](i + 1 == epilogue.size())) return false;
    }
    return true;
  }

  bool add_graph(const CudnnHandle& handle) {
    CudnnDescriptor& graph = add(CudnnDescriptorType::kOperationGraph);
    graph.set(Attribute::kOperationGraphHandle, Type::kHandle, handle.get());
    graph.set(Attribute::kOperationGraphOperations, Type::kDescriptor, static_cast<int64_t>(operations_.size()),
              operations_.data());
    return graph.finalize_if_supported();
  }

  const Cudnn& cudnn_;
  const Convolution& convolution_;
  bool supported_ = false;
  int64_t next_virtual_ = kFirstVirtual;
  void* result_ = nullptr;         // the tensor that the last operation writes
  std::vector<void*> operations_;  // in the order in which they run
  std::vector<CudnnDescriptor> descriptors_;
};

// --- engines ---------------------------------------------------------------------------------------------------------

// Reads all elements of an attribute.
template <class T>
std::vector<T> read_all(const CudnnDescriptor& descriptor, Attribute attribute, Type type, int64_t max_count) {
  std::vector<T> values(static_cast<size_t>(max_count));
  values.resize(static_cast<size_t>(descriptor.get(attribute, type, max_count, values.data())));
  return values;
}

// Copies the descriptors that an attribute holds into new descriptors of the same type.
std::vector<CudnnDescriptor> read_descriptors(const Cudnn& cudnn, const CudnnDescriptor& from, Attribute attribute,
                                              CudnnDescriptorType type, int64_t max_count) {
  std::vector<CudnnDescriptor> found;
  std::vector<void*> raw;
  for (int64_t i = 0; i < max_count; ++i) raw.push_back(found.emplace_back(cudnn, type).raw());
  const int64_t count = from.get(attribute, Type::kDescriptor, max_count, raw.data());
  while (static_cast<int64_t>(found.size()) > count) found.pop_back();
  return found;
}

CudnnEngine words_of(const Cudnn& cudnn, const CudnnDescriptor& config) {
  const auto engine =
      read_descriptors(cudnn, config, Attribute::kEngineConfigEngine, CudnnDescriptorType::kEngine, 1);
  if (engine.empty()) throw std::runtime_error("cuDNN proposes a configuration without an engine");
  CudnnEngine words{engine.front().get_int64(Attribute::kEngineGlobalIndex)};
  for (const CudnnDescriptor& knob : read_descriptors(cudnn, config, Attribute::kEngineConfigKnobChoices,
                                                      CudnnDescriptorType::kKnobChoice, kMaxKnobs)) {
    int type = -1;
    knob.get(Attribute::kKnobChoiceType, Type::kKnobType, 1, &type);
    words.push_back(type);
    words.push_back(knob.get_int64(Attribute::kKnobChoiceValue));
  }
  return words;
}

// Whether results are as precise as sums in float32 or, if the convolution allows TF32, as products in TF32.
bool is_precise(const Convolution& convolution, const std::vector<int>& notes) {
  const bool exact = convolution.type == kCudnnFloat32 && !convolution.tf32;
  return std::none_of(notes.begin(), notes.end(), [&](int note) {
    // Nondeterministic engines add partial sums in the order in which blocks end, and in y's dtype.  The errors of FFT
    // and Winograd are relative to the largest of many pixels, not to each pixel.
    const bool other_sums = note == kNoteReducedPrecisionReduction || note == kNoteNondeterministic ||
                            note == kNoteFft || note == kNoteWinograd;
    return other_sums || (exact && (note == kNoteTensorCore || note == kNoteDownConvertInputs));
  });
}

// An engine with its knobs and, after add_plan, its execution plan.
struct Engine {
  std::vector<CudnnDescriptor> descriptors;  // the last is the engine's configuration or, after add_plan, the plan
  std::vector<int> notes;
  bool compiles = false;  // whether making the execution plan compiles its kernel, which takes a second or two
};

// Returns the engine that `words` name, with its knobs.  Throws std::runtime_error if cuDNN does not have the engine or
// a knob.
Engine engine_for(const Cudnn& cudnn, const CudnnDescriptor& operations, const CudnnEngine& words) {
  Engine made;
  CudnnDescriptor engine(cudnn, CudnnDescriptorType::kEngine);
  engine.set(Attribute::kEngineOperationGraph, operations);
  engine.set(Attribute::kEngineGlobalIndex, words.front());
  engine.finalize();
  made.notes = read_all<int>(engine, Attribute::kEngineNumericalNotes, Type::kNumericalNote, kMaxNotes);
  const auto behavior = read_all<int>(engine, Attribute::kEngineBehaviorNotes, Type::kBehaviorNote, kMaxNotes);
  made.compiles = std::find(behavior.begin(), behavior.end(), kNoteRuntimeCompilation) != behavior.end();
  CudnnDescriptor config(cudnn, CudnnDescriptorType::kEngineConfig);
  config.set(Attribute::kEngineConfigEngine, engine);
  std::vector<void*> knobs;
  for (size_t i = 1; i + 1 < words.size(); i += 2) {
    CudnnDescriptor knob(cudnn, CudnnDescriptorType::kKnobChoice);
    knob.set(Attribute::kKnobChoiceType, Type::kKnobType, static_cast<int>(words[i]));
    knob.set(Attribute::kKnobChoiceValue, words[i + 1]);
    knob.finalize();
    knobs.push_back(knob.raw());
    made.descriptors.push_back(std::move(knob));
  }
  if (!knobs.empty()) {
    config.set(Attribute::kEngineConfigKnobChoices, Type::kDescriptor, static_cast<int64_t>(knobs.size()),
               knobs.data());
  }
  config.finalize();
  made.descriptors.push_back(std::move(engine));
  made.descriptors.push_back(std::move(config));
  return made;
}

// Adds the engine's execution plan and returns its workspace in bytes.  Throws std::runtime_error if cuDNN cannot make
// the plan.
uint64_t add_plan(const Cudnn& cudnn, const CudnnHandle& handle, Engine& engine) {
  CudnnDescriptor plan(cudnn, CudnnDescriptorType::kExecutionPlan);
  plan.set(Attribute::kExecutionPlanHandle, Type::kHandle, handle.get());
  plan.set(Attribute::kExecutionPlanEngineConfig, engine.descriptors.back());
  plan.finalize();
  const int64_t workspace = plan.get_int64(Attribute::kExecutionPlanWorkspaceSize);
  engine.descriptors.push_back(std::move(plan));
  return static_cast<uint64_t>(std::max<int64_t>(0, workspace));
}

// Returns an engine's workspace in bytes, from its execution plan unless making the plan would compile a kernel.
// Throws std::runtime_error if cuDNN cannot make the plan.
uint64_t workspace_of(const Cudnn& cudnn, const CudnnHandle& handle, Engine& engine) {
  constexpr size_t kVersionOfConfigWorkspace = 9'02'00;
  if (!engine.compiles || cudnn.cudnnGetVersion() < kVersionOfConfigWorkspace) return add_plan(cudnn, handle, engine);
  const int64_t workspace = engine.descriptors.back().get_int64(Attribute::kEngineConfigWorkspaceSize);
  return static_cast<uint64_t>(std::max<int64_t>(0, workspace));
}

// Calls `take` for each engine that cuDNN proposes and whose results are precise enough, the best by cuDNN's own
// estimate first, until `take` returns false.  An engine for which `take` throws std::runtime_error is skipped,
// because cuDNN also proposes engines that turn out to have no execution plan.
void for_each_engine(const Cudnn& cudnn, const Convolution& convolution, const Graph& graph,
                     const std::function<bool(const CudnnEngine&, Engine)>& take) {
  std::vector<CudnnEngine> seen;
  for (const CudnnHeuristicMode mode : kHeuristicModes) {
    CudnnDescriptor heuristic(cudnn, CudnnDescriptorType::kEngineHeuristic);
    heuristic.set(Attribute::kHeuristicOperationGraph, graph.operations());
    heuristic.set(Attribute::kHeuristicMode, Type::kHeuristicMode, int{mode});
    if (!heuristic.finalize_if_supported()) continue;
    constexpr int64_t kMaxConfigs = 64;
    for (const CudnnDescriptor& config : read_descriptors(cudnn, heuristic, Attribute::kHeuristicResults,
                                                          CudnnDescriptorType::kEngineConfig, kMaxConfigs)) {
      CudnnEngine words = words_of(cudnn, config);
      if (std::find(seen.begin(), seen.end(), words) != seen.end()) continue;
      seen.push_back(words);
      try {
        Engine engine = engine_for(cudnn, graph.operations(), words);
        if (is_precise(convolution, engine.notes) && !take(words, std::move(engine))) return;
      } catch (const std::runtime_error&) {
        continue;
      }
    }
  }
}

std::vector<CudnnDescriptor> merged(Graph graph, Engine engine) {
  std::vector<CudnnDescriptor> descriptors = graph.release();
  for (CudnnDescriptor& each : engine.descriptors) descriptors.push_back(std::move(each));
  return descriptors;
}

// Makes the engine that the convolution names, with its execution plan.
Engine named_engine(const Cudnn& cudnn, const Convolution& convolution, const Graph& graph, const CudnnHandle& handle) {
  const std::string what =
      "engine " + std::to_string(convolution.engine.front()) + " of cuDNN for " + describe(convolution);
  Engine engine;
  uint64_t workspace = 0;
  try {
    engine = engine_for(cudnn, graph.operations(), convolution.engine);
    workspace = add_plan(cudnn, handle, engine);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(what + ": " + error.what());
  }
  if (!is_precise(convolution, engine.notes)) throw std::runtime_error(what + " rounds more than the plan allows");
  if (workspace > convolution.workspace_bytes) {
    throw std::runtime_error(what + " needs " + std::to_string(workspace) + " bytes of workspace, the plan has " +
                             std::to_string(convolution.workspace_bytes));
  }
  return engine;
}

// Makes the first engine that cuDNN proposes, with its execution plan.
Engine first_engine(const Cudnn& cudnn, const Convolution& convolution, const Graph& graph, const CudnnHandle& handle) {
  std::optional<Engine> found;
  for_each_engine(cudnn, convolution, graph, [&](const CudnnEngine&, Engine engine) {
    if (add_plan(cudnn, handle, engine) <= convolution.workspace_bytes) found = std::move(engine);
    return !found;
  });
  if (!found) {
    throw std::runtime_error("cuDNN has no engine for " + describe(convolution) + " within " +
                             std::to_string(convolution.workspace_bytes) + " bytes of workspace");
  }
  return std::move(*found);
}

}  // namespace

std::string describe(const Convolution& convolution) {
  const auto text = [](int64_t first, int64_t second, const Sizes& spatial) {
    std::string result = std::to_string(first) + "x" + std::to_string(second);
    for (const int64_t size : spatial) result += "x" + std::to_string(size);
    return result;
  };
  const int64_t first = convolution.transposed ? convolution.c : convolution.m;
  const int64_t second = (convolution.transposed ? convolution.m : convolution.c) / convolution.group;
  return std::string("a ") + (convolution.transposed ? "transposed " : "") + "convolution of " +
         name_of(convolution.type) + " " + text(convolution.n, convolution.c, convolution.sizes) + " and " +
         text(first, second, convolution.kernel);
}

CudnnConvolution::CudnnConvolution(const Convolution& convolution, int device, std::vector<CudnnDescriptor> plan)
    : cudnn_(Cudnn::get()), convolution_(convolution), device_(device), plan_(std::move(plan)) {}

std::unique_ptr<const CudnnConvolution> CudnnConvolution::make(const Convolution& convolution, int device) {
  const Cudnn& cudnn = Cudnn::get();
  const CudnnHandle handle(cudnn, device);
  Graph graph(cudnn, convolution, handle);
  if (!graph.supported()) throw std::runtime_error("cuDNN does not support " + describe(convolution));
  Engine engine = convolution.engine.empty() ? first_engine(cudnn, convolution, graph, handle)
                                             : named_engine(cudnn, convolution, graph, handle);
  return std::unique_ptr<const CudnnConvolution>(
      new CudnnConvolution(convolution, device, merged(std::move(graph), std::move(engine))));
}

std::vector<ProposedEngine> CudnnConvolution::engines(const Convolution& convolution, int device, int max_count) {
  const Cudnn& cudnn = Cudnn::get();
  const CudnnHandle handle(cudnn, device);
  std::vector<ProposedEngine> found;
  const Graph graph(cudnn, convolution, handle);
  if (!graph.supported() || max_count < 1) return found;
  for_each_engine(cudnn, convolution, graph, [&](const CudnnEngine& words, Engine engine) {
    const uint64_t workspace = workspace_of(cudnn, handle, engine);
    if (workspace <= convolution.workspace_bytes) found.push_back({words, workspace, engine.compiles});
    return static_cast<int>(found.size()) < max_count;
  });
  return found;
}

void CudnnConvolution::pack(const Addresses& addresses) const {
  if (pack_ && addresses == addresses_) return;
  pack_.reset();
  std::array<int64_t, kMaxTensors> ids{kX, kW, kY};
  int64_t count = 3;
  if (convolution_.has_bias) ids[count++] = kBias;
  if (convolution_.has_residual) ids[count++] = kResidual;
  CudnnDescriptor made(cudnn_, CudnnDescriptorType::kVariantPack);
  made.set(Attribute::kVariantPackUniqueIds, Type::kInt64, count, ids.data());
  made.set(Attribute::kVariantPackDataPointers, Type::kVoidPointer, count, addresses.data());
  made.set(Attribute::kVariantPackWorkspace, Type::kVoidPointer, 1, &addresses.back());
  made.finalize();
  pack_.emplace(std::move(made));
  addresses_ = addresses;
}

void CudnnConvolution::run(const Memory& memory, Stream stream) const {
  Addresses addresses{memory(convolution_.x), memory(convolution_.w), memory(convolution_.y)};
  size_t next = 3;
  if (convolution_.has_bias) addresses[next++] = memory(convolution_.bias);
  if (convolution_.has_residual) addresses[next++] = memory(convolution_.residual);
  if (convolution_.has_workspace) addresses.back() = memory(convolution_.workspace);
  const std::lock_guard<std::mutex> lock(mutex_);
  pack(addresses);
  const CudnnHandle handle(cudnn_, device_);
  const int streamed = cudnn_.cudnnSetStream(handle.get(), stream);
  if (streamed) cudnn_.check(streamed, "cudnnSetStream");
  const int code = cudnn_.cudnnBackendExecute(handle.get(), plan_.back().raw(), pack_->raw());
  if (code) cudnn_.check(code, "cudnnBackendExecute of " + describe(convolution_));
}

}  // namespace onnxfuse
