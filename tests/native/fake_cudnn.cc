// A stand-in for libcudnn 9, which refuses every descriptor and attribute that the real library would refuse, and
// computes the operations of a graph on the host.
// The functions fake_... tell tests what was called, and let calls fail.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "fake_values.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum Status {
  kSuccess = 0,
  kNotFinalized = 2004,
  kBadAttribute = 2010,
  kBadParameter = 2000,
  kUnsupported = 3000,
  kCompilationFailed = 4001,
  kExecutionFailed = 5000,
};

// --- descriptors -----------------------------------------------------------------------------------------------------

enum Kind {
  kPointwise = 0, kConvolution = 1, kEngine = 2, kEngineConfig = 3, kHeuristic = 4, kPlan = 5, kKnob = 7,
  kForward = 10, kBackwardData = 12, kPointwiseOperation = 13, kGraph = 15, kVariantPack = 16, kTensor = 17,
};
// The types of attributes.
enum Type {
  kHandle = 0, kDataType = 1, kBoolean = 2, kInt64 = 3, kFloat = 4, kVoidPointer = 6, kMode = 7, kHeuristicMode = 8,
  kKnobType = 9, kNumericalNote = 11, kPointwiseMode = 14, kDescriptor = 15, kBehaviorNote = 19,
};

size_t size_of(int type) {
  if (type == kBoolean) return 1;
  return type == kHandle || type == kInt64 || type == kVoidPointer || type == kDescriptor ? 8 : 4;
}

struct Rule {
  int kind, attribute, type;
  bool required;
};
// Attributes that may be set, from the documentation of cuDNN 9's descriptors.
const Rule kRules[] = {
    {kPointwise, 0, kPointwiseMode, true}, {kPointwise, 1, kDataType, true}, {kPointwise, 3, kFloat, false},
    {kPointwise, 4, kFloat, false}, {kPointwise, 5, kFloat, false}, {kPointwise, 6, kFloat, false},
    {kPointwise, 8, kFloat, false},
    {kConvolution, 100, kDataType, true}, {kConvolution, 101, kMode, true}, {kConvolution, 102, kInt64, true},
    {kConvolution, 103, kInt64, true}, {kConvolution, 104, kInt64, true}, {kConvolution, 105, kInt64, true},
    {kConvolution, 106, kInt64, true},
    {kHeuristic, 200, kHeuristicMode, true}, {kHeuristic, 201, kDescriptor, true},
    {kEngineConfig, 300, kDescriptor, true}, {kEngineConfig, 302, kDescriptor, false},
    {kPlan, 400, kHandle, true}, {kPlan, 401, kDescriptor, true},
    {kKnob, 600, kKnobType, true}, {kKnob, 601, kInt64, true},
    {kForward, 700, kFloat, true}, {kForward, 701, kFloat, true}, {kForward, 702, kDescriptor, true},
    {kForward, 703, kDescriptor, true}, {kForward, 704, kDescriptor, true}, {kForward, 705, kDescriptor, true},
    {kBackwardData, 706, kFloat, true}, {kBackwardData, 707, kFloat, true}, {kBackwardData, 708, kDescriptor, true},
    {kBackwardData, 709, kDescriptor, true}, {kBackwardData, 710, kDescriptor, true},
    {kBackwardData, 711, kDescriptor, true},
    {kPointwiseOperation, 750, kDescriptor, true}, {kPointwiseOperation, 751, kDescriptor, true},
    {kPointwiseOperation, 752, kDescriptor, false}, {kPointwiseOperation, 753, kDescriptor, true},
    {kGraph, 800, kHandle, true}, {kGraph, 801, kDescriptor, true},
    {kTensor, 900, kInt64, true}, {kTensor, 901, kDataType, true}, {kTensor, 902, kInt64, true},
    {kTensor, 903, kInt64, true}, {kTensor, 906, kInt64, true}, {kTensor, 907, kBoolean, false},
    {kVariantPack, 1000, kInt64, true}, {kVariantPack, 1001, kVoidPointer, true},
    {kVariantPack, 1003, kVoidPointer, true},
    {kEngine, 1300, kDescriptor, true}, {kEngine, 1301, kInt64, true},
};

struct Descriptor {
  int kind;
  bool is_final = false;
  std::map<int, std::vector<char>> values{};

