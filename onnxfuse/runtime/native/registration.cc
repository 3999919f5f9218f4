// Registering the fused operators with session options: those that Python names, or those of plan files.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "export.h"
#include "operator.h"
#include "plan_choice.h"
#include "utf8.h"

namespace onnxfuse {
namespace {

constexpr const char* kCudaProvider = "CUDAExecutionProvider";

// The operators and settings that Python has prepared for the thread's next call of RegisterCustomOps.
struct Prepared {
  std::string provider, operators;
  int settings = 0;
};
thread_local std::optional<Prepared> prepared;

// The operators and domains that sessions point to.  Sessions with equal setups and operators share them, so that
// registering them again allocates nothing.
struct Registry {
  using SetupKey = std::tuple<const void*, std::string, int, bool, PlanFiles>;
  std::mutex mutex;
  std::map<const void*, std::unique_ptr<Ort>> runtimes;
  // An operator's name, and the indices of its inputs that are single integers in host memory.
  using Signature = std::pair<std::string, std::vector<size_t>>;
  std::map<std::pair<SetupKey, Signature>, std::unique_ptr<FusedOp>> ops;
  std::map<std::pair<SetupKey, std::set<Signature>>, OrtCustomOpDomain*> domains;

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

  void add(const Ort& ort, OrtSessionOptions* options, const Setup& setup, const std::vector<OperatorName>& operators) {
    const SetupKey key{&ort, setup.provider, setup.settings, setup.asks_python, setup.files};
    std::set<Signature> signatures;
    for (const OperatorName& op : operators) {
      const Signature signature{op.name, op.numbers};
      signatures.insert(signature);
      auto& fused = ops[{key, signature}];
      if (!fused) fused = std::make_unique<FusedOp>(ort, setup, op.name, op.numbers);
      fused->add_attributes(op.attributes);
    }
    auto& domain = domains[{key, signatures}];
    if (!domain) {
      check(ort, ort.CreateCustomOpDomain(kDomain, &domain));
      for (const Signature& each : signatures) check(ort, ort.CustomOpDomain_Add(domain, ops[{key, each}].get()));
    }
    check(ort, ort.AddCustomOpDomain(options, domain));
  }
};

Registry& registry() {
  static auto* only = new Registry();  // never deleted: sessions may outlive static objects
  return *only;
}

std::atomic<const Ort*> of_python{nullptr};

void add_prepared(const Ort& ort, OrtSessionOptions* options, const Prepared& what) {
  const Setup setup{what.provider, configured_files(ort, options), true, what.settings};
  registry().add(ort, options, setup, read_operators(what.operators));
  of_python = &ort;
}

// Says on stderr why nodes run as ONNX functions, because onnxruntime gives no logger to a library that registers
// operators.
void warn(const std::string& nodes, const std::string& why) {
  std::fprintf(stderr, "onnxfuse: %s run as their bodies: %s\n", nodes.c_str(), why.c_str());
}

void add_from_files(const Ort& ort, OrtSessionOptions* options) {
  const bool bodies = bodies_may_run(&ort, options);
  try {
    const std::string provider = setting(&ort, options, "provider");
    const Runnable found = find_runnable(ort, options, bodies);
    const Setup setup{provider.empty() ? kCudaProvider : provider, found.files, false, 0};
    registry().add(ort, options, setup, found.operators);
    if (!found.left_out.empty()) warn("nodes of " + found.left_out, "some GPU of this process has no plans for them");
  } catch (const std::exception& error) {
    if (!bodies) throw;
    warn("all fused nodes", error.what());
  }
}

OrtStatus* refuse_runtime(const OrtApiBase& base, const std::exception& error) {
  try {
    if (bodies_may_run(nullptr, nullptr)) {
      warn("all fused nodes", error.what());
      return nullptr;
    }
  } catch (const std::exception&) {  // ONNXFUSE_MISSING has another value than refuse or body
  }
  const auto* slots = static_cast<void* const*>(base.GetApi(1));  // every version of the API begins with CreateStatus
  const std::string text = utf8(std::string("onnxfuse: ") + error.what());
  return reinterpret_cast<OrtStatus* (*)(int, const char*)>(slots[0])(kFail, text.c_str());
}

}  // namespace

const Ort& ort_of_python() {
  const Ort* ort = of_python;
  if (!ort) throw std::runtime_error("no session options of Python have operators of this library");
  return *ort;
}

}  // namespace onnxfuse

using namespace onnxfuse;

// onnxruntime calls this for a library of custom operators.  If Python has called onnxfuse_prepare in the same thread,
// this function registers the operators that Python named, and otherwise those of plan files.
ONNXFUSE_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  const std::optional<Prepared> what = std::exchange(prepared, std::nullopt);
  try {
    std::lock_guard<std::mutex> lock(registry().mutex);
    const Ort& ort = registry().runtime(*base);
    return guarded(ort, [&] { what ? add_prepared(ort, options, *what) : add_from_files(ort, options); });
  } catch (const std::exception& error) {
    return refuse_runtime(*base, error);
  }
}

// Sets the operators that the thread's next RegisterCustomOps registers.  `operators` has the lines that
// `read_operators` reads; `settings` are flags of the session, which its requests for plans repeat.
ONNXFUSE_EXPORT void onnxfuse_prepare(const char* provider, const char* operators, int settings) {
  prepared = Prepared{provider, operators, settings};
}

// Adds attributes that nodes of existing operators may have.
ONNXFUSE_EXPORT void onnxfuse_add_attributes(const char* provider, const char* operators) {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  for (const OperatorName& op : read_operators(operators)) {
    for (auto& [key, fused] : all.ops) {
      if (fused->setup.provider == provider && fused->name == op.name) fused->add_attributes(op.attributes);
    }
  }
}
