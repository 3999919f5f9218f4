// Running a fused node: read its inputs, find or make the plan, allocate its outputs, start its steps.
#include "kernel.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>

#include "body_session.h"
#include "profiler.h"
#include "run_steps.h"
#include "utf8.h"

namespace onnxfuse {
namespace {

std::atomic<uint64_t> next_id{1};
std::atomic<int64_t> alive_count{0};
std::atomic<uint64_t> first_expecting{UINT64_MAX};  // see expect_templates

// The nodes of all sessions by number.  Code that uses a node from outside the node's session must hold the mutex.
struct Nodes {
  std::mutex mutex;
  std::map<uint64_t, FusedKernel*> by_id;
};
Nodes& nodes() {
  static auto* nodes = new Nodes();  // never deleted: sessions may outlive static objects
  return *nodes;
}

// The sessions that run bodies, which nodes with equal identities share.
struct Bodies {
  using Where = std::pair<std::string, BodyKey>;
  std::mutex mutex;
  std::map<Where, std::weak_ptr<BodySession>> known;

  std::shared_ptr<BodySession> find(const Where& where) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = known.find(where);
    return found == known.end() ? nullptr : found->second.lock();
  }

  void add(const Where& where, const std::shared_ptr<BodySession>& body) {
    const std::lock_guard<std::mutex> lock(mutex);
    for (auto each = known.begin(); each != known.end();) each = each->second.expired() ? known.erase(each) : ++each;
    known[where] = body;
  }
};
Bodies& bodies() {
  static auto* bodies = new Bodies();  // never deleted: sessions may outlive static objects
  return *bodies;
}


// Returns for each input whether the model holds its values.  If onnxruntime reports an error about an input, the input
// counts as computed, because plans for computed inputs are also correct for constants.  The values are not read: they
// may be on the GPU.
std::vector<bool> constants_of(const Ort& ort, const OrtKernelInfo* info) {
  size_t count = 0;
  check(ort, ort.KernelInfo_GetInputCount(info, &count));
  std::vector<bool> constants(count);
  for (size_t i = 0; i < count; ++i) {
    int is_constant = 0;
    const OrtValue* value = nullptr;
    OrtStatus* status = ort.KernelInfoGetConstantInput_tensor(info, i, &is_constant, &value);
    constants[i] = !status && is_constant;
    if (status) ort.ReleaseStatus(status);
  }
  return constants;
}

void log_warning(const Ort& ort, const OrtLogger* logger, const std::string& text) {
  check(ort, ort.Logger_LogMessage(logger, kLogWarning, utf8(text).c_str(), __FILE__, __LINE__, __func__));
}

void log_warning(const Ort& ort, const OrtKernelInfo* info, const std::string& text) {
  const OrtLogger* logger = nullptr;
  check(ort, ort.KernelInfo_GetLogger(info, &logger));
  log_warning(ort, logger, text);
}

// Logs once that runs have no NVTX ranges although a profiler is attached.
void log_missing_ranges(const Ort& ort, const OrtKernelInfo* info) {
  static std::atomic<bool> told{false};
  if (const std::string why = missing_ranges(); !why.empty() && !told.exchange(true)) {
    log_warning(ort, info, "onnxfuse: " + why);
  }
}

// Logs to onnxruntime, once for each file and GPU, that the plans were made for GPUs of another kind.
void log_other_kind(const Ort& ort, const OrtKernelInfo* info, const PlanFile& file, int device,
                    const DeviceKind& here) {
  static auto* mutex = new std::mutex();  // never deleted: sessions may outlive static objects
  static auto* told = new std::set<std::pair<const PlanFile*, int>>();
  const std::optional<size_t> used = file.kind_for(here);
  if (!used || file.devices[*used] == here) return;
  const std::lock_guard<std::mutex> lock(*mutex);
  if (!told->insert({&file, device}).second) return;
  const std::string text = "onnxfuse: plan file " + file.path + " was made for " + describe(file.devices[*used]) +
                           ", this GPU is " + describe(here) + "; its plans are right, but may not be the fastest";
  log_warning(ort, info, text);
}

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kAlignment == 0; }

