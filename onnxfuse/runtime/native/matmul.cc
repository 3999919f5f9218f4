// A matrix product by cuBLASLt.
#include "matmul.h"

#include <algorithm>
#include <stdexcept>

namespace onnxfuse {
namespace {

const char* name_of(DataType type) {
  return type == kFloat16 ? "float16" : type == kBfloat16 ? "bfloat16" : "float32";
}

uint32_t bytes_of(DataType type) { return type == kFloat32 ? 4 : 2; }

int epilogue_of(const Matmul& matmul) {
  int epilogue = matmul.has_bias ? kEpilogueBias : 0;
  if (matmul.activation == Activation::kRelu) epilogue |= kEpilogueRelu;
  if (matmul.activation == Activation::kGeluTanh) epilogue |= kEpilogueGelu;
  return epilogue ? epilogue : kEpilogueNone;
}

// Returns the largest power of two, up to 256, that is known to divide the address of a matrix or bias.
uint32_t alignment_of(const Matmul& matmul, const Pointer& pointer, DataType type) {
  const uint64_t start = pointer.kind == MemoryKind::kScratch ? kScratchAlignment
                         : matmul.aligned                ? kAlignment
                                                          : bytes_of(type);
  return static_cast<uint32_t>(pointer.offset ? std::min(start, pointer.offset & -pointer.offset) : start);
}

uint32_t alignment_of(const Matmul& matmul, const Matrix& matrix) {
  return alignment_of(matmul, matrix.pointer, matrix.type);
}

// The partial products of split-k algorithms must be added in float32.  If the result has 16 bits, the schemes that add
// them in the result's memory or dtype are excluded.
uint32_t reductions_of(const Matmul& matmul) {
  return matmul.y.type == kFloat32 ? kReduceInPlace | kReduceComputeType | kReduceOutputType : kReduceComputeType;
}

}  // namespace

std::string describe(const Matmul& matmul) {
  const auto sizes = [](const Matrix& matrix) {
    return std::to_string(matrix.rows) + "x" + std::to_string(matrix.columns);
  };
  return std::string("a product of ") + name_of(matmul.x.type) + " " + sizes(matmul.x) + " and " + sizes(matmul.w) +
         (matmul.transposed ? " transposed" : "");
}

CublasMatmul::CublasMatmul(const Matmul& matmul, int device)
    : lt_(CublasLt::get()), handle_(lt_.handle_of(device)), matmul_(matmul) {
  const bool tf32 = matmul.tf32 && matmul.x.type == kFloat32;
  lt_.check(lt_.cublasLtMatmulDescInit_internal(&operation_, sizeof operation_, tf32 ? kComputeTf32 : kCompute32,
                                                kFloat32),
            "cublasLtMatmulDescInit");
  const int32_t transpose = matmul.transposed, epilogue = epilogue_of(matmul);
  const auto set = [&](int attribute, const auto& value) {
    lt_.check(lt_.cublasLtMatmulDescSetAttribute(&operation_, attribute, &value, sizeof value),
              "cublasLtMatmulDescSetAttribute");
  };
  set(kTransposeA, transpose);
  set(kEpilogue, epilogue);
  // A run sets the bias's address.  Until then the descriptor holds an address of the same alignment, because cuBLASLt
  // chooses algorithms by alignment: on an H200, 4096x3072x768 with a bias in float16 takes 29.6 us, and 155.9 us if
  // the bias is aligned to 2 bytes only.
  if (matmul.has_bias) set(kBiasPointer, kScratchAlignment + alignment_of(matmul, matmul.bias, matmul.y.type));
  w_ = layout(matmul.w);
  x_ = layout(matmul.x);
  y_ = layout(matmul.y);
  c_ = matmul.has_c ? layout(matmul.c) : y_;
}

CublasMatmul CublasMatmul::make(const Matmul& matmul, int device) {
  CublasMatmul prepared(matmul, device);
  if (matmul.has_algorithm) {
    prepared.check_algorithm();
  } else {
    const std::vector<HeuristicResult> found = prepared.heuristic(1);
    if (found.empty()) {
      throw std::runtime_error("cuBLASLt has no algorithm for " + describe(matmul) + " within " +
                               std::to_string(matmul.workspace_bytes) + " bytes of workspace");
    }
    prepared.matmul_.algorithm = found.front().algorithm;
  }
  return prepared;
}

std::vector<HeuristicResult> CublasMatmul::algorithms(const Matmul& matmul, int device, int max_count) {
  return CublasMatmul(matmul, device).heuristic(max_count);
}

LayoutDescriptor CublasMatmul::layout(const Matrix& matrix) const {
  LayoutDescriptor descriptor;
  lt_.check(lt_.cublasLtMatrixLayoutInit_internal(&descriptor, sizeof descriptor, matrix.type,
                                                  static_cast<uint64_t>(matrix.columns),
                                                  static_cast<uint64_t>(matrix.rows), matrix.stride),
            "cublasLtMatrixLayoutInit");
  if (matmul_.batch > 1) {
    lt_.check(lt_.cublasLtMatrixLayoutSetAttribute(&descriptor, kBatchCount, &matmul_.batch, sizeof matmul_.batch),
              "cublasLtMatrixLayoutSetAttribute");
    lt_.check(lt_.cublasLtMatrixLayoutSetAttribute(&descriptor, kBatchStride, &matrix.batch_stride,
                                                   sizeof matrix.batch_stride),
              "cublasLtMatrixLayoutSetAttribute");
  }
  return descriptor;
}

std::vector<HeuristicResult> CublasMatmul::heuristic(int max_count) const {
  PreferenceDescriptor preference;
  lt_.check(lt_.cublasLtMatmulPreferenceInit_internal(&preference, sizeof preference), "cublasLtMatmulPreferenceInit");
  const auto set = [&](int attribute, const auto& value) {
    lt_.check(lt_.cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value),
              "cublasLtMatmulPreferenceSetAttribute");
  };
  set(kMaxWorkspace, matmul_.workspace_bytes);
  set(kReductionSchemes, reductions_of(matmul_));
  set(kAlignmentA, alignment_of(matmul_, matmul_.w));
  set(kAlignmentB, alignment_of(matmul_, matmul_.x));
  set(kAlignmentC, alignment_of(matmul_, matmul_.has_c ? matmul_.c : matmul_.y));
  set(kAlignmentD, alignment_of(matmul_, matmul_.y));
  std::vector<HeuristicResult> results(static_cast<size_t>(max_count));
  int found = 0;
  const int code = lt_.cublasLtMatmulAlgoGetHeuristic(handle_, &operation_, &w_, &x_, &c_, &y_, &preference, max_count,
                                                      results.data(), &found);
  if (code == kNotSupported) return {};
  lt_.check(code, "cublasLtMatmulAlgoGetHeuristic");
  results.resize(static_cast<size_t>(found));
  results.erase(std::remove_if(results.begin(), results.end(), [](const auto& result) { return result.status != 0; }),
                results.end());
  return results;
}