  template <class T>
  std::vector<T> all(int attribute) const {
    const auto found = values.find(attribute);
    if (found == values.end()) return {};
    std::vector<T> result(found->second.size() / sizeof(T));
    std::memcpy(result.data(), found->second.data(), found->second.size());
    return result;
  }
  template <class T>
  T one(int attribute, T absent = T{}) const {
    const auto found = all<T>(attribute);
    return found.empty() ? absent : found.front();
  }
  const Descriptor& at(int attribute) const { return *static_cast<Descriptor*>(one<void*>(attribute)); }
};

// What the heuristics propose: an engine, its only knob's value, and what the engine says of itself.
struct Proposal {
  int64_t engine, knob, workspace;
  int note;  // numerical; -1 for none
  bool compiles, fails;
};
const Proposal kProposals[] = {
    {40, 1, 0, 0, false, false},      // tensor cores
    {41, 2, 1024, -1, false, false},  // exact
    {42, 3, 0, 4, false, false},      // not deterministic
    {43, 4, 0, -1, false, true},      // has no plan
    {44, 5, 0, -1, true, false},      // compiled when the plan is made
    {45, 6, 1 << 20, -1, false, false},
};
constexpr int kModes[][3] = {{3, 40, 41}, {1, 41, 42}, {2, 43, 44}};  // a heuristic's mode, and two engines that it has
constexpr int kKnobNumber = 2;

std::mutex mutex;
std::set<void*> living;  // descriptors
std::atomic<int64_t> handles{0}, made_plans{0}, runs{0}, packs{0}, unsupported{0}, fail_run{0};
std::map<void*, void*> streams;          // by handle
std::atomic<int> busy[64];               // by handle: threads that use it now
void* last_stream = nullptr;
std::vector<std::string> last_graph;     // what the last graph that ran holds, in the words of `fake_last_graph`
thread_local std::string last_error;

int fail(int status, const std::string& why) {
  last_error = why;
  return status;
}

bool known(void* descriptor) {
  std::lock_guard<std::mutex> lock(mutex);
  return living.count(descriptor) != 0;
}

const Proposal* proposal_of(int64_t engine) {
  for (const Proposal& each : kProposals) {
    if (each.engine == engine) return &each;
  }
  return nullptr;
}

// --- values ----------------------------------------------------------------------------------------------------------

// A tensor of at most five dimensions: N, C, and one to three spatial axes, those in front of them of size 1.
struct Tensor {
  int64_t dims[5], strides[5];
  int type;
  char* data;
  std::vector<float> own;  // of a virtual tensor

  explicit Tensor(const Descriptor& of) : type(of.one<int>(901)), data(nullptr) {
    const auto d = of.all<int64_t>(902), s = of.all<int64_t>(903);
    const size_t gap = 5 - d.size();
    for (size_t i = 0; i < 5; ++i) {
      const bool is_gap = i >= 2 && i < 2 + gap;
      const size_t from = i < 2 ? i : i - gap;
      dims[i] = is_gap ? 1 : d[from];
      strides[i] = is_gap ? 0 : s[from];
    }
  }
  int64_t span() const {
    int64_t last = 0;
    for (int i = 0; i < 5; ++i) last += (dims[i] - 1) * strides[i];
    return last + 1;
  }
  int64_t offset(const int64_t* at) const {
    int64_t sum = 0;
    for (int i = 0; i < 5; ++i) sum += (dims[i] == 1 ? 0 : at[i]) * strides[i];  // size 1 is broadcast
    return sum;
  }
  float load(const int64_t* at) const { return load_value(data, type, offset(at)); }
  void store(const int64_t* at, float value) { store_value(data, type, offset(at), value); }
};

template <class Body>
void for_each(const int64_t* dims, Body body) {
  int64_t at[5];
  for (at[0] = 0; at[0] < dims[0]; ++at[0])
    for (at[1] = 0; at[1] < dims[1]; ++at[1])
      for (at[2] = 0; at[2] < dims[2]; ++at[2])
        for (at[3] = 0; at[3] < dims[3]; ++at[3])
          for (at[4] = 0; at[4] < dims[4]; ++at[4]) body(at);
}

struct Shape {
  int64_t stride[3] = {1, 1, 1}, dilation[3] = {1, 1, 1}, pad[3] = {0, 0, 0};
  explicit Shape(const Descriptor& of) {
    const auto s = of.all<int64_t>(103), d = of.all<int64_t>(102), p = of.all<int64_t>(105);
    for (size_t i = 0; i < s.size(); ++i) {
      const size_t to = i + 3 - s.size();
      stride[to] = s[i], dilation[to] = d[i], pad[to] = p[i];
    }
  }
};

