// Loading the templates of plan files and their kernels.
#include "given_templates.h"

#include <map>
#include <mutex>
#include <stdexcept>
#include <tuple>

#include "cublas_lt.h"
#include "cudnn_backend.h"

namespace onnxfuse {

class Module {
 public:
  Module(int device, std::string_view code) : device_(device) {
    const Driver& driver = Driver::get();
    driver.check(driver.cuModuleLoadData(&module_, code.data()), "cuModuleLoadData");
  }
  ~Module() {
    const Driver& driver = Driver::get();
    const RelaxedCapture relaxed(driver);
    try {
      const CurrentContext current(driver, driver.context_of(device_));
      driver.cuModuleUnload(module_);
    } catch (const std::exception&) {  // the driver has shut down, and the module with it
    }
  }
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  Function function(const StoredKernel& kernel) const {
    const Driver& driver = Driver::get();
    Function found = nullptr;
    driver.check(driver.cuModuleGetFunction(&found, module_, kernel.entry.c_str()), "cuModuleGetFunction");
    driver.configure(found, kernel.shared, kernel.cluster > kMaxPortableCluster);
    return found;
  }

 private:
  const int device_;
  void* module_ = nullptr;
};

namespace {

// Cubins and templates that are loaded on GPUs, as long as some node holds them.  The caller holds the mutex.
struct Loaded {
  std::mutex mutex;
  // The keys of both maps are: the plan file, the index of the cubin or template in the file, and the device.
  std::map<std::tuple<const PlanFile*, size_t, int>, std::weak_ptr<const Module>> modules;
  std::map<std::tuple<const PlanFile*, size_t, int>, std::weak_ptr<const GivenTemplate>> templates;

  std::shared_ptr<const Module> module(const PlanFile& file, size_t code, int device) {
    auto& known = modules[{&file, code, device}];
    auto found = known.lock();
    if (!found) known = found = std::make_shared<const Module>(device, file.codes[code]);
    return found;
  }

  std::shared_ptr<const GivenTemplate> make(const PlanFile& file, const StoredTemplate& stored,
                                            const std::vector<int64_t>& output_dtypes, int device) {
    auto made = std::make_shared<GivenTemplate>();
    made->tf32 = stored.tf32;
    made->shared = stored.shared;
    const auto function_of = [&](int64_t number) {
      const auto count = static_cast<int64_t>(file.kernels.size());
      if (number < 0 || number >= count) malformed("a template has kernel " + std::to_string(number));
      const StoredKernel& kernel = file.kernels[static_cast<size_t>(number)];
      if (kernel.device != stored.device) malformed("a template's kernel is for another GPU");
      made->modules.push_back(module(file, kernel.code, device));
      return reinterpret_cast<int64_t>(made->modules.back()->function(kernel));
    };
    made->plans = std::make_shared<Template>(stored.words, output_dtypes, device, function_of);
    made->plans->try_plan();
    return made;
  }
};

Loaded& loaded() {
  static auto* only = new Loaded();  // never deleted: sessions may outlive static objects
  return *only;
}

void check_version(const char* library, uint64_t required, size_t found) {
  if (required != found) {
    throw std::runtime_error("its plans were chosen for " + std::string(library) + " " + std::to_string(required) +
                             ", this process has " + std::to_string(found) + "; make it again");
  }
}

// Opens the libraries that a template calls.
void check_libraries(const PlanFile& file, const StoredTemplate& stored) {
  if (stored.libraries & kCallsCublasLt) {
    const size_t found = CublasLt::get().cublasLtGetVersion();
    if (stored.libraries & kNamesAlgorithm) check_version("cuBLASLt", file.cublaslt, found);
  }
  if (stored.libraries & kCallsCudnn) {
    const size_t found = Cudnn::get().cudnnGetVersion();
    if (stored.libraries & kNamesEngine) check_version("cuDNN", file.cudnn, found);
  }
}

}  // namespace

std::string describe(const PlanFiles& files) {
  std::string text;
  for (const auto& file : files) {
    text += (text.empty() ? "" : ", ") + file->path + " (for " + describe(file->devices) + ")";
  }
  return text;
}

std::vector<std::shared_ptr<const GivenTemplate>> given_templates(const PlanFiles& files, const std::string& node,
                                                                  const std::vector<int64_t>& output_dtypes,
                                                                  int device) {
  const Driver& driver = Driver::get();
  const DeviceKind kind = driver.kind_of(device);
  const RelaxedCapture relaxed(driver);
  const CurrentContext current(driver, driver.context_of(device));
  std::vector<std::shared_ptr<const GivenTemplate>> found;
  const std::lock_guard<std::mutex> lock(loaded().mutex);
  for (const auto& file : files) {
    const std::optional<size_t> number = file->kind_for(kind);
    if (!number) continue;
    try {
      for (size_t i = 0; i < file->templates.size(); ++i) {
        const StoredTemplate& stored = file->templates[i];
        if (stored.node != node || stored.device != *number || !file->runs(stored, kind)) continue;
        auto& known = loaded().templates[{file.get(), i, device}];
        auto given = known.lock();
        if (!given) {
          check_libraries(*file, stored);
          known = given = loaded().make(*file, stored, output_dtypes, device);
        }
        found.push_back(std::move(given));
      }
    } catch (const std::exception& error) {
      throw std::runtime_error("plan file " + file->path + ": " + error.what());
    }
  }
  return found;
}

}  // namespace onnxfuse
