// The custom operator, which is registered under the names of all fused ops, and the functions that Python calls.
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <tuple>

#include "export.h"
#include "infer.h"
#include "kernel.h"
#include "python.h"

namespace onnxfuse {
namespace {

constexpr const char* kDomain = "onnxfuse";

// One fused op.  It lives as long as the process, because sessions point to it and do not tell when they end.
struct FusedOp : OrtCustomOp {
  FusedOp(const Ort& ort, std::string provider, int settings, std::string name);
  std::vector<AttributeName> attributes() const {
    std::lock_guard<std::mutex> lock(mutex);
    return names;
  }
  void add_attributes(const std::vector<AttributeName>& more) {
    std::lock_guard<std::mutex> lock(mutex);
    for (const AttributeName& attribute : more) {
      if (std::find(names.begin(), names.end(), attribute) == names.end()) names.push_back(attribute);
    }
  }

  const Ort& ort;
  const std::string provider, name;
  const int settings;
  std::vector<AttributeName> names{{"attributes", 's'}};  // an attribute that lists the names of all others
  mutable std::mutex mutex;
};

const FusedOp& self(const OrtCustomOp* op) { return *static_cast<const FusedOp*>(op); }

// Runs `body` and turns what it throws into a status.
template <class Body>
OrtStatus* guarded(const Ort& ort, Body body) {
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    return ort.CreateStatus(kRuntimeException, (std::string("onnxfuse: ") + error.what()).c_str());
  } catch (...) {
    return ort.CreateStatus(kRuntimeException, "onnxfuse: unknown error");
  }
}

// What onnxruntime holds for a node.
struct KernelOfOrt {
  const Ort& ort;
  FusedKernel kernel;
};

OrtStatus* create_kernel(const OrtCustomOp* op, const void*, const OrtKernelInfo* info, void** kernel) {
  const FusedOp& fused = self(op);
  return guarded(fused.ort, [&] {
    try {
      *kernel = new KernelOfOrt{
          fused.ort, {fused.ort, info, fused.name, fused.provider, fused.settings, fused.attributes()}};
    } catch (const std::exception& error) {
      throw std::runtime_error(fused.name + ": " + error.what());
    }
  });
}

OrtStatus* compute(void* kernel, OrtKernelContext* context) {
  auto* own = static_cast<KernelOfOrt*>(kernel);
  return guarded(own->ort, [&] { own->kernel.compute(context); });
}

OrtStatus* infer(const OrtCustomOp* op, OrtShapeInferContext* context) {
  const FusedOp& fused = self(op);
  return guarded(fused.ort, [&] { infer_outputs(fused.ort, context); });
}

FusedOp::FusedOp(const Ort& ort_functions, std::string provider_name, int session_settings, std::string op_name)
    : OrtCustomOp{},
      ort(ort_functions),
      provider(std::move(provider_name)),
      name(std::move(op_name)),
      settings(session_settings) {
  version = kCustomOpVersion;
  GetName = [](const OrtCustomOp* op) { return self(op).name.c_str(); };
  GetExecutionProviderType = [](const OrtCustomOp* op) { return self(op).provider.c_str(); };
  GetInputType = GetOutputType = [](const OrtCustomOp*, size_t) { return 0; };  // undefined: any type
  GetInputTypeCount = GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
  GetInputCharacteristic = GetOutputCharacteristic = [](const OrtCustomOp*, size_t) -> int { return kVariadic; };
  GetInputMemoryType = [](const OrtCustomOp*, size_t) { return 0; };  // of the provider's device
  GetVariadicInputMinArity = GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
  GetVariadicInputHomogeneity = GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
  GetStartVersion = [](const OrtCustomOp*) { return 1; };
  GetEndVersion = [](const OrtCustomOp*) { return 1; };
  CreateKernelV2 = create_kernel;
  KernelComputeV2 = compute;
  KernelDestroy = [](void* kernel) { delete static_cast<KernelOfOrt*>(kernel); };
  InferOutputShapeFn = infer;
}

// --- registration ------------------------------------------------------------------------------------------------

struct PreparedOp {
  std::string name;
  std::vector<AttributeName> attributes;
};

thread_local std::string prepared_provider;
thread_local int prepared_settings = 0;
thread_local std::string prepared_ops;  // a line for each op: its name, then its attributes as name:type

std::vector<PreparedOp> read_prepared(const std::string& text) {
  std::vector<PreparedOp> prepared;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    PreparedOp op;
    words >> op.name;
    for (std::string word; words >> word;) op.attributes.push_back({word.substr(0, word.size() - 2), word.back()});
    prepared.push_back(std::move(op));
  }
  return prepared;
}

// The operators and domains that sessions point to.  Sessions with equal settings and ops share them, so that
// registering again costs nothing.
struct Registry {
  std::mutex mutex;
  std::map<const void*, std::unique_ptr<Ort>> runtimes;
  std::map<std::tuple<const void*, std::string, int, std::string>, std::unique_ptr<FusedOp>> ops;
  std::map<std::tuple<const void*, std::string, int, std::set<std::string>>, OrtCustomOpDomain*> domains;

