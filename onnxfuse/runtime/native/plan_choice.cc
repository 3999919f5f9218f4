// Finding plan files, and the operators that they have plans for on this machine.
#include "plan_choice.h"

#include <dlfcn.h>
#include <sys/stat.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>

#include "operator.h"

namespace onnxfuse {
namespace {

constexpr const char* kSuffix = ".plans";

std::string config_entry(const Ort& ort, const OrtSessionOptions* options, const std::string& key) {
  int is_there = 0;
  check(ort, ort.HasSessionConfigEntry(options, key.c_str(), &is_there));
  if (!is_there) return "";
  size_t size = 0;
  check(ort, ort.GetSessionConfigEntry(options, key.c_str(), nullptr, &size));
  std::string value(size, '\0');
  check(ort, ort.GetSessionConfigEntry(options, key.c_str(), value.data(), &size));
  return value.c_str();  // drops the terminating zero, which onnxruntime has written into `value`
}

std::vector<std::string> split(const std::string& paths) {
  std::vector<std::string> found;
  std::istringstream stream(paths);
  for (std::string path; std::getline(stream, path, ':');) {
    if (!path.empty()) found.push_back(path);
  }
  return found;
}

// Returns the path of the library that this code is in.
std::string library_path() {
  Dl_info info{};
  if (!dladdr(reinterpret_cast<const void*>(&library_path), &info) || !info.dli_fname) return "";
  return info.dli_fname;
}

std::vector<std::string> files_beside(const std::string& library) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::exists(library + kSuffix, error)) return {library + kSuffix};
  std::vector<std::string> found;
  const fs::path folder = fs::path(library).parent_path();
  for (const auto& entry : fs::directory_iterator(folder.empty() ? "." : folder, error)) {
    if (entry.path().extension() == kSuffix) found.push_back(entry.path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

PlanFiles load(const std::vector<std::string>& paths) {
  PlanFiles files;
  for (const std::string& path : paths) files.push_back(PlanFile::load(path));
  return files;
}

PlanFiles find_files(const Ort& ort, const OrtSessionOptions* options) {
  std::vector<std::string> paths = split(setting(&ort, options, "plans"));
  const std::string library = library_path();
  if (paths.empty()) paths = files_beside(library);
  if (paths.empty()) {
    throw std::runtime_error("no plan file: name one in the session config entry onnxfuse.plans or in ONNXFUSE_PLANS, "
                             "or put one beside the library as " + library + kSuffix + "; `onnxfuse compile` makes it");
  }
  return load(paths);
}

// Returns the different kinds of GPUs that this process sees.
std::vector<DeviceKind> visible_kinds() {
  Driver::open();
  const Driver& driver = Driver::get();
  std::vector<DeviceKind> kinds;
  for (int device = 0; device < driver.device_count(); ++device) {
    const DeviceKind kind = driver.kind_of(device);
    if (std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) kinds.push_back(kind);
  }
  return kinds;
}

[[noreturn]] void refuse_kinds(const PlanFiles& files, const std::vector<DeviceKind>& found) {
  throw std::runtime_error("plan files do not fit: " + describe(files) + "; this process has " + describe(found));
}

}  // namespace

std::string setting(const Ort* ort, const OrtSessionOptions* options, const char* name) {
  std::string value = ort ? config_entry(*ort, options, std::string("onnxfuse.") + name) : "";
  if (!value.empty()) return value;
  std::string variable = "ONNXFUSE_";
  for (const char* letter = name; *letter; ++letter) {
    variable += static_cast<char>(std::toupper(static_cast<unsigned char>(*letter)));
  }
  const char* found = std::getenv(variable.c_str());
  return found ? found : "";
}

bool bodies_may_run(const Ort* ort, const OrtSessionOptions* options) {
  const std::string word = setting(ort, options, "missing");
  if (word.empty() || word == "refuse") return false;
  if (word == "body") return true;
  throw std::runtime_error("onnxfuse.missing is '" + word + "', required refuse or body");
}

PlanFiles configured_files(const Ort& ort, const OrtSessionOptions* options) {
  return load(split(config_entry(ort, options, "onnxfuse.plans")));
}

Runnable find_runnable(const Ort& ort, const OrtSessionOptions* options, bool on_all) {
  const PlanFiles files = find_files(ort, options);
  const std::vector<DeviceKind> kinds = visible_kinds();
  Runnable found;
  std::map<std::string, std::set<size_t>> kinds_of;  // by operator: indices of the GPU kinds that have plans for it
  for (const auto& file : files) {
    bool is_used = false;
    for (size_t i = 0; i < kinds.size(); ++i) {
      if (!file->kind_for(kinds[i])) continue;
      is_used = true;
      for (const OperatorName& op : file->operators) kinds_of[op.name].insert(i);
    }
    if (is_used) found.files.push_back(file);
  }
  if (found.files.empty()) refuse_kinds(files, kinds);
  for (const auto& file : found.files) {
    for (const OperatorName& op : file->operators) {
      if (!on_all || kinds_of[op.name].size() == kinds.size()) found.operators.push_back(op);
    }
  }
  if (found.operators.empty()) refuse_kinds(found.files, kinds);
  for (const auto& [name, numbers] : kinds_of) {
    if (on_all && numbers.size() < kinds.size()) found.left_out += (found.left_out.empty() ? "" : ", ") + name;
  }
  return found;
}

}  // namespace onnxfuse
