// Plans run without onnxruntime, and questions to cuBLASLt: for tests, and for hosts that choose between algorithms.
#include <algorithm>
#include <stdexcept>

#include "cublas_lt.h"
#include "export.h"
#include "run.h"
#include "steps.h"

using namespace onnxfuse;

// Open cuBLASLt at `path`, or where that is null the one that this process has loaded.
ONNXFUSE_EXPORT const char* onnxfuse_open_cublaslt(const char* path) {
  return reported([&] { CublasLt::open(path); });
}

ONNXFUSE_EXPORT const char* onnxfuse_cublaslt_version(uint64_t* version) {
  return reported([&] { *version = CublasLt::get().cublasLtGetVersion(); });
}

// A plan for a node with the inputs of `key`; to be freed by onnxfuse_free_plan.
ONNXFUSE_EXPORT const char* onnxfuse_read_plan(int device, const char* bytes, size_t size, const int64_t* key,
                                               size_t key_size, const int64_t* output_dtypes, size_t outputs,
                                               void** plan, uint64_t* scratch_bytes) {
  return reported([&] {
    const Driver& driver = Driver::get();
    const Current current(driver, driver.context_of(device));
    const Key inputs(key, key + key_size);
    *plan = new Plan(read_plan({bytes, size}, types_of(inputs), {output_dtypes, output_dtypes + outputs}, device));
    *scratch_bytes = static_cast<Plan*>(*plan)->scratch_bytes;
  });
}

ONNXFUSE_EXPORT void onnxfuse_free_plan(void* plan) { delete static_cast<Plan*>(plan); }

// Start a plan's steps `times` times on a stream.
ONNXFUSE_EXPORT const char* onnxfuse_run(int device, const void* plan, void* const* inputs, void* const* outputs,
                                         void* scratch, void* stream, uint64_t times) {
  return reported([&] {
    const auto& steps = *static_cast<const Plan*>(plan);
    if (reinterpret_cast<uintptr_t>(scratch) % kScratchAlignment != 0) {
      throw std::runtime_error("scratch memory must begin at a multiple of 256 bytes");
    }
    if (!scratch && steps.scratch_bytes) {
      throw std::runtime_error("the plan needs " + std::to_string(steps.scratch_bytes) + " bytes of scratch memory");
    }
    for (uint64_t i = 0; i < times; ++i) run(steps, device, inputs, outputs, scratch, stream);
  });
}

// Up to `most` algorithms for a product, as nine words each: the algorithm's eight, and its workspace in bytes.
ONNXFUSE_EXPORT const char* onnxfuse_algorithms(int device, const char* product, size_t size, int most,
                                                uint64_t* words, int* found) {
  return reported([&] {
    const Driver& driver = Driver::get();
    const Current current(driver, driver.context_of(device));
    Reader reader({product, size});
    const auto results = Matmul::algorithms(read_product(reader, nullptr), device, most);
    for (const HeuristicResult& result : results) {
      words = std::copy_n(result.algorithm.words, 8, words);
      *words++ = result.workspace_bytes;
    }
    *found = static_cast<int>(results.size());
  });
}