// Appends the words of a tensor to a key.
void add_tensor(const Ort& ort, const OrtValue* value, int64_t flags, Key& key) {
  int dtype = 0;
  size_t rank = 0;
  if (ort.GetTensorElementTypeAndShapeDataReference) {
    const int64_t* shape = nullptr;
    check(ort, ort.GetTensorElementTypeAndShapeDataReference(value, &dtype, &shape, &rank));
    key.insert(key.end(), {dtype, flags, static_cast<int64_t>(rank)});
    key.insert(key.end(), shape, shape + rank);
    return;
  }
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(ort, ort.GetTensorTypeAndShape(value, &info));
  OrtStatus* status = ort.GetTensorElementType(info, &dtype);
  if (!status) status = ort.GetDimensionsCount(info, &rank);
  if (!status) {
    key.insert(key.end(), {dtype, flags, static_cast<int64_t>(rank)});
    key.resize(key.size() + rank);
    status = ort.GetDimensions(info, key.data() + key.size() - rank, rank);
  }
  ort.ReleaseTensorTypeAndShapeInfo(info);
  check(ort, status);
}

// The tensors of one run.
struct Tensors {
  Key key;
  std::vector<const OrtValue*> values;  // the inputs
  std::vector<void*> inputs, outputs;

  void read_inputs(const Ort& ort, const OrtKernelContext* context, const std::vector<bool>& constants,
                   const std::vector<size_t>& numbers) {
    size_t count = 0;
    check(ort, ort.KernelContext_GetInputCount(context, &count));
    for (size_t i = 0; i < count; ++i) {
      const OrtValue* value = nullptr;
      check(ort, ort.KernelContext_GetInput(context, i, &value));
      if (!value) throw std::runtime_error("input " + std::to_string(i) + " is absent; leave absent operands out");
      void* pointer = nullptr;
      check(ort, ort.GetTensorMutableData(const_cast<OrtValue*>(value), &pointer));
      values.push_back(value);
      inputs.push_back(pointer);
      const int64_t constant = kIsConstant * (i < constants.size() && constants[i]);
      if (std::binary_search(numbers.begin(), numbers.end(), i)) add_number(ort, value, pointer, constant);
      else add_tensor(ort, value, kAligned * aligned(pointer) | constant, key);
    }
  }

  // Returns whether any output has elements, and whether all outputs are aligned.
  std::pair<bool, bool> make_outputs(const Ort& ort, OrtKernelContext* context, const std::vector<TensorType>& types) {
    bool any = false, all_aligned = true;
    for (const TensorType& type : types) {
      OrtValue* value = nullptr;
      void* pointer = nullptr;
      check(ort, ort.KernelContext_GetOutput(context, outputs.size(), type.shape.data(), type.shape.size(), &value));
      if (!value) throw std::runtime_error("output " + std::to_string(outputs.size()) + " is absent");
      check(ort, ort.GetTensorMutableData(value, &pointer));
      any = any || type.bytes() != 0;
      all_aligned = all_aligned && aligned(pointer);
      outputs.push_back(pointer);
    }
    return {any, all_aligned};
  }

 private:
  // Appends an int32 n from host memory to the key, as if it were a tensor of shape [n].
  void add_number(const Ort& ort, const OrtValue* value, const void* pointer, int64_t flags) {
    const size_t start = key.size();
    add_tensor(ort, value, 0, key);
    const auto dims = key.begin() + static_cast<std::ptrdiff_t>(start) + 3;
    if (key[start] != kInt32 || std::any_of(dims, key.end(), [](int64_t dim) { return dim != 1; })) {
      throw std::runtime_error("input " + std::to_string(inputs.size() - 1) + " is not one int32");
    }
    key.resize(start);
    key.insert(key.end(), {kInt32, kAligned | flags, 1, *static_cast<const int32_t*>(pointer)});
  }
};

// A thread's Tensors; the thread's next run reuses their memory.  Python may start a run while it plans for another run
// of the same thread; the inner run gets Tensors of its own.
class ReusedTensors {
 public:
  ReusedTensors() {
    std::swap(tensors, spare());
    tensors.key.clear();
    tensors.values.clear();
    tensors.inputs.clear();
    tensors.outputs.clear();
  }
  ~ReusedTensors() { std::swap(tensors, spare()); }
  ReusedTensors(const ReusedTensors&) = delete;
  ReusedTensors& operator=(const ReusedTensors&) = delete;
  Tensors tensors;

 private:
  static Tensors& spare() {
    thread_local Tensors spare;
    return spare;
  }
};

