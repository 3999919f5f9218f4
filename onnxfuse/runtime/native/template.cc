// Reading templates, and making plans from them.
#include "template.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <mutex>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace onnxfuse {
namespace {

constexpr int64_t kMaxWords = 1 << 20;
constexpr size_t kFewPlans = 32;  // a template with more plans is used at many shapes: see Template::add
constexpr double kMaxTunedDistance = 1.0;  // as MAX_TUNED_DISTANCE of onnxfuse.runtime.template
// A key-value cache that grows by one token at a time has a new shape for each length, up to this many tokens, and has
// the same shapes again in each new text.
std::atomic<size_t> max_recent_plans{4096};
std::atomic<int64_t> plan_count{0}, plans_freed{0};

// Returns the distance of sizes from a variant's hints, the sizes for which it was planned: the sum of
// |log2(size / hint)|.
double distance(const std::vector<int64_t>& sizes, const std::vector<int64_t>& hints) {
  double sum = 0.0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto log = [](int64_t size) { return std::log2(static_cast<double>(std::max<int64_t>(1, size))); };
    sum += std::abs(log(sizes[i]) - log(hints[i]));
  }
  return sum;
}

// Returns the parameters of a function, if it is compiled already and the driver can report them.
std::optional<Parameters> parameters_of(int64_t function, int device) {
  if (!function) return std::nullopt;
  const Driver& driver = Driver::get();
  const CurrentContext current(driver, driver.context_of(device));
  return driver.parameters_of(reinterpret_cast<Function>(function));
}

// Checks that no argument is smaller than its parameter, because the driver copies as many bytes as the parameter has.
void check_arguments(const Launch& launch, const Parameters& parameters) {
  if (launch.starts.size() != parameters.size()) {
    malformed("a launch has " + std::to_string(launch.starts.size()) + " arguments, its function takes " +
              std::to_string(parameters.size()));
  }
  std::vector<size_t> sizes;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const size_t end = i + 1 < parameters.size() ? launch.starts[i + 1] : launch.values.size();
    sizes.push_back((end - launch.starts[i]) * sizeof(uint64_t));
  }
  for (const TensorMapArgument& map : launch.maps) sizes[map.argument] = sizeof(EncodedTensorMap);
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (parameters[i] > sizes[i]) {
      malformed("argument " + std::to_string(i) + " of a launch has " + std::to_string(sizes[i]) +
                " bytes, its function takes " + std::to_string(parameters[i]));
    }
  }
}

}  // namespace

Template::Template(std::string_view bytes, std::vector<int64_t> output_dtypes, int device,
                   const FunctionOf& function_of)
    : output_dtypes_(std::move(output_dtypes)), device_(device) {
  WordReader reader(bytes);
  reader.next("the mark of a template", kTemplateMark, kTemplateMark);
  read_pattern(reader);
  expressions_.emplace(reader, places_.size());
  functions_.resize(reader.count("the number of functions", kMaxWords));
  for (int64_t& function : functions_) {
    function = static_cast<int64_t>(reader.bits("a function"));
    if (function_of) function = function_of(function);
    parameters_.push_back(parameters_of(function, device));
  }
  const size_t variants = reader.count("the number of variants", kMaxWords);
  for (size_t i = 0; i < variants; ++i) variants_.push_back(read_variant(reader));
  if (!reader.at_end()) malformed("words follow the template's end");
}

void Template::read_pattern(WordReader& reader) {
  const size_t inputs = reader.count("the number of inputs", kMaxWords);
  for (size_t i = 0; i < inputs; ++i) {
    pattern_.push_back(reader.next("an input's dtype", 0, 1000));
    pattern_.push_back(reader.next("an input's flags", 0, kAligned | kIsConstant));
    const size_t rank = reader.count("an input's rank", kMaxRank);
    pattern_.push_back(static_cast<int64_t>(rank));
    kinds_.insert(kinds_.end(), {Word::kExact, Word::kFlags, Word::kExact});
    for (size_t axis = 0; axis < rank; ++axis) {
      // Sizes are numbered in order of first use.
      const auto known = static_cast<int64_t>(places_.size());
      pattern_.push_back(reader.next("an input's dim", -1 - known, kMaxBytes));
      kinds_.push_back(Word::kDim);
      if (pattern_.back() == -1 - known) places_.push_back(pattern_.size() - 1);
    }
  }
}

std::vector<Template::Guard> Template::read_guards(WordReader& reader) const {
  std::vector<Guard> guards(reader.count("the number of guards", kMaxWords));
  for (Guard& guard : guards) {
    guard.expression = static_cast<size_t>(
        reader.next("a guard's expression", 0, static_cast<int64_t>(expressions_->count()) - 1));
    guard.answer = reader.flag("a guard's answer");
  }
  return guards;
}

