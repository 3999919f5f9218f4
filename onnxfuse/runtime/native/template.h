// A plan template: the plans of a fused node for all sizes of its dynamic dims, as variants with guards on the sizes.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "expressions.h"
#include "plan.h"

namespace onnxfuse {

constexpr int64_t kTemplateMark = 0x6f6e6674'0001;  // "onft", format 1

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 1469598103934665603u;
    for (const int64_t word : key) hash = (hash ^ static_cast<uint64_t>(word)) * 1099511628211u;
    return hash ^ (hash >> 29);
  }
};

class Template {
 public:
  using SharedPlan = std::shared_ptr<const Plan>;  // shared, because another thread may drop a plan while it runs

  // Returns the CUfunction for the word of a function in a template.
  using FunctionOf = std::function<int64_t(int64_t)>;

  // Reads a template from its words.  Each function in the words is a CUfunction, or 0 if it is still being compiled;
  // if `function_of` is given, it converts the words to CUfunctions.  Throws std::runtime_error that names the fault if
  // the words are malformed.
  Template(std::string_view bytes, std::vector<int64_t> output_dtypes, int device, const FunctionOf& function_of = {});
  Template(const Template&) = delete;
  Template& operator=(const Template&) = delete;

  // Returns the template of equal bytes that some node holds, or a new one.
  static std::shared_ptr<Template> shared(const std::string& bytes, const std::vector<int64_t>& output_dtypes,
                                          int device);

  // How inputs may differ from the template's inputs.  kExact: only in the sizes of dynamic dims.  kBetter: they may
  // also be aligned or constant where the template's inputs are not, because plans are correct for such inputs, too.
  // kNotConstant: they may also be computed where the template's inputs are constant.  For such inputs, no kernel of a
  // plan starts while the previous kernel runs.
  enum class Fit { kExact, kBetter, kNotConstant };
  bool fits(const Key& key, Fit fit = Fit::kExact) const;

  // Returns the plan for inputs that fit; null if no variant is for their sizes, or if a function of that variant was
  // still being compiled when the template was made.  Throws what `read_plan` throws.
  SharedPlan plan(const Key& key);

  // As `plan`, but if functions of the variant for these sizes are still being compiled, returns a plan of the best
  // variant that is correct for these sizes and has all its functions.  The template does not keep this plan.
  SharedPlan plan_for_now(const Key& key);

  // Whether a variant is for the sizes of these inputs, which fit.
  bool has_variant(const Key& key) const;

  // Returns the plan for these inputs if a call of `plan` has made it before, else null.
  SharedPlan known_plan(const Key& key);

  // Makes a plan at the sizes of the first variant, so that its faults are found before the first run.  Throws what
  // `plan` throws.
  void try_plan();

  // Returns the inputs of the plans that ran since the last call, and the numbers of runs; dropped plans are left out.
  std::vector<std::pair<Key, uint64_t>> take_runs();

  // Whether the other template is for the same inputs.
  bool is_for_inputs_of(const Template& other) const { return pattern_ == other.pattern_; }

  // A template that is used at many sizes keeps the plans of the last `count` sizes.  The template holds up to twice
  // as many plans, and frees older ones one after the other.  Returns the earlier count.
  static size_t set_max_recent_plans(size_t count);
  // How many plans all templates have made, and how many of these plans still exist.
  static int64_t plans_made();
  static int64_t plans_alive();

 private:
  struct Guard {
    size_t expression;
    bool answer;
  };
  enum class Word { kExact, kFlags, kDim };
  enum class PatchKind { kExpression, kFunction };
  // Fills in a word of a variant's plan: the value of an expression, or a function.
  struct Patch {
    size_t word;
    PatchKind kind;
    size_t index;
  };
  struct Variant {
    std::vector<int64_t> hints;  // sizes at which the plan was chosen
    bool tuned;                  // whether the plan was chosen by measuring; then it is preferred near the hints
    std::vector<Guard> hard, soft;
    std::vector<int64_t> words;
    std::vector<Patch> patches;
  };
  using Plans = std::unordered_map<Key, SharedPlan, KeyHash>;

  void read_pattern(WordReader& reader);
  std::vector<Guard> read_guards(WordReader& reader) const;
  Variant read_variant(WordReader& reader) const;
  std::vector<int64_t> sizes_of(const Key& key) const;
  bool has_functions(const Variant& variant) const;
  // The values of all expressions at some sizes.  Throws std::runtime_error if they overflow.
  std::vector<int64_t> values_at(const std::vector<int64_t>& sizes) const;
  // Considers only variants that have all their functions if `compiled` is set.
  const Variant* choose(const std::vector<int64_t>& sizes, const std::vector<int64_t>& values, bool compiled) const;
  SharedPlan make(const Key& key, bool compiled) const;
  bool holds_constants(const Key& key) const;
  // Throws std::runtime_error if a launch has a function that is not the template's, or arguments that the function
  // does not take.
  void check_functions(const Plan& plan) const;
  SharedPlan add(const Key& key, SharedPlan plan);  // the caller holds the lock

  const std::vector<int64_t> output_dtypes_;
  const int device_;
  Key pattern_;  // the words of the inputs, with -1 - k for size number k
  std::vector<Word> kinds_;     // the kinds of the pattern's words
  std::vector<size_t> places_;  // by number of a size: its first word in the pattern
  std::optional<Expressions> expressions_;
  std::vector<int64_t> functions_;
  std::vector<std::optional<Parameters>> parameters_;  // by function; nothing where the driver cannot report them
  std::vector<Variant> variants_;
  std::shared_mutex mutex_;  // guards the plans
  // Plans move to recent_ when they are used.  If recent_ is full, it becomes earlier_, and earlier_ becomes dropped_.
  Plans recent_, earlier_;
  Plans dropped_;            // plans that are still to be freed
};

}  // namespace onnxfuse