constexpr size_t kMaxInputsForNow = 1024;  // maximum size of FusedKernel::for_now_

// Returns the key with all inputs marked as unaligned.  The plan for such inputs can also write unaligned outputs.
Key without_alignment(Key key) {
  for (size_t at = 0; at + 2 < key.size(); at += 3 + static_cast<size_t>(key[at + 2])) key[at + 1] &= ~kAligned;
  return key;
}

// Scratch memory from onnxruntime's arena, for the work that this run starts on its stream.  It is freed when this
// object is deleted.
class Scratch {
 public:
  Scratch(const Ort& ort, OrtKernelContext* context, OrtAllocator* allocator, const OrtMemoryInfo* memory, size_t bytes)
      : ort_(ort), allocator_(allocator) {
    if (bytes) check(ort, ort.KernelContext_GetScratchBuffer(context, memory, bytes, &data));
  }
  ~Scratch() {
    if (!data) return;
    if (OrtStatus* status = ort_.AllocatorFree(allocator_, data)) ort_.ReleaseStatus(status);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* data = nullptr;

 private:
  const Ort& ort_;
  OrtAllocator* allocator_;
};

}  // namespace

void check(const Ort& ort, OrtStatus* status) {
  if (!status) return;
  const std::string message = ort.GetErrorMessage(status);
  ort.ReleaseStatus(status);
  throw std::runtime_error(message);
}

FusedKernel::FusedKernel(const Ort& ort, const OrtKernelInfo* info, std::string op, const Setup& setup,
                         const std::vector<AttributeName>& names, const std::vector<size_t>& numbers)
    : ort_(ort), driver_(Driver::get()), id_(next_id++), op_(std::move(op)), setup_(setup), numbers_(numbers) {
  read_node(info);
  log_missing_ranges(ort, info);
  if (setup.asks_python) attributes_ = read_attributes(ort, info, names);
  check(ort, ort.KernelInfoGetAllocator(info, 0, &allocator_));
  try {
    check(ort, ort.AllocatorGetInfo(allocator_, &memory_));
    check(ort, ort.MemoryInfoGetId(memory_, &device_));
    take_templates(info, names);
  } catch (...) {
    ort.ReleaseAllocator(allocator_);
    throw;
  }
  ++alive_count;
  const std::lock_guard<std::mutex> lock(nodes().mutex);
  nodes().by_id[id_] = this;
}

void FusedKernel::read_node(const OrtKernelInfo* info) {
  size_t size = 0;
  check(ort_, ort_.KernelInfo_GetNodeName(info, nullptr, &size));
  node_.resize(size);
  check(ort_, ort_.KernelInfo_GetNodeName(info, node_.data(), &size));
  node_.resize(std::strlen(node_.c_str()));
  constants_ = constants_of(ort_, info);
  size_t outputs = 0;
  if (OrtStatus* status = ort_.KernelInfoGetAttributeArray_int64(info, "output_types", nullptr, &outputs)) {
    ort_.ReleaseStatus(status);
    throw std::runtime_error("the attribute output_types (the dtypes of the outputs) is missing or no list of ints");
  }
  output_dtypes_.resize(outputs);
  if (outputs) {
    check(ort_, ort_.KernelInfoGetAttributeArray_int64(info, "output_types", output_dtypes_.data(), &outputs));
  }
}

void FusedKernel::take_templates(const OrtKernelInfo* info, const std::vector<AttributeName>& names) {
  if (setup_.files.empty()) return;
  try {
    given_ = given_templates(setup_.files, node_identity(ort_, info, names), output_dtypes_, device_);
    const DeviceKind kind = driver_.kind_of(device_);
    if (given_.empty() && !setup_.asks_python) {
      throw std::runtime_error("plan files have no template of it for " + onnxfuse::describe(kind) + ": " +
                               onnxfuse::describe(setup_.files) + "; make them again for this model and GPU, or do not "
                               "register the library, so that bodies run");
    }
    for (const auto& file : setup_.files) log_other_kind(ort_, info, *file, device_, kind);
  } catch (const std::exception& error) {
    throw std::runtime_error("node '" + node_ + "': " + error.what());
  }
}

FusedKernel::~FusedKernel() {
  {
    const std::lock_guard<std::mutex> lock(nodes().mutex);
    nodes().by_id.erase(id_);
  }
  const RelaxedCapture relaxed(driver_);
  bodies_.clear();
  if (setup_.asks_python) tell_dropped(id_);
  ort_.ReleaseAllocator(allocator_);
  --alive_count;
}