Template::Variant Template::read_variant(WordReader& reader) const {
  Variant variant;
  variant.hints.resize(places_.size());
  for (int64_t& hint : variant.hints) hint = reader.next("a variant's size", 0, kMaxBytes);
  variant.tuned = reader.flag("whether a variant was measured");
  variant.hard = read_guards(reader);
  variant.soft = read_guards(reader);
  variant.words.resize(reader.count("the number of a plan's words", kMaxWords));
  for (int64_t& word : variant.words) word = static_cast<int64_t>(reader.bits("a plan's word"));
  variant.patches.resize(reader.count("the number of patches", kMaxWords));
  for (Patch& patch : variant.patches) {
    patch.word = static_cast<size_t>(
        reader.next("the word of a patch", 0, static_cast<int64_t>(variant.words.size()) - 1));
    patch.kind = static_cast<PatchKind>(reader.next("the kind of a patch", 0, 1));
    const size_t count = patch.kind == PatchKind::kFunction ? functions_.size() : expressions_->count();
    patch.index = static_cast<size_t>(reader.next("what a patch takes", 0, static_cast<int64_t>(count) - 1));
  }
  return variant;
}

std::shared_ptr<Template> Template::shared(const std::string& bytes, const std::vector<int64_t>& output_dtypes,
                                           int device) {
  using Content = std::tuple<int, std::vector<int64_t>, std::string>;
  static auto* mutex = new std::mutex();  // never deleted: sessions may outlive static objects
  static auto* known = new std::map<Content, std::weak_ptr<Template>>();
  std::lock_guard<std::mutex> lock(*mutex);
  for (auto at = known->begin(); at != known->end();) at = at->second.expired() ? known->erase(at) : std::next(at);
  auto& slot = (*known)[{device, output_dtypes, bytes}];
  auto found = slot.lock();
  if (!found) slot = found = std::make_shared<Template>(bytes, output_dtypes, device);
  return found;
}

int64_t Template::plans_made() { return plan_count; }

int64_t Template::plans_alive() { return plan_count - plans_freed; }

size_t Template::set_max_recent_plans(size_t count) { return max_recent_plans.exchange(count); }

// Whether all inputs that must be constant for this template are constant in `key`.
bool Template::holds_constants(const Key& key) const {
  for (size_t i = 0; i < key.size(); ++i) {
    if (kinds_[i] == Word::kFlags && (pattern_[i] & ~key[i] & kIsConstant)) return false;
  }
  return true;
}

bool Template::fits(const Key& key, Fit fit) const {
  if (key.size() != pattern_.size()) return false;
  for (size_t i = 0; i < key.size(); ++i) {
    if (kinds_[i] == Word::kFlags && fit != Fit::kExact) {
      const int64_t required = fit == Fit::kNotConstant ? pattern_[i] & ~kIsConstant : pattern_[i];
      if (required & ~key[i]) return false;
      continue;
    }
    const bool is_dynamic = kinds_[i] == Word::kDim && pattern_[i] < 0;
    if (key[i] != (is_dynamic ? key[places_[static_cast<size_t>(-1 - pattern_[i])]] : pattern_[i])) return false;
  }
  return true;
}

std::vector<int64_t> Template::sizes_of(const Key& key) const {
  std::vector<int64_t> sizes;
  for (const size_t place : places_) sizes.push_back(key[place]);
  return sizes;
}

bool Template::has_functions(const Variant& variant) const {
  return std::all_of(variant.patches.begin(), variant.patches.end(), [&](const Patch& patch) {
    return patch.kind != PatchKind::kFunction || functions_[patch.index];
  });
}

const Template::Variant* Template::choose(const std::vector<int64_t>& sizes, const std::vector<int64_t>& values,
                                          bool compiled) const {
  struct Best {
    const Variant* variant = nullptr;
    std::pair<double, double> cost;
    void offer(const Variant& other, std::pair<double, double> its) {
      if (!variant || its < cost) variant = &other, cost = its;
    }
  };
  Best tuned, expected;
  for (const Variant& variant : variants_) {
    if (compiled && !has_functions(variant)) continue;
    const bool right = std::all_of(variant.hard.begin(), variant.hard.end(), [&](const Guard& guard) {
      return (values[guard.expression] != 0) == guard.answer;
    });
    if (!right) continue;
    const double away = distance(sizes, variant.hints);
    if (variant.tuned) {
      tuned.offer(variant, {away, 0.0});
      continue;
    }
    // How much slower this variant is than the host's first choice, by the estimates of the host, which is the Python
    // module that makes the plans.
    double loss = 0.0;
    for (const Guard& guard : variant.soft) {
      loss = std::max(loss, expressions_->miss(guard.expression, guard.answer, values));
    }
    expected.offer(variant, {loss, loss > 0.0 ? away : 0.0});
  }
  const bool near = tuned.variant && tuned.cost.first <= kMaxTunedDistance;
  return near || !expected.variant ? tuned.variant : expected.variant;
}

