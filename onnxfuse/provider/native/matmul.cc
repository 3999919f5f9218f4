// Matrix products by cuBLASLt.
#include "matmul.h"

#include <algorithm>
#include <stdexcept>

namespace onnxfuse {
namespace {

constexpr uint64_t kAlignment = 16;  // of inputs and outputs that are called aligned

const char* name_of(DataType type) {
  return type == kFloat16 ? "float16" : type == kBfloat16 ? "bfloat16" : "float32";
}

uint32_t bytes_of(DataType type) { return type == kFloat32 ? 4 : 2; }

int epilogue_of(const Product& product) {
  int epilogue = product.has_bias ? kEpilogueBias : 0;
  if (product.activation == Activation::kRelu) epilogue |= kEpilogueRelu;
  if (product.activation == Activation::kGeluTanh) epilogue |= kEpilogueGelu;
  return epilogue ? epilogue : kEpilogueNone;
}

// What the address is known to be a multiple of.
uint32_t alignment_of(const Product& product, const Address& address, DataType type) {
  const uint64_t start = address.place == Place::kScratch ? kScratchAlignment
                         : product.aligned                ? kAlignment
                                                          : bytes_of(type);
  return static_cast<uint32_t>(address.offset ? std::min(start, address.offset & -address.offset) : start);
}

uint32_t alignment_of(const Product& product, const Matrix& matrix) {
  return alignment_of(product, matrix.address, matrix.type);
}

// Parts of a product are added up in fp32, which for 16-bit results excludes schemes that add up in the output.
uint32_t reductions_of(const Product& product) {
  return product.y.type == kFloat32 ? kReduceInPlace | kReduceComputeType | kReduceOutputType : kReduceComputeType;
}

}  // namespace

std::string describe(const Product& product) {
  const auto sizes = [](const Matrix& matrix) {
    return std::to_string(matrix.rows) + "x" + std::to_string(matrix.columns);
  };
  return std::string("a product of ") + name_of(product.x.type) + " " + sizes(product.x) + " and " + sizes(product.w) +
         (product.transposed ? " transposed" : "");
}

Matmul::Matmul(const Product& product, int device)
    : lt_(CublasLt::get()), handle_(lt_.handle_of(device)), product_(product) {
  const bool tf32 = product.tf32 && product.x.type == kFloat32;
  lt_.check(lt_.cublasLtMatmulDescInit_internal(&operation_, sizeof operation_, tf32 ? kComputeTf32 : kCompute32,
                                                kFloat32),
            "cublasLtMatmulDescInit");
  const int32_t transpose = product.transposed, epilogue = epilogue_of(product);
  const auto set = [&](int attribute, const auto& value) {
    lt_.check(lt_.cublasLtMatmulDescSetAttribute(&operation_, attribute, &value, sizeof value),
              "cublasLtMatmulDescSetAttribute");
  };
  set(kTransposeA, transpose);
  set(kEpilogue, epilogue);
  // A run sets the bias's address; until then one that is aligned as it will be, which decides about algorithms:
  // 4096x3072x768 with a bias in float16 takes 29.6 us on an H200, and 155.9 us where the bias has 2 bytes alignment.
  if (product.has_bias) set(kBiasPointer, kScratchAlignment + alignment_of(product, product.bias, product.y.type));
  w_ = layout(product.w);
  x_ = layout(product.x);
  y_ = layout(product.y);
  c_ = product.has_c ? layout(product.c) : y_;
}

Matmul Matmul::make(const Product& product, int device) {
  Matmul matmul(product, device);
  if (product.has_algorithm) {
    matmul.check_algorithm();
  } else {
    const std::vector<HeuristicResult> found = matmul.heuristic(1);
    if (found.empty()) {
      throw std::runtime_error("cuBLASLt has no algorithm for " + describe(product) + " within " +
                               std::to_string(product.workspace_bytes) + " bytes of workspace");
    }
    matmul.product_.algorithm = found.front().algorithm;
  }
  return matmul;
}

std::vector<HeuristicResult> Matmul::algorithms(const Product& product, int device, int most) {
  return Matmul(product, device).heuristic(most);
}

LayoutDescriptor Matmul::layout(const Matrix& matrix) const {
  LayoutDescriptor descriptor;
  lt_.check(lt_.cublasLtMatrixLayoutInit_internal(&descriptor, sizeof descriptor, matrix.type,
                                                  static_cast<uint64_t>(matrix.columns),
                                                  static_cast<uint64_t>(matrix.rows), matrix.stride),
            "cublasLtMatrixLayoutInit");
  if (product_.batch > 1) {
    lt_.check(lt_.cublasLtMatrixLayoutSetAttribute(&descriptor, kBatchCount, &product_.batch, sizeof product_.batch),
              "cublasLtMatrixLayoutSetAttribute");
    lt_.check(lt_.cublasLtMatrixLayoutSetAttribute(&descriptor, kBatchStride, &matrix.batch_stride,
                                                   sizeof matrix.batch_stride),
              "cublasLtMatrixLayoutSetAttribute");
  }
  return descriptor;
}

std::vector<HeuristicResult> Matmul::heuristic(int most) const {
  PreferenceDescriptor preference;
  lt_.check(lt_.cublasLtMatmulPreferenceInit_internal(&preference, sizeof preference), "cublasLtMatmulPreferenceInit");
  const auto set = [&](int attribute, const auto& value) {
    lt_.check(lt_.cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value),
              "cublasLtMatmulPreferenceSetAttribute");
  };
  set(kMaxWorkspace, product_.workspace_bytes);
  set(kReductionSchemes, reductions_of(product_));
  set(kAlignmentA, alignment_of(product_, product_.w));
  set(kAlignmentB, alignment_of(product_, product_.x));
  set(kAlignmentC, alignment_of(product_, product_.has_c ? product_.c : product_.y));
  set(kAlignmentD, alignment_of(product_, product_.y));
  std::vector<HeuristicResult> results(static_cast<size_t>(most));
  int found = 0;
  const int code = lt_.cublasLtMatmulAlgoGetHeuristic(handle_, &operation_, &w_, &x_, &c_, &y_, &preference, most,
                                                      results.data(), &found);
  if (code == kNotSupported) return {};
  lt_.check(code, "cublasLtMatmulAlgoGetHeuristic");
  results.resize(static_cast<size_t>(found));
  results.erase(std::remove_if(results.begin(), results.end(), [](const auto& result) { return result.status != 0; }),
                results.end());
  return results;
}