// Calls body(index of y, index of w, index of x) for every product of a convolution that lies inside x.
template <class Body>
void for_each_product(const Shape& shape, const Tensor& x, const Tensor& w, const Tensor& y, Body body) {
  const int64_t groups = x.dims[1] / w.dims[1];
  for_each(y.dims, [&](const int64_t* to) {
    const int64_t window[5] = {1, w.dims[1], w.dims[2], w.dims[3], w.dims[4]};
    for_each(window, [&](const int64_t* tap) {
      const int64_t group = to[1] / (w.dims[0] / groups);
      const int64_t weight[5] = {to[1], tap[1], tap[2], tap[3], tap[4]};
      int64_t from[5] = {to[0], group * w.dims[1] + tap[1]};
      for (int i = 0; i < 3; ++i) {
        from[2 + i] = to[2 + i] * shape.stride[i] - shape.pad[i] + tap[2 + i] * shape.dilation[i];
        if (from[2 + i] < 0 || from[2 + i] >= x.dims[2 + i]) return;
      }
      body(to, weight, from);
    });
  });
}

float activate(const Descriptor& mode, float x) {
  switch (mode.one<int>(0)) {
    case 100: {
      const float low = mode.one<float>(3, 0.0f), high = mode.one<float>(4, INFINITY), slope = mode.one<float>(5, 0.0f);
      return x < low ? low + slope * (x - low) : x > high ? high : x;
    }
    case 101: return std::tanh(x);
    case 102: return 1 / (1 + std::exp(-x));
    case 103: return x < 0 ? mode.one<float>(6, 1.0f) * std::expm1(x) : x;
    case 104: return 0.5f * x * std::erfc(-x / std::sqrt(2.0f));
    case 105: return std::log1p(std::exp(x));
    case 106: return x / (1 + std::exp(-mode.one<float>(8, 1.0f) * x));
    case 107: return 0.5f * x * (1 + std::tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
    default: return NAN;
  }
}

// Computes the operations of a graph in order.
void compute(const Descriptor& graph, const Descriptor& pack) {
  const auto ids = pack.all<int64_t>(1000);
  const auto pointers = pack.all<void*>(1001);
  std::map<int64_t, Tensor> tensors;
  const auto tensor = [&](const Descriptor& of) -> Tensor& {
    const auto id = of.one<int64_t>(906);
    const auto found = tensors.find(id);
    if (found != tensors.end()) return found->second;
    Tensor& made = tensors.emplace(id, Tensor(of)).first->second;
    if (of.one<char>(907)) {
      made.own.resize(static_cast<size_t>(made.span()));
      made.data = reinterpret_cast<char*>(made.own.data());
    } else {
      const auto index = static_cast<size_t>(std::find(ids.begin(), ids.end(), id) - ids.begin());
      made.data = static_cast<char*>(pointers.at(index));
    }
    return made;
  };
  std::vector<std::string> words;
  for (void* raw : graph.all<void*>(801)) {
    const Descriptor& op = *static_cast<Descriptor*>(raw);
    if (op.kind == kForward || op.kind == kBackwardData) {
      const bool forward = op.kind == kForward;
      const Shape shape(op.at(forward ? 702 : 708));
      Tensor &w = tensor(op.at(forward ? 703 : 709)), &x = tensor(op.at(forward ? 704 : 710)),
             &y = tensor(op.at(forward ? 705 : 711));
      Tensor& to = forward ? y : x;
      Tensor sums = to;
      sums.type = 0;
      sums.own.assign(static_cast<size_t>(sums.span()), 0.0f);
      sums.data = reinterpret_cast<char*>(sums.own.data());
      for_each_product(shape, x, w, y, [&](const int64_t* out, const int64_t* weight, const int64_t* in) {
        const int64_t* at = forward ? out : in;
        sums.store(at, sums.load(at) + w.load(weight) * (forward ? x.load(in) : y.load(out)));
      });
      for_each(to.dims, [&](const int64_t* at) { to.store(at, sums.load(at)); });
      words.push_back(forward ? "forward" : "backward_data");
    } else {
      const Descriptor& mode = op.at(750);
      Tensor &x = tensor(op.at(751)), &y = tensor(op.at(753));
      const bool is_add = mode.one<int>(0) == 0;
      Tensor* b = is_add ? &tensor(op.at(752)) : nullptr;
      for_each(y.dims, [&](const int64_t* at) {
        y.store(at, is_add ? x.load(at) + b->load(at) : activate(mode, x.load(at)));
      });
      words.push_back(is_add ? "add " + std::to_string(op.at(752).one<int64_t>(906))
                             : "pointwise " + std::to_string(mode.one<int>(0)));
    }
  }
  std::lock_guard<std::mutex> lock(mutex);
  last_graph = words;
}

// --- finalization ----------------------------------------------------------------------------------------------------

int finalize_tensor(const Descriptor& d) {
  const auto dims = d.all<int64_t>(902), strides = d.all<int64_t>(903);
  const int type = d.one<int>(901);
  const int64_t alignment = d.one<int64_t>(900), element = type == 0 ? 4 : 2;
  if (type != 0 && type != 2 && type != 9) return fail(kUnsupported, "a tensor of an unknown dtype");
  if (dims.size() != strides.size()) return fail(kBadParameter, "dims and strides differ in number");
  if (dims.size() < 4 || dims.size() > 5) return fail(kUnsupported, "a tensor of neither 4 nor 5 dims");
  for (size_t i = 0; i < dims.size(); ++i) {
    if (dims[i] < 1 || strides[i] < 1) return fail(kBadParameter, "a dim or stride is not positive");
  }
  if (alignment % element || (alignment & (alignment - 1))) return fail(kBadParameter, "the alignment is odd");
  return kSuccess;
}

int finalize_convolution(const Descriptor& d) {
  const auto axes = static_cast<size_t>(d.one<int64_t>(106));
  for (const int attribute : {102, 103, 104, 105}) {
    if (d.all<int64_t>(attribute).size() != axes) return fail(kBadParameter, "not one number for each spatial axis");
  }
  if (d.one<int>(100) != 0) return fail(kUnsupported, "sums are not in float32");
  if (d.one<int>(101) != 1) return fail(kBadParameter, "not a cross-correlation");
  return axes == 2 || axes == 3 ? kSuccess : fail(kUnsupported, "neither two nor three spatial axes");
}

int finalize_filter_operation(const Descriptor& d) {
  const bool forward = d.kind == kForward;
  const Descriptor& shape = d.at(forward ? 702 : 708);
  const auto w = d.at(forward ? 703 : 709).all<int64_t>(902), x = d.at(forward ? 704 : 710).all<int64_t>(902),
             y = d.at(forward ? 705 : 711).all<int64_t>(902);
  const auto strides = shape.all<int64_t>(103), dilations = shape.all<int64_t>(102), begin = shape.all<int64_t>(105),
             end = shape.all<int64_t>(104);
  if (w.size() != x.size() || w.size() != y.size() || strides.size() + 2 != x.size()) {
    return fail(kBadParameter, "tensors differ in rank");
  }
  if (x[0] != y[0] || y[1] != w[0] || x[1] % w[1]) return fail(kBadParameter, "channels or batch do not fit");
  for (size_t i = 0; i < strides.size(); ++i) {
    const int64_t size = x[i + 2] + begin[i] + end[i] - (w[i + 2] - 1) * dilations[i] - 1;
    if (size < 0 || size / strides[i] + 1 != y[i + 2]) return fail(kBadParameter, "the output's size does not fit");
  }
  const bool scaled = d.one<float>(forward ? 700 : 706) != 1 || d.one<float>(forward ? 701 : 707) != 0;
  return scaled ? fail(kUnsupported, "alpha is not 1, or beta not 0") : kSuccess;
}

int finalize_pointwise_operation(const Descriptor& d) {
  const bool is_add = d.at(750).one<int>(0) == 0;
  if (is_add != (d.values.count(752) != 0)) return fail(kBadParameter, "an operand too many or too few");
  const auto x = d.at(751).all<int64_t>(902), y = d.at(753).all<int64_t>(902);
  if (x != y) return fail(kBadParameter, "x and y differ in shape");
  if (!is_add) return kSuccess;
  const auto b = d.at(752).all<int64_t>(902);
  for (size_t i = 0; i < b.size(); ++i) {
    if (b[i] != 1 && b[i] != y[i]) return fail(kBadParameter, "b cannot be broadcast");
  }
  return kSuccess;
}

// Every operation reads what an earlier one wrote, and the last one alone writes memory.
int finalize_graph(const Descriptor& d) {
  if (unsupported) return fail(kUnsupported, "the stand-in was told so");
  const auto operations = d.all<void*>(801);
  std::set<int64_t> written;
  for (size_t i = 0; i < operations.size(); ++i) {
    const Descriptor& op = *static_cast<Descriptor*>(operations[i]);
    const std::map<int, int> results{{kForward, 705}, {kBackwardData, 710}, {kPointwiseOperation, 753}};
    const auto found = results.find(op.kind);
    const int to = found == results.end() ? 0 : found->second;
    if (!to) return fail(kBadParameter, "no operation");
    const Descriptor& y = op.at(to);
    const bool is_virtual = y.one<char>(907) != 0;
    if (is_virtual == (i + 1 == operations.size())) return fail(kUnsupported, "a virtual tensor is at fault");
    if (is_virtual && y.one<int>(901) != 0) return fail(kUnsupported, "a virtual tensor is not float32");
    if (op.kind == kPointwiseOperation && !written.count(op.at(751).one<int64_t>(906))) {
      return fail(kUnsupported, "an operation reads what none wrote");
    }
    if (!written.insert(y.one<int64_t>(906)).second) return fail(kBadParameter, "a tensor is written twice");
  }
  return kSuccess;
}

int finalize_engine_config(const Descriptor& d) {
  const int64_t index = d.at(300).one<int64_t>(1301);
  for (void* raw : d.all<void*>(302)) {
    const Descriptor& knob = *static_cast<Descriptor*>(raw);
    if (knob.one<int>(600) != kKnobNumber || knob.one<int64_t>(601) != proposal_of(index)->knob) {
      return fail(kUnsupported, "a knob that the engine does not have");
    }
  }
  return kSuccess;
}

int finalize_plan(const Descriptor& d) {
  ++made_plans;
  const Proposal* found = proposal_of(d.at(401).at(300).one<int64_t>(1301));
  return found->fails ? fail(kCompilationFailed, "the stand-in's engine 43 has no plan") : kSuccess;
}

int finalize_variant_pack(const Descriptor& d) {
  ++packs;
  if (d.all<int64_t>(1000).size() != d.all<void*>(1001).size()) return fail(kBadParameter, "ids without pointers");
  return kSuccess;
}

int check_final(const Descriptor& d) {
  switch (d.kind) {
    case kTensor: return finalize_tensor(d);
    case kConvolution: return finalize_convolution(d);
    case kForward:
    case kBackwardData: return finalize_filter_operation(d);
    case kPointwiseOperation: return finalize_pointwise_operation(d);
    case kGraph: return finalize_graph(d);
    case kEngine: return proposal_of(d.one<int64_t>(1301)) ? kSuccess : fail(kUnsupported, "no such engine");
    case kEngineConfig: return finalize_engine_config(d);
    case kPlan: return finalize_plan(d);
    case kVariantPack: return finalize_variant_pack(d);
    default: return kSuccess;
  }
}

// --- attributes that are read ----------------------------------------------------------------------------------------

template <class T>
int give(const std::vector<T>& values, int64_t room, int64_t* count, void* elements) {
  *count = static_cast<int64_t>(values.size());
  const auto copied = static_cast<size_t>(std::min(room, *count));
  if (copied) std::memcpy(elements, values.data(), copied * sizeof(T));
  return kSuccess;
}

void put(Descriptor& d, int attribute, const void* value, size_t size) {
  d.values[attribute].assign(static_cast<const char*>(value), static_cast<const char*>(value) + size);
}

// Fills the descriptors of `elements`, which the caller has made, as the real library does.
int get_descriptors(const Descriptor& d, int attribute, int64_t room, int64_t* count, void** elements) {
  std::vector<int64_t> engines;
  if (d.kind == kHeuristic && attribute == 202) {
    for (const auto& mode : kModes) {
      if (mode[0] == d.one<int>(200)) engines.assign({mode[1], mode[2]});
    }
    *count = static_cast<int64_t>(engines.size());
    for (int64_t i = 0; i < std::min(room, *count); ++i) {
      auto& config = *static_cast<Descriptor*>(elements[i]);
      if (config.kind != kEngineConfig) return fail(kBadParameter, "a result is no engine configuration");
      put(config, -1, &engines[static_cast<size_t>(i)], 8);
      config.is_final = true;
    }
    return kSuccess;
  }
  if (d.kind != kEngineConfig || (attribute != 300 && attribute != 302)) return fail(kBadAttribute, "no such result");
  *count = 1;
  if (room < 1) return kSuccess;
  auto& result = *static_cast<Descriptor*>(elements[0]);
  const auto engine = d.one<int64_t>(-1);
  result.is_final = true;
  if (attribute == 300) {
    if (result.kind != kEngine) return fail(kBadParameter, "a result is no engine");
    put(result, 1301, &engine, 8);
    return kSuccess;
  }
  if (result.kind != kKnob) return fail(kBadParameter, "a result is no knob");
  const int type = kKnobNumber;
  put(result, 600, &type, 4);
  put(result, 601, &proposal_of(engine)->knob, 8);
  return kSuccess;
}

struct Busy {
  explicit Busy(void* handle) : users(busy[reinterpret_cast<uintptr_t>(handle) % 64]) { alone = ++users == 1; }
  ~Busy() { --users; }
  std::atomic<int>& users;
  bool alone;
};

}  // namespace