int64_t FusedKernel::alive() { return alive_count; }

std::string FusedKernel::describe(const Key* key) const {
  std::string text = op_ + " '" + node_ + "'";
  if (!key || key->empty()) return text;
  text += " (";
  for (const TensorType& type : types_of(*key)) text += (text.back() == '(' ? "" : ", ") + onnxfuse::describe(type);
  return text + ")";
}

// Adds the templates of plan files that fit the session to the node's templates.  Without Python, whether the session
// allows TF32 is not known before the node runs.  The session's aim (latency or throughput) is not known at all, so
// templates for either aim are used, and a file's templates precede those of the files after it.
void FusedKernel::choose_given(const OrtKernelContext* context) {
  bool tf32 = setup_.settings & kTf32;
  if (!setup_.asks_python) {
    void* allowed = nullptr;
    OrtStatus* status = ort_.KernelContext_GetResource(context, kCudaResourceVersion, kCudaUseTf32, &allowed);
    tf32 = status || reinterpret_cast<uintptr_t>(allowed) & 0xff;  // allowed by default, so also if the query fails
    if (status) ort_.ReleaseStatus(status);
  }
  Templates chosen;
  for (const auto& each : given_) {
    const bool has_aim = !setup_.asks_python || each->shared == ((setup_.settings & kShared) != 0);
    if (each->tf32 == tf32 && has_aim) chosen.push_back(each->plans);
  }
  if (chosen.empty() && !setup_.asks_python) {
    throw std::runtime_error(std::string("the session has use_tf32=") + (tf32 ? "1" : "0") +
                             ", for which plan files have no template of this node: " +
                             onnxfuse::describe(setup_.files));
  }
  std::unique_lock<std::shared_mutex> lock(mutex_);
  templates_.insert(templates_.end(), chosen.begin(), chosen.end());
}

FusedKernel::SharedPlan FusedKernel::first_fit(const Templates& templates, const Key& key,
                                               SharedPlan (Template::*plan)(const Key&)) const {
  using Fit = Template::Fit;
  for (const Fit fit : {Fit::kExact, Fit::kBetter, Fit::kNotConstant}) {
    // Inexact fits are tried only if plan files gave templates: a template that Python made fits exactly or not at all.
    // If Python can make templates, kNotConstant is not tried, because a new template fits better.
    if (setup_.asks_python && (fit == Fit::kNotConstant || (given_.empty() && fit != Fit::kExact))) break;
    for (const auto& each : templates) {
      if (!each->fits(key, fit)) continue;
      if (SharedPlan found = ((*each).*plan)(key)) return found;
    }
  }
  return nullptr;
}

FusedKernel::SharedPlan FusedKernel::known(const Key& key) {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  return first_fit(templates_, key, &Template::known_plan);
}

FusedKernel::SharedPlan FusedKernel::make(const Key& key, Stream stream) {
  const CurrentContext current(driver_, driver_.context_of(device_));
  Templates templates;
  uint64_t added = 0;
  {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    templates = templates_, added = added_;
  }
  if (SharedPlan plan = first_fit(templates, key, &Template::plan)) return plan;
  if (setup_.asks_python && !(setup_.settings & kWait)) {
    if (SharedPlan plan = first_fit(templates, key, &Template::plan_for_now)) return keep_for_now(key, plan, added);
    // A thread compiles the kernels of each template, and then sends the template again.
    const auto is_being_compiled = [&](const auto& each) { return each->fits(key) && each->has_variant(key); };
    if (std::any_of(templates.begin(), templates.end(), is_being_compiled)) return keep_for_now(key, nullptr, added);
    if (templates.empty() && id_ >= first_expecting && !driver_.is_capturing(stream)) return nullptr;
  }
  if (!setup_.asks_python) {
    throw std::runtime_error("plan files have no plan for these inputs: " + onnxfuse::describe(setup_.files) +
                             "; make them again with these shapes");
  }
  SharedPlan plan = plan_by_python(key, stream, 0);
  return plan ? plan : keep_for_now(key, nullptr, added);
}

