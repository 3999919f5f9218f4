// Reading and checking plan files.
#include "plan_file.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <mutex>
#include <stdexcept>
#include <tuple>

#include "sha256.h"
#include "word_reader.h"

namespace onnxfuse {
namespace {

constexpr std::string_view kMagic = "onnxplan";
constexpr size_t kFormatAt = 8, kDigestAt = 16, kBodyAt = 48;  // bytes from the file's start
constexpr int64_t kMaxShared = 1 << 20, kMaxCluster = 64;      // far above all GPUs' limits
constexpr int64_t kAllLibraries = kCallsCublasLt | kNamesAlgorithm | kCallsCudnn | kNamesEngine;
constexpr auto kMaxWord = std::numeric_limits<int64_t>::max();

size_t index(WordReader& reader, const char* what, size_t of) {
  return static_cast<size_t>(reader.next(what, 0, static_cast<int64_t>(of) - 1));
}

DeviceKind read_device(WordReader& reader) {
  DeviceKind kind;
  kind.name = reader.text("a device's name");
  kind.arch = reader.next("a device's compute capability", 0, 10000);
  kind.multiprocessors = reader.next("a device's multiprocessors", 0, kMaxWord);
  kind.shared_per_block = reader.next("a device's shared memory", 0, kMaxWord);
  return kind;
}

StoredKernel read_kernel(WordReader& reader, const PlanFile& file) {
  StoredKernel kernel;
  kernel.device = index(reader, "a kernel's device", file.devices.size());
  kernel.code = index(reader, "a kernel's code", file.codes.size());
  kernel.entry = reader.text("a kernel's entry");
  kernel.shared = static_cast<uint32_t>(reader.next("a kernel's shared memory", 0, kMaxShared));
  kernel.cluster = static_cast<uint32_t>(reader.next("a kernel's cluster", 0, kMaxCluster));
  return kernel;
}

StoredTemplate read_template(WordReader& reader, const PlanFile& file) {
  StoredTemplate found;
  found.device = index(reader, "a template's device", file.devices.size());
  found.tf32 = reader.flag("a template's TF32");
  found.shared = reader.flag("a template's aim");
  found.libraries = reader.next("a template's libraries", 0, kAllLibraries);
  found.node = reader.text("a template's node");
  found.words = reader.text("a template's words");
  return found;
}

void read_body(PlanFile& file) {
  WordReader reader(std::string_view(file.data).substr(kBodyAt));
  reader.text("the versions");  // the versions are not used: the format alone decides whether the file can be read
  file.cublaslt = static_cast<uint64_t>(reader.next("the version of cuBLASLt", 0, kMaxWord));
  file.cudnn = static_cast<uint64_t>(reader.next("the version of cuDNN", 0, kMaxWord));
  for (size_t left = reader.count("the number of devices"); left; --left) file.devices.push_back(read_device(reader));
  for (size_t left = reader.count("the number of codes"); left; --left) file.codes.push_back(reader.text("a code"));
  for (size_t left = reader.count("the number of kernels"); left; --left) {
    file.kernels.push_back(read_kernel(reader, file));
  }
  for (size_t left = reader.count("the number of operators"); left; --left) {
    const auto read = read_operators(reader.text("an operator"));
    file.operators.insert(file.operators.end(), read.begin(), read.end());
  }
  for (size_t left = reader.count("the number of templates"); left; --left) {
    file.templates.push_back(read_template(reader, file));
  }
  if (!reader.at_end()) malformed("words follow its end");
}

std::shared_ptr<const PlanFile> read_file(const std::string& path, size_t size) {
  auto file = std::make_shared<PlanFile>();
  file->path = path;
  std::string& data = file->data;
  std::ifstream stream(path, std::ios::binary);
  data.resize(size);
  if (!stream.read(data.data(), static_cast<std::streamsize>(size))) throw std::runtime_error("it cannot be read");
  if (data.size() < kBodyAt || data.compare(0, kMagic.size(), kMagic) != 0) {
    throw std::runtime_error("it is not a plan file");
  }
  int64_t format = 0;
  std::memcpy(&format, data.data() + kFormatAt, sizeof format);
  if (format != kPlanFileFormat) {
    throw std::runtime_error("it is of format " + std::to_string(format) + ", this library reads " +
                             std::to_string(kPlanFileFormat) + "; make it with the library's version of onnxfuse");
  }
  const auto digest = sha256(data.data() + kBodyAt, data.size() - kBodyAt);
  if (std::memcmp(digest.data(), data.data() + kDigestAt, digest.size()) != 0) {
    throw std::runtime_error("it is damaged; make it again");
  }
  read_body(*file);
  return file;
}

}  // namespace

std::shared_ptr<const PlanFile> PlanFile::load(const std::string& path) {
  using Stamp = std::tuple<dev_t, ino_t, off_t, int64_t, int64_t>;
  static auto* mutex = new std::mutex();  // never deleted: sessions may outlive static objects
  static auto* known = new std::map<std::string, std::pair<Stamp, std::shared_ptr<const PlanFile>>>();
  try {
    struct stat found {};
    if (stat(path.c_str(), &found) != 0) throw std::runtime_error(std::strerror(errno));
    if (S_ISDIR(found.st_mode)) throw std::runtime_error("it is a directory; name a file in it");
    if (!S_ISREG(found.st_mode)) throw std::runtime_error("it is not a regular file");
    const Stamp stamp{found.st_dev, found.st_ino, found.st_size, found.st_mtim.tv_sec, found.st_mtim.tv_nsec};
    std::lock_guard<std::mutex> lock(*mutex);
    const auto at = known->find(path);
    if (at != known->end() && at->second.first == stamp) return at->second.second;
    auto file = read_file(path, static_cast<size_t>(found.st_size));
    (*known)[path] = {stamp, file};
    return file;
  } catch (const std::exception& error) {
    throw std::runtime_error("plan file " + path + ": " + error.what());
  }
}

std::optional<size_t> PlanFile::kind_for(const DeviceKind& here) const {
  std::optional<size_t> nearest;
  const auto away = [&](size_t i) { return std::abs(devices[i].multiprocessors - here.multiprocessors); };
  for (size_t i = 0; i < devices.size(); ++i) {
    if (devices[i] == here) return i;
    const auto is_too_large = [&](const StoredKernel& kernel) {
      return kernel.device == i && (kernel.shared > here.shared_per_block || kernel.cluster > kMaxPortableCluster);
    };
    if (devices[i].arch != here.arch || std::any_of(kernels.begin(), kernels.end(), is_too_large)) continue;
    if (!nearest || away(i) < away(*nearest)) nearest = i;
  }
  return nearest;
}

bool PlanFile::runs(const StoredTemplate& stored, const DeviceKind& here) const {
  return devices[stored.device] == here || !(stored.libraries & (kNamesAlgorithm | kNamesEngine));
}

}  // namespace onnxfuse