#ifndef VERSION
#define VERSION 9'19'00
#endif
EXPORT size_t cudnnGetVersion() { return VERSION; }
EXPORT const char* cudnnGetErrorString(int status) {
  return status == kUnsupported ? "CUDNN_STATUS_NOT_SUPPORTED" : status == kBadParameter ? "CUDNN_STATUS_BAD_PARAM"
         : status == kCompilationFailed ? "CUDNN_STATUS_INTERNAL_ERROR_COMPILATION_FAILED"
         : status == kExecutionFailed ? "CUDNN_STATUS_EXECUTION_FAILED" : nullptr;
}
EXPORT void cudnnGetLastErrorString(char* message, size_t size) {
  std::snprintf(message, size, "%s", last_error.c_str());
}
EXPORT int cudnnCreate(void** handle) {
  *handle = reinterpret_cast<void*>(++handles);
  return kSuccess;
}
EXPORT int cudnnSetStream(void* handle, void* stream) {
  const Busy user(handle);
  if (!user.alone) return fail(kBadParameter, "two threads use one handle");
  std::lock_guard<std::mutex> lock(mutex);
  streams[handle] = stream;
  return kSuccess;
}
EXPORT int cudnnBackendCreateDescriptor(int kind, void** descriptor) {
  bool exists = false;
  for (const Rule& rule : kRules) exists = exists || rule.kind == kind;
  if (!exists) return fail(kBadParameter, "no such descriptor");
  *descriptor = new Descriptor{kind};
  std::lock_guard<std::mutex> lock(mutex);
  living.insert(*descriptor);
  return kSuccess;
}
EXPORT int cudnnBackendDestroyDescriptor(void* descriptor) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (!living.erase(descriptor)) return fail(kBadParameter, "no descriptor");
  }
  delete static_cast<Descriptor*>(descriptor);
  return kSuccess;
}
EXPORT int cudnnBackendSetAttribute(void* descriptor, int attribute, int type, int64_t count, const void* elements) {
  if (!known(descriptor)) return fail(kBadParameter, "no descriptor");
  auto& d = *static_cast<Descriptor*>(descriptor);
  if (d.is_final) return fail(kBadParameter, "the descriptor is finalized already");
  for (const Rule& rule : kRules) {
    if (rule.kind != d.kind || rule.attribute != attribute) continue;
    if (rule.type != type) return fail(kBadAttribute, "an attribute of another type");
    if (count < 1) return fail(kBadParameter, "an attribute without elements");
    if (type == kDescriptor) {
      for (int64_t i = 0; i < count; ++i) {
        auto* other = static_cast<Descriptor*>(static_cast<void* const*>(elements)[i]);
        if (!known(other)) return fail(kBadParameter, "no descriptor");
        if (!other->is_final) return fail(kNotFinalized, "a descriptor that is not finalized");
      }
    }
    put(d, attribute, elements, static_cast<size_t>(count) * size_of(type));
    return kSuccess;
  }
  return fail(kBadAttribute, "the descriptor has no such attribute");
}
EXPORT int cudnnBackendFinalize(void* descriptor) {
  if (!known(descriptor)) return fail(kBadParameter, "no descriptor");
  auto& d = *static_cast<Descriptor*>(descriptor);
  for (const Rule& rule : kRules) {
    if (rule.kind == d.kind && rule.required && !d.values.count(rule.attribute)) {
      return fail(kBadParameter, "attribute " + std::to_string(rule.attribute) + " is missing");
    }
  }
  const int status = check_final(d);
  d.is_final = status == kSuccess;
  return status;
}
EXPORT int cudnnBackendGetAttribute(void* descriptor, int attribute, int type, int64_t room, int64_t* count,
                                    void* elements) {
  if (!known(descriptor)) return fail(kBadParameter, "no descriptor");
  const auto& d = *static_cast<Descriptor*>(descriptor);
  if (!d.is_final) return fail(kNotFinalized, "the descriptor is not finalized");
  if (type == kDescriptor) return get_descriptors(d, attribute, room, count, static_cast<void**>(elements));
  const bool is_knob = d.kind == kKnob;
  if ((is_knob && attribute == 601 && type == kInt64) || (d.kind == kEngine && attribute == 1301 && type == kInt64)) {
    return give(d.all<int64_t>(attribute), room, count, elements);
  }
  if (is_knob && attribute == 600 && type == kKnobType) return give(d.all<int>(600), room, count, elements);
  if (d.kind == kEngine && attribute == 1303 && type == kNumericalNote) {
    const int note = proposal_of(d.one<int64_t>(1301))->note;
    return give(note < 0 ? std::vector<int>{} : std::vector<int>{note}, room, count, elements);
  }
  if (d.kind == kEngine && attribute == 1305 && type == kBehaviorNote) {
    const bool compiles = proposal_of(d.one<int64_t>(1301))->compiles;
    return give(compiles ? std::vector<int>{0} : std::vector<int>{}, room, count, elements);
  }
  if (((d.kind == kEngineConfig && attribute == 303) || (d.kind == kPlan && attribute == 402)) && type == kInt64) {
    const Descriptor& config = d.kind == kPlan ? d.at(401) : d;
    return give(std::vector<int64_t>{proposal_of(config.at(300).one<int64_t>(1301))->workspace}, room, count, elements);
  }
  return fail(kBadAttribute, "the descriptor has no such result");
}
EXPORT int cudnnBackendExecute(void* handle, void* plan, void* pack) {
  const Busy user(handle);
  if (!user.alone) return fail(kBadParameter, "two threads use one handle");
  if (fail_run.exchange(0)) return fail(kExecutionFailed, "the stand-in was told so");
  if (!known(plan) || !known(pack)) return fail(kBadParameter, "no descriptor");
  const auto &p = *static_cast<Descriptor*>(plan), &v = *static_cast<Descriptor*>(pack);
  if (p.kind != kPlan || v.kind != kVariantPack || !p.is_final || !v.is_final) return fail(kBadParameter, "no plan");
  const Descriptor& engine = p.at(401).at(300);
  const int64_t workspace = proposal_of(engine.one<int64_t>(1301))->workspace;
  // The real library requires an alignment of 256 bytes; onnxruntime's allocator for the CPU aligns to 64.
  auto* memory = v.one<char*>(1003);
  if (workspace && (!memory || reinterpret_cast<uintptr_t>(memory) % 64)) return fail(kBadParameter, "no workspace");
  if (workspace) std::memset(memory, 0xEE, static_cast<size_t>(workspace));
  compute(engine.at(1300), v);
  ++runs;
  std::lock_guard<std::mutex> lock(mutex);
  last_stream = streams[handle];
  return kSuccess;
}

EXPORT int64_t fake_runs() { return runs; }
EXPORT int64_t fake_handles() { return handles; }
EXPORT int64_t fake_plans() { return made_plans; }
EXPORT int64_t fake_packs() { return packs; }
EXPORT int64_t fake_descriptors() {
  std::lock_guard<std::mutex> lock(mutex);
  return static_cast<int64_t>(living.size());
}
EXPORT void* fake_last_stream() { return last_stream; }
// Lets graphs be unsupported, or supported again.
EXPORT void fake_unsupported(int on) { unsupported = on; }
EXPORT void fake_fail_next_run() { fail_run = 1; }
// Writes the operations of the last graph that ran, such as "forward, add 5, pointwise 100"; a number is the operand's.
EXPORT void fake_last_graph(char* out, size_t size) {
  std::lock_guard<std::mutex> lock(mutex);
  std::string text;
  for (const std::string& word : last_graph) text += (text.empty() ? "" : ", ") + word;
  std::snprintf(out, size, "%s", text.c_str());
}