std::vector<int64_t> Template::values_at(const std::vector<int64_t>& sizes) const {
  bool overflowed = false;
  std::vector<int64_t> values = expressions_->evaluate(sizes, overflowed);
  if (overflowed) throw std::runtime_error("these sizes are too large for 64-bit arithmetic");
  return values;
}

Template::SharedPlan Template::make(const Key& key, bool compiled) const {
  const std::vector<int64_t> sizes = sizes_of(key), values = values_at(sizes);
  const Variant* variant = choose(sizes, values, compiled);
  if (!variant || !has_functions(*variant)) return nullptr;
  std::vector<int64_t> words = variant->words;
  for (const Patch& patch : variant->patches) {
    words[patch.word] = patch.kind == PatchKind::kFunction ? functions_[patch.index] : values[patch.index];
  }
  const std::string bytes(reinterpret_cast<const char*>(words.data()), words.size() * sizeof(int64_t));
  const auto free = [](Plan* each) {
    delete each;
    ++plans_freed;
  };
  const std::shared_ptr<Plan> plan(new Plan(read_plan(bytes, types_of(key), output_dtypes_, device_)), free);
  ++plan_count;
  check_functions(*plan);
  // A kernel that starts early reads constants while earlier kernels run.  Here, some inputs that the plan takes for
  // constants are computed by earlier kernels, so no kernel may start early.
  if (!holds_constants(key)) {
    for (Step& step : plan->steps) {
      if (auto* launch = std::get_if<Launch>(&step)) launch->config.pdl = false;
    }
  }
  return plan;
}

void Template::check_functions(const Plan& plan) const {
  for (const Step& step : plan.steps) {
    const auto* launch = std::get_if<Launch>(&step);
    if (!launch) continue;
    const auto function = static_cast<int64_t>(reinterpret_cast<intptr_t>(launch->config.function));
    const auto found = std::find(functions_.begin(), functions_.end(), function);
    if (found == functions_.end()) malformed("a launch is of none of the template's functions");
    const auto& parameters = parameters_[static_cast<size_t>(found - functions_.begin())];
    if (parameters) check_arguments(*launch, *parameters);
  }
}

Template::SharedPlan Template::known_plan(const Key& key) {
  {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    const auto found = recent_.find(key);
    if (found != recent_.end()) return found->second;
  }
  std::unique_lock<std::shared_mutex> lock(mutex_);
  auto found = recent_.find(key);  // another thread may have added the plan meanwhile
  if (found != recent_.end()) return found->second;
  found = earlier_.find(key);
  return found == earlier_.end() ? nullptr : add(key, found->second);
}

Template::SharedPlan Template::plan(const Key& key) {
  SharedPlan made = make(key, false);
  if (!made) return nullptr;
  std::unique_lock<std::shared_mutex> lock(mutex_);
  return add(key, std::move(made));
}

Template::SharedPlan Template::plan_for_now(const Key& key) { return make(key, true); }

bool Template::has_variant(const Key& key) const {
  const std::vector<int64_t> sizes = sizes_of(key);
  return choose(sizes, values_at(sizes), false) != nullptr;
}

std::vector<std::pair<Key, uint64_t>> Template::take_runs() {
  std::vector<std::pair<Key, uint64_t>> found;
  std::shared_lock<std::shared_mutex> lock(mutex_);
  for (const Plans* plans : {&recent_, &earlier_}) {
    for (const auto& [key, plan] : *plans) {
      if (const uint64_t runs = plan->runs.take()) found.emplace_back(key, runs);
    }
  }
  return found;
}

void Template::try_plan() {
  if (variants_.empty()) return;
  Key key = pattern_;
  for (size_t i = 0; i < key.size(); ++i) {
    if (kinds_[i] == Word::kDim && key[i] < 0) key[i] = variants_.front().hints[static_cast<size_t>(-1 - key[i])];
  }
  plan(key);
}

Template::SharedPlan Template::add(const Key& key, SharedPlan plan) {
  // So that no single run is slow, the table grows once to its full size, and each new plan frees two others.  On an
  // EPYC, growing in steps took 345 us at the 2357th plan, and freeing 4096 plans at once took 1.8 ms.
  if (recent_.size() == kFewPlans) recent_.reserve(max_recent_plans);
  for (int i = 0; i < 2 && !dropped_.empty(); ++i) dropped_.erase(dropped_.begin());
  if (recent_.size() >= max_recent_plans) {
    dropped_ = std::exchange(earlier_, std::exchange(recent_, {}));
  }
  return recent_.emplace(key, std::move(plan)).first->second;  // keeps the plan that a faster thread has added
}

}  // namespace onnxfuse