void Matmul::check_algorithm() const {
  HeuristicResult result{};
  const int code = lt_.cublasLtMatmulAlgoCheck(handle_, &operation_, &w_, &x_, &c_, &y_, &product_.algorithm, &result);
  if (code != 0) lt_.check(code, ("cublasLtMatmulAlgoCheck of " + describe(product_)).c_str());
  if (result.workspace_bytes > product_.workspace_bytes) {
    throw std::runtime_error("the algorithm for " + describe(product_) + " needs " +
                             std::to_string(result.workspace_bytes) + " bytes of workspace, the plan has " +
                             std::to_string(product_.workspace_bytes));
  }
}

void Matmul::run(const Memory& memory, Stream stream) const {
  const float alpha = 1, beta = product_.has_c ? 1 : 0;
  const MatmulDescriptor* operation = &operation_;
  MatmulDescriptor own;  // the bias's address is part of the descriptor, and other threads run this step too
  if (product_.has_bias) {
    const void* bias = memory(product_.bias);
    own = operation_;
    lt_.check(lt_.cublasLtMatmulDescSetAttribute(&own, kBiasPointer, &bias, sizeof bias),
              "cublasLtMatmulDescSetAttribute");
    operation = &own;
  }
  void* y = memory(product_.y.address);
  const void* c = product_.has_c ? memory(product_.c.address) : y;
  void* workspace = product_.has_workspace ? memory(product_.workspace) : nullptr;
  const int code = lt_.cublasLtMatmul(handle_, operation, &alpha, memory(product_.w.address), &w_,
                                      memory(product_.x.address), &x_, &beta, c, &c_, y, &y_, &product_.algorithm,
                                      workspace, product_.workspace_bytes, stream);
  if (code != 0) lt_.check(code, ("cublasLtMatmul of " + describe(product_)).c_str());
}

}  // namespace onnxfuse