FusedKernel::SharedPlan FusedKernel::plan_by_python(const Key& key, Stream stream, int settings) {
  // At the first request, Python loads only the kernels of the variant (a plan for a range of sizes) that it expects
  // here.  If this library chooses another variant, because it rounds differently, it then requests all kernels.
  for (const int more : {0, kAllKernels}) {
    const std::shared_ptr<Template> made = ask(key, stream, settings | more);
    if (!made) return nullptr;
    if (SharedPlan plan = made->fits(key) ? made->plan(key) : nullptr) return plan;
  }
  throw std::runtime_error("the template that was planned for these shapes has no plan for them");
}

std::shared_ptr<Template> FusedKernel::ask(const Key& key, Stream stream, int settings) {
  if (driver_.is_capturing(stream)) {
    throw std::runtime_error(
        "these shapes are new while a CUDA graph is captured; run them once without capture first, in a session that "
        "was opened with wait=True");
  }
  const std::optional<std::string> bytes = ask_for_plan(request_for(key, settings));
  return bytes ? add(*bytes) : nullptr;
}

FusedKernel::SharedPlan FusedKernel::keep_for_now(const Key& key, const SharedPlan& plan, uint64_t added) {
  std::unique_lock<std::shared_mutex> lock(mutex_);
  if (added != added_) return plan;  // the next run looks into the templates again
  if (for_now_.size() >= kMaxInputsForNow) for_now_.clear();  // they are decided again when they occur again
  for_now_[key] = plan;
  return plan;
}

PlanRequest FusedKernel::request_for(const Key& key, int settings) const {
  return {id_, setup_.provider.c_str(), op_.c_str(), node_.c_str(), attributes_.data(), attributes_.size(),
          key.data(), key.size(), device_, setup_.settings | settings};
}

std::optional<FusedKernel::SharedPlan> FusedKernel::for_now(const Key& key) {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  const auto found = for_now_.find(key);
  return found == for_now_.end() ? std::nullopt : std::optional(found->second);
}

std::shared_ptr<BodySession> FusedKernel::body_for(const Key& key, Stream stream) {
  BodyKey of{static_cast<int64_t>(reinterpret_cast<intptr_t>(stream))};
  for (const TensorType& type : types_of(key)) {
    of.insert(of.end(), {type.dtype, static_cast<int64_t>(type.shape.size())});
  }
  {
    const std::shared_lock<std::shared_mutex> lock(mutex_);
    if (const auto found = bodies_.find(of); found != bodies_.end()) return found->second;
  }
  const std::string place = std::to_string(device_) + (setup_.settings & kTf32 ? " tf32 " : " ") + setup_.provider;
  const Bodies::Where where{place + " " + op_ + " " + attributes_, of};
  std::shared_ptr<BodySession> body = bodies().find(where);
  if (!body) {
    body = ask_for_body(request_for(key));  // without a lock: two threads may open a session each
    bodies().add(where, body);
  }
  const std::unique_lock<std::shared_mutex> lock(mutex_);
  return bodies_.emplace(of, body).first->second;
}

void FusedKernel::run_body(OrtKernelContext* context, const Key& key, const std::vector<const OrtValue*>& inputs,
                           Stream stream) {
  const RelaxedCapture relaxed(driver_);  // this call can create a session
  const auto take = [&](size_t index, OrtValue* value) {
    Key words;
    add_tensor(ort_, value, 0, words);
    const TensorType type = types_of(words).front();
    OrtValue* output = nullptr;
    void *source = nullptr, *memory = nullptr;
    check(ort_, ort_.KernelContext_GetOutput(context, index, type.shape.data(), type.shape.size(), &output));
    if (!output) throw std::runtime_error("output " + std::to_string(index) + " is absent");
    if (type.bytes() == 0) return;
    check(ort_, ort_.GetTensorMutableData(value, &source));
    check(ort_, ort_.GetTensorMutableData(output, &memory));
    const CurrentContext current(driver_, driver_.context_of(device_));
    driver_.check(driver_.cuMemcpyDtoDAsync_v2(memory, source, type.bytes(), stream), "cuMemcpyDtoDAsync");
  };
  body_for(key, stream)->run(inputs, numbers_, memory_, stream, take);
}

std::shared_ptr<Template> FusedKernel::add(const std::string& bytes) {
  auto added = Template::shared(bytes, output_dtypes_, device_);
  std::unique_lock<std::shared_mutex> lock(mutex_);
  const auto is_replaced = [&](const auto& each) { return each->is_for_inputs_of(*added); };
  templates_.erase(std::remove_if(templates_.begin(), templates_.end(), is_replaced), templates_.end());
  templates_.insert(templates_.begin(), added);
  for_now_.clear();  // the template may have better plans for these inputs
  ++added_;
  return added;
}

