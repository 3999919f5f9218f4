// The functions that Python calls to run plans without onnxruntime, and to ask cuBLASLt and cuDNN about their steps.
#include <algorithm>
#include <stdexcept>

#include "cublas_lt.h"
#include "cudnn_backend.h"
#include "export.h"
#include "run_steps.h"
#include "steps.h"

using namespace onnxfuse;

// Opens cuBLASLt at `path`, or, if `path` is null, the one that this process has loaded.
ONNXFUSE_EXPORT const char* onnxfuse_open_cublaslt(const char* path) {
  return reported([&] { CublasLt::open(path); });
}

ONNXFUSE_EXPORT const char* onnxfuse_cublaslt_version(uint64_t* version) {
  return reported([&] { *version = CublasLt::get().cublasLtGetVersion(); });
}

// Opens cuDNN at `path`, or, if `path` is null, the one that this process has loaded.
ONNXFUSE_EXPORT const char* onnxfuse_open_cudnn(const char* path) {
  return reported([&] { Cudnn::open(path); });
}

ONNXFUSE_EXPORT const char* onnxfuse_cudnn_version(uint64_t* version) {
  return reported([&] { *version = Cudnn::get().cudnnGetVersion(); });
}

// Reads a plan for a node with the inputs of `key`; onnxfuse_free_plan frees it.
ONNXFUSE_EXPORT const char* onnxfuse_read_plan(int device, const char* bytes, size_t size, const int64_t* key,
                                               size_t key_size, const int64_t* output_dtypes, size_t outputs,
                                               void** plan, uint64_t* scratch_bytes) {
  return reported([&] {
    const Driver& driver = Driver::get();
    const CurrentContext current(driver, driver.context_of(device));
    const Key inputs(key, key + key_size);
    *plan = new Plan(read_plan({bytes, size}, types_of(inputs), {output_dtypes, output_dtypes + outputs}, device));
    *scratch_bytes = static_cast<Plan*>(*plan)->scratch_bytes;
  });
}

ONNXFUSE_EXPORT void onnxfuse_free_plan(void* plan) { delete static_cast<Plan*>(plan); }

// Starts a plan's steps `times` times on a stream.
ONNXFUSE_EXPORT const char* onnxfuse_run(int device, const void* plan, void* const* inputs, void* const* outputs,
                                         void* scratch, void* stream, uint64_t times) {
  return reported([&] {
    const auto& own = *static_cast<const Plan*>(plan);
    if (reinterpret_cast<uintptr_t>(scratch) % kScratchAlignment != 0) {
      throw std::runtime_error("scratch memory must start at a multiple of 256 bytes");
    }
    if (!scratch && own.scratch_bytes) {
      throw std::runtime_error("the plan needs " + std::to_string(own.scratch_bytes) + " bytes of scratch memory");
    }
    for (uint64_t i = 0; i < times; ++i) run_steps(own, device, inputs, outputs, scratch, stream);
  });
}

// Writes up to `max_count` algorithms for a product, nine words each: the algorithm's eight and its workspace in bytes.
ONNXFUSE_EXPORT const char* onnxfuse_algorithms(int device, const char* matmul, size_t size, int max_count,
                                                uint64_t* words, int* found) {
  return reported([&] {
    const Driver& driver = Driver::get();
    const CurrentContext current(driver, driver.context_of(device));
    WordReader reader({matmul, size});
    const auto results = CublasMatmul::algorithms(read_matmul(reader, nullptr), device, max_count);
    for (const HeuristicResult& result : results) {
      words = std::copy_n(result.algorithm.words, 8, words);
      *words++ = result.workspace_bytes;
    }
    *found = static_cast<int>(results.size());
  });
}

// Writes up to `max_count` engines for a convolution, `width` words each: workspace in bytes, whether reading a plan
// with the engine compiles a kernel, and the number of the engine's words, which follow.
ONNXFUSE_EXPORT const char* onnxfuse_engines(int device, const char* convolution, size_t size, int max_count,
                                             size_t width, int64_t* words, int* found) {
  return reported([&] {
    if (width < 3 + kMaxEngineWords) throw std::runtime_error("an engine does not fit into the rows of words");
    const Driver& driver = Driver::get();
    const CurrentContext current(driver, driver.context_of(device));
    WordReader reader({convolution, size});
    const auto results = CudnnConvolution::engines(read_convolution(reader, nullptr), device, max_count);
    for (const ProposedEngine& result : results) {
      words[0] = static_cast<int64_t>(result.workspace_bytes);
      words[1] = result.compiles;
      words[2] = static_cast<int64_t>(result.engine.size());
      std::copy(result.engine.begin(), result.engine.end(), words + 3);
      words += width;
    }
    *found = static_cast<int>(results.size());
  });
}
