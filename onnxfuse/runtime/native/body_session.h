// Sessions that run bodies of nodes: the ONNX functions that the nodes call.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "driver.h"
#include "ort_api.h"
#include "plan.h"

namespace onnxfuse {

// A stream of the present context, and an event that lets it wait for other streams, or other streams for it.
class SideStream {
 public:
  explicit SideStream(const Driver& driver);
  ~SideStream();
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;
  // Lets later work of `later` begin after the present work of `earlier`.
  void order(Stream earlier, Stream later) const;

  Stream stream = nullptr;

 private:
  const Driver& driver_;
  Event event_ = nullptr;
};

// A session of onnxruntime whose model is one call of a function.  It has a stream of its own, because onnxruntime
// destroys the streams of a session before the nodes, and this session closes with its nodes.
//
// Runs are waited for until a CUDA graph captures one, because onnxruntime frees the host memory from which operators
// such as LSTM copy to the GPU only at the end of such runs; a graph reads this memory in each replay.
class BodySession {
 public:
  // `model` has inputs i0, i1, … and outputs o0, o1, ….  Throws std::runtime_error if onnxruntime refuses it.
  BodySession(const Ort& ort, const std::string& provider, int device, bool tf32, std::string_view model);
  ~BodySession();
  BodySession(const BodySession&) = delete;
  BodySession& operator=(const BodySession&) = delete;

  using TakeOutput = std::function<void(size_t index, OrtValue* value)>;
  // Runs the body after the earlier work of `stream`, and before its later work.  `take` gets the outputs, which lie in
  // `memory`; it must read them on that stream.  Threads run one after another.
  // `numbers` has the indices of inputs that are one int32 in host memory, in ascending order.
  void run(const std::vector<const OrtValue*>& inputs, const std::vector<size_t>& numbers, const OrtMemoryInfo* memory,
           Stream stream, const TakeOutput& take);
  // Runs the body once on zeros from host memory, because onnxruntime loads libraries and kernels in the first run:
  // 0.1 s for cuBLAS.
  void run_on_zeros(const std::vector<TensorType>& inputs);

 private:
  void open(const std::string& provider, bool tf32, std::string_view model);
  void bind_inputs(OrtIoBinding* binding, const std::vector<const OrtValue*>& inputs,
                   const std::vector<size_t>& numbers) const;
  void take_outputs(const OrtIoBinding* binding, const TakeOutput& take) const;

  const Ort& ort_;
  const Driver& driver_;
  const int device_;
  std::unique_ptr<SideStream> side_;
  OrtSession* session_ = nullptr;
  std::vector<std::string> inputs_, outputs_;  // their names
  std::mutex mutex_;                           // held by runs
  bool captured_ = false;      // whether a CUDA graph holds a run
  bool holds_memory_ = false;  // whether host memory of a run is not freed
};

}  // namespace onnxfuse