void FusedKernel::drop_bodies(uint64_t id) {
  std::map<BodyKey, std::shared_ptr<BodySession>> dropped;  // closed here, without a lock
  with(id, [&](FusedKernel& node) {
    const std::unique_lock<std::shared_mutex> lock(node.mutex_);
    dropped.swap(node.bodies_);
  });
}

uint64_t FusedKernel::next_number() { return next_id; }

void FusedKernel::expect_templates(uint64_t first) { first_expecting = first; }

void FusedKernel::with(uint64_t id, const std::function<void(FusedKernel&)>& function) {
  const std::lock_guard<std::mutex> lock(nodes().mutex);
  const auto found = nodes().by_id.find(id);
  if (found != nodes().by_id.end()) function(*found->second);
}

std::vector<NewNode> FusedKernel::new_nodes() {
  std::vector<NewNode> found;
  const std::lock_guard<std::mutex> lock(nodes().mutex);
  for (const auto& [id, node] : nodes().by_id) {
    std::shared_lock<std::shared_mutex> own(node->mutex_);
    if (!node->setup_.asks_python || !node->given_.empty() || !node->templates_.empty()) continue;
    const Setup& setup = node->setup_;
    found.push_back({id, setup.provider, node->op_, node->node_, node->attributes_, node->device_, setup.settings});
  }
  return found;
}

std::vector<std::pair<Key, uint64_t>> FusedKernel::take_runs() {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  std::vector<std::pair<Key, uint64_t>> found;
  for (const auto& each : templates_) {
    for (auto& row : each->take_runs()) found.push_back(std::move(row));
  }
  return found;
}

void FusedKernel::give(const std::string& bytes) { add(bytes); }

void FusedKernel::compute(OrtKernelContext* context) {
  const ProfilerRange range(op_, node_);
  ReusedTensors reused;
  Tensors& tensors = reused.tensors;
  try {
    if (!given_.empty()) std::call_once(given_are_chosen_, [&] { choose_given(context); });
    tensors.read_inputs(ort_, context, constants_, numbers_);
    Stream stream = nullptr;
    check(ort_, ort_.KernelContext_GetGPUComputeStream(context, &stream));
    std::optional<RelaxedCapture> relaxed;  // set if a new plan is made: making and launching it can load code
    const auto plan_of = [&](const Key& key) {
      if (SharedPlan plan = known(key)) return plan;
      if (const std::optional<SharedPlan> plan = for_now(key)) return *plan;
      relaxed.emplace(driver_);
      return make(key, stream);
    };
    // Returns null if the body ran.  If onnxruntime cannot run it, waits for the kernel instead.
    const auto run_as_body = [&]() -> SharedPlan {
      try {
        run_body(context, tensors.key, tensors.values, stream);
        return nullptr;
      } catch (const std::exception& error) {
        if (setup_.settings & kWait || driver_.is_capturing(stream)) throw;
        const OrtLogger* logger = nullptr;
        check(ort_, ort_.KernelContext_GetLogger(context, &logger));
        log_warning(ort_, logger, "onnxfuse: the body of node '" + node_ + "' does not run: " + error.what());
        // The outputs of the body may have been made, and need not be aligned.
        if (SharedPlan plan = plan_by_python(without_alignment(tensors.key), stream, kWait)) return plan;
        throw;
      }
    };
    SharedPlan plan = plan_of(tensors.key);
    if (!plan) plan = run_as_body();
    if (!plan) return;
    const auto [any, all_aligned] = tensors.make_outputs(ort_, context, plan->outputs);
    if (!any) return;
    if (!all_aligned) plan = plan_of(without_alignment(tensors.key));
    if (!plan) plan = run_as_body();
    if (!plan) return;
    const Scratch scratch(ort_, context, allocator_, memory_, plan->scratch_bytes);
    if (setup_.settings & kCountRuns) plan->runs.add();
    run_steps(*plan, device_, tensors.inputs.data(), tensors.outputs.data(), scratch.data, stream);
  } catch (const std::exception& error) {
    throw std::runtime_error(describe(&tensors.key) + ": " + error.what());
  }
}

}  // namespace onnxfuse
