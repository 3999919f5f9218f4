// cuBLASLt, opened at run time.  The part of its API that we use is declared here, as in cublasLt.h of CUDA 12.9.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "driver.h"

namespace onnxfuse {

// Descriptors are memory that cuBLASLt fills in and never frees.  They have room for later versions: a layout takes 64
// bytes in CUDA 12.9 and 112 in CUDA 13.
struct alignas(16) MatmulDescriptor {
  uint64_t words[64];
};
struct alignas(16) LayoutDescriptor {
  uint64_t words[32];
};
struct alignas(16) PreferenceDescriptor {
  uint64_t words[32];
};
struct Algorithm {
  uint64_t words[8];
};
struct HeuristicResult {
  Algorithm algorithm;
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};
static_assert(sizeof(HeuristicResult) == 96);

enum DataType : int { kFloat32 = 0, kFloat16 = 2, kBfloat16 = 14 };
constexpr int kNotSupported = 15;  // CUBLAS_STATUS_NOT_SUPPORTED
enum ComputeType : int { kCompute32 = 68, kComputeTf32 = 77 };
enum MatmulAttribute : int { kTransposeA = 3, kEpilogue = 7, kBiasPointer = 8 };
enum LayoutAttribute : int { kBatchCount = 5, kBatchStride = 6 };
enum PreferenceAttribute : int {
  kMaxWorkspace = 1,
  kReductionSchemes = 3,
  kAlignmentA = 5,
  kAlignmentB = 6,
  kAlignmentC = 7,
  kAlignmentD = 8,
};
enum EpilogueFlag : int { kEpilogueNone = 1, kEpilogueRelu = 2, kEpilogueBias = 4, kEpilogueGelu = 32 };
enum ReductionScheme : int { kReduceInPlace = 1, kReduceComputeType = 2, kReduceOutputType = 4 };

struct CublasLt {
  // Opens the library at `path`, or, if `path` is null, the one that this process has loaded.  Does nothing if one is
  // open.  Throws std::runtime_error.
  static void open(const char* path);
  // Unless one is open, opens $ONNXFUSE_LIBCUBLASLT, the library that this process has loaded, or the one that the
  // system finds.  Throws std::runtime_error if there is none.
  static const CublasLt& get();

  // Returns the device's handle.  The first call makes the handle: then, the device's context must be current, and no
  // CUDA graph may be captured.
  void* handle_of(int device) const;
  // Throws "<what> failed: CUBLAS_STATUS_… (…)" unless the code is 0.
  void check(int code, const char* what) const;

  std::string path;
  size_t (*cublasLtGetVersion)();
  const char* (*cublasLtGetStatusName)(int);
  const char* (*cublasLtGetStatusString)(int);
  int (*cublasLtCreate)(void** handle);
  int (*cublasLtMatmulDescInit_internal)(MatmulDescriptor*, size_t size, int compute_type, int scale_type);
  int (*cublasLtMatmulDescSetAttribute)(MatmulDescriptor*, int attribute, const void*, size_t size);
  int (*cublasLtMatrixLayoutInit_internal)(LayoutDescriptor*, size_t size, int type, uint64_t rows, uint64_t columns,
                                           int64_t leading);
  int (*cublasLtMatrixLayoutSetAttribute)(LayoutDescriptor*, int attribute, const void*, size_t size);
  int (*cublasLtMatmulPreferenceInit_internal)(PreferenceDescriptor*, size_t size);
  int (*cublasLtMatmulPreferenceSetAttribute)(PreferenceDescriptor*, int attribute, const void*, size_t size);
  int (*cublasLtMatmulAlgoGetHeuristic)(void* handle, const MatmulDescriptor*, const LayoutDescriptor* a,
                                        const LayoutDescriptor* b, const LayoutDescriptor* c, const LayoutDescriptor* d,
                                        const PreferenceDescriptor*, int max_count, HeuristicResult*, int* found);
  int (*cublasLtMatmulAlgoCheck)(void* handle, const MatmulDescriptor*, const LayoutDescriptor* a,
                                 const LayoutDescriptor* b, const LayoutDescriptor* c, const LayoutDescriptor* d,
                                 const Algorithm*, HeuristicResult*);
  int (*cublasLtMatmul)(void* handle, const MatmulDescriptor*, const void* alpha, const void* a,
                        const LayoutDescriptor*, const void* b, const LayoutDescriptor*, const void* beta,
                        const void* c, const LayoutDescriptor*, void* d, const LayoutDescriptor*, const Algorithm*,
                        void* workspace, size_t workspace_bytes, Stream);
};

}  // namespace onnxfuse