  const Ort& runtime(const OrtApiBase& base) {
    unsigned major = 0, minor = 0;  // onnxruntime 1.N offers every version of its API up to N
    std::sscanf(base.GetVersionString(), "%u.%u", &major, &minor);
    if (major != 1 || minor < kMinApi) {
      throw std::runtime_error(std::string("onnxruntime 1.23 or newer is required, found ") + base.GetVersionString());
    }
    const uint32_t version = std::min(minor, kShapeReferenceApi);
    const void* table = base.GetApi(version);
    if (!table) throw std::runtime_error(std::string("no API in onnxruntime ") + base.GetVersionString());
    auto& ort = runtimes[table];
    if (!ort) ort = std::make_unique<Ort>(table, version == kShapeReferenceApi);
    return *ort;
  }

  OrtCustomOpDomain* domain(const Ort& ort, const std::string& provider, int settings,
                            const std::vector<PreparedOp>& prepared) {
    std::set<std::string> names;
    for (const PreparedOp& op : prepared) names.insert(op.name);
    auto& domain = domains[{&ort, provider, settings, names}];
    const bool is_new = !domain;
    if (is_new) check(ort, ort.CreateCustomOpDomain(kDomain, &domain));
    for (const PreparedOp& op : prepared) {
      auto& fused = ops[{&ort, provider, settings, op.name}];
      if (!fused) fused = std::make_unique<FusedOp>(ort, provider, settings, op.name);
      fused->add_attributes(op.attributes);
      if (is_new) check(ort, ort.CustomOpDomain_Add(domain, fused.get()));
    }
    return domain;
  }
};

Registry& registry() {
  static auto* only = new Registry();  // never deleted: sessions may outlive static objects
  return *only;
}

}  // namespace
}  // namespace onnxfuse

using namespace onnxfuse;

// onnxruntime's register_custom_ops_library calls this, after onnxfuse_prepare was called in the same thread.
ONNXFUSE_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  const Ort* ort = nullptr;
  try {
    Registry& all = registry();
    std::lock_guard<std::mutex> lock(all.mutex);
    ort = &all.runtime(*base);
    return guarded(*ort, [&] {
      OrtCustomOpDomain* domain = all.domain(*ort, prepared_provider, prepared_settings, read_prepared(prepared_ops));
      check(*ort, ort->AddCustomOpDomain(options, domain));
    });
  } catch (const std::exception& error) {
    // The first function of every version of the table is CreateStatus.
    const auto* slots = static_cast<void* const*>(base->GetApi(1));
    return reinterpret_cast<OrtStatus* (*)(int, const char*)>(slots[0])(kFail, error.what());
  }
}

ONNXFUSE_EXPORT int onnxfuse_abi() { return 9; }

// Sets what the thread's next RegisterCustomOps registers.  Operators that exist learn their new attributes at once.
// `settings` are flags of the session, which requests for plans repeat.
ONNXFUSE_EXPORT void onnxfuse_prepare(const char* provider, const char* ops, int settings) {
  prepared_provider = provider;
  prepared_settings = settings;
  prepared_ops = ops;
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  for (const PreparedOp& op : read_prepared(prepared_ops)) {
    for (auto& [key, fused] : all.ops) {
      if (fused->provider == prepared_provider && fused->name == op.name) fused->add_attributes(op.attributes);
    }
  }
}

ONNXFUSE_EXPORT void onnxfuse_set_callbacks(PlanCallback plan, DropCallback drop,
                                            const Interrupt* interrupt) {
  set_callbacks(plan, drop, interrupt);
}

ONNXFUSE_EXPORT void onnxfuse_reply(void* reply, const char* bytes, size_t size) {
  static_cast<std::string*>(reply)->assign(bytes, size);
}

ONNXFUSE_EXPORT void onnxfuse_keep_plans(size_t count) { Template::set_max_recent_plans(count); }

ONNXFUSE_EXPORT int64_t onnxfuse_plans_made() { return Template::plans_made(); }

ONNXFUSE_EXPORT int64_t onnxfuse_kernels_alive() { return FusedKernel::alive(); }

ONNXFUSE_EXPORT const char* onnxfuse_open_driver(const char* path) {
  return reported([&] { Driver::open(path); });
}

ONNXFUSE_EXPORT const char* onnxfuse_load(int device, const void* image, const char* entry, void** module,
                                          void** function) {
  return reported([&] {
    const Driver& driver = Driver::get();
    const CurrentContext current(driver, driver.context_of(device));
    const RelaxedCapture relaxed(driver);
    *function = driver.load(image, entry, module);
  });
}

// Allows a function this much dynamic shared memory and, if `large_cluster`, clusters of more than 8 blocks.
ONNXFUSE_EXPORT const char* onnxfuse_configure(int device, void* function, uint32_t shared, int large_cluster) {
  return reported([&] {
    const Driver& driver = Driver::get();
    const CurrentContext current(driver, driver.context_of(device));
    const RelaxedCapture relaxed(driver);
    driver.configure(function, shared, large_cluster != 0);
  });
}

ONNXFUSE_EXPORT const char* onnxfuse_unload(int device, void* module) {
  return reported([&] {
    const Driver& driver = Driver::get();
    const CurrentContext current(driver, driver.context_of(device));
    const RelaxedCapture relaxed(driver);
    driver.unload(module);
  });
}