void CublasMatmul::check_algorithm() const {
  HeuristicResult result{};
  const int code = lt_.cublasLtMatmulAlgoCheck(handle_, &operation_, &w_, &x_, &c_, &y_, &matmul_.algorithm, &result);
  if (code != 0) lt_.check(code, ("cublasLtMatmulAlgoCheck of " + describe(matmul_)).c_str());
  if (result.workspace_bytes > matmul_.workspace_bytes) {
    throw std::runtime_error("the algorithm for " + describe(matmul_) + " needs " +
                             std::to_string(result.workspace_bytes) + " bytes of workspace, the plan has " +
                             std::to_string(matmul_.workspace_bytes));
  }
}

void CublasMatmul::run(const Memory& memory, Stream stream) const {
  const float alpha = 1, beta = matmul_.has_c ? 1 : 0;
  const MatmulDescriptor* operation = &operation_;
  MatmulDescriptor own;  // a copy with this run's bias address; other threads can run this step too
  if (matmul_.has_bias) {
    const void* bias = memory(matmul_.bias);
    own = operation_;
    lt_.check(lt_.cublasLtMatmulDescSetAttribute(&own, kBiasPointer, &bias, sizeof bias),
              "cublasLtMatmulDescSetAttribute");
    operation = &own;
  }
  void* y = memory(matmul_.y.pointer);
  const void* c = matmul_.has_c ? memory(matmul_.c.pointer) : y;
  void* workspace = matmul_.has_workspace ? memory(matmul_.workspace) : nullptr;
  const int code = lt_.cublasLtMatmul(handle_, operation, &alpha, memory(matmul_.w.pointer), &w_,
                                      memory(matmul_.x.pointer), &x_, &beta, c, &c_, y, &y_, &matmul_.algorithm,
                                      workspace, matmul_.workspace_bytes, stream);
  if (code != 0) lt_.check(code, ("cublasLtMatmul of " + describe(matmul_)).c_str());
}

}  // namespace onnxfuse
