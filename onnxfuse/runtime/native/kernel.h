// A fused node of one session, which holds its plans and runs them.  Its templates have its plans for all sizes.  Its
// body is the ONNX function that the node calls, and runs where no kernel can.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "attributes.h"
#include "given_templates.h"
#include "ort_api.h"
#include "python.h"
#include "template.h"

namespace onnxfuse {

// A node of a session that has no templates yet: the fields of a request for one, except its inputs.
struct NewNode {
  uint64_t id;
  std::string provider, op, node, attributes;
  int device, settings;
};

// Throws std::runtime_error with the status's message and releases the status, unless it is null.
void check(const Ort& ort, OrtStatus* status);

// The setup that the nodes of sessions with equal settings share.
struct Setup {
  std::string provider;
  PlanFiles files;  // searched before Python is asked
  bool asks_python = false;  // whether Python makes templates that the files lack
  int settings = 0;          // flags of the session, repeated in requests to Python
};

// A stream, because the runs of a session share its memory, and the dtypes and ranks of a node's inputs.
using BodyKey = std::vector<int64_t>;

// Returns the onnxruntime that Python uses.  Throws std::runtime_error if no session has used this library there.
const Ort& ort_of_python();

class FusedKernel {
 public:
  // Throws std::runtime_error if the files have no template for the node, and Python is not asked.
  FusedKernel(const Ort& ort, const OrtKernelInfo* info, std::string op, const Setup& setup,
              const std::vector<AttributeName>& names, const std::vector<size_t>& numbers);
  ~FusedKernel();
  FusedKernel(const FusedKernel&) = delete;
  FusedKernel& operator=(const FusedKernel&) = delete;

  void compute(OrtKernelContext* context);
  // Returns text such as "layer_norm 'node' (float32[2,3], float32[3])".
  std::string describe(const Key* key) const;
  static int64_t alive();
  // Returns the nodes of all sessions that ask Python for templates and have none yet.
  static std::vector<NewNode> new_nodes();

  // Calls `function` with the node that has this number, unless the node is gone; it is not deleted during the call.
  static void with(uint64_t id, const std::function<void(FusedKernel&)>& function);
  // Returns the inputs at which the node, or an equal one, ran since the last call, and how often, if runs are counted.
  std::vector<std::pair<Key, uint64_t>> take_runs();
  // The number that the next node gets; numbers ascend.
  static uint64_t next_number();
  // Nodes from this number on belong to sessions that Python makes templates for; those without any do not ask for one.
  static void expect_templates(uint64_t first);
  // Closes the sessions that ran the body of a node, once runs and equal nodes need them no more.
  static void drop_bodies(uint64_t id);
  // Makes later runs use the plans of a template, which replaces a template for the same inputs.
  void give(const std::string& bytes);

 private:
  using SharedPlan = Template::SharedPlan;
  using Templates = std::vector<std::shared_ptr<Template>>;

  void read_node(const OrtKernelInfo* info);
  void take_templates(const OrtKernelInfo* info, const std::vector<AttributeName>& names);
  void choose_given(const OrtKernelContext* context);
  // Calls `plan`, which is Template::known_plan or Template::plan, on the fitting templates until one returns a plan.
  // Returns null if none does.
  SharedPlan first_fit(const Templates& templates, const Key& key, SharedPlan (Template::*plan)(const Key&)) const;
  // Returns null unless a call of `make` has made the plan for these inputs.
  SharedPlan known(const Key& key);
  // Returns null if the body must run, because no kernel can or none is compiled yet.
  SharedPlan make(const Key& key, Stream stream);
  // Requests a template from Python, with further flags of settings, and returns its plan for these inputs.  Returns
  // null if Python says that the body must run.
  SharedPlan plan_by_python(const Key& key, Stream stream, int settings);
  PlanRequest request_for(const Key& key, int settings = 0) const;
  std::shared_ptr<Template> ask(const Key& key, Stream stream, int settings);
  // Returns how a node runs for these inputs until a template is added: by a plan, or, if it is null, as its body.
  // Returns nothing if that is not decided.
  std::optional<SharedPlan> for_now(const Key& key);
  // Lets the node run so until a template is added, unless one was added since `added_` had the value `added`.
  SharedPlan keep_for_now(const Key& key, const SharedPlan& plan, uint64_t added);
  void run_body(OrtKernelContext* context, const Key& key, const std::vector<const OrtValue*>& inputs, Stream stream);
  // Returns the session that runs the body for inputs of these dtypes and ranks on a stream.
  std::shared_ptr<BodySession> body_for(const Key& key, Stream stream);
  std::shared_ptr<Template> add(const std::string& bytes);

  const Ort& ort_;
  const Driver& driver_;
  const uint64_t id_;
  const std::string op_;
  const Setup& setup_;
  const std::vector<size_t>& numbers_;  // see OperatorName
  std::string node_, attributes_;
  std::vector<int64_t> output_dtypes_;
  std::vector<bool> constants_;  // by input: whether the model holds its values
  OrtAllocator* allocator_ = nullptr;
  const OrtMemoryInfo* memory_ = nullptr;
  int device_ = 0;
  std::shared_mutex mutex_;  // guards the next four members
  Templates templates_;      // shared by equal nodes; the newest is the first
  uint64_t added_ = 0;       // the number of templates that were added
  std::map<Key, SharedPlan> for_now_;  // see for_now
  std::map<BodyKey, std::shared_ptr<BodySession>> bodies_;  // see body_for
  std::vector<std::shared_ptr<const GivenTemplate>> given_;  // the templates of plan files
  std::once_flag given_are_chosen_;                          // set when choose_given has added them to templates_
};

}  // namespace onnxfuse
