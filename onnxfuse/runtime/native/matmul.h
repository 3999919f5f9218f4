// A matrix product by cuBLASLt, as a step of a plan.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cublas_lt.h"
#include "driver.h"
#include "pointer.h"

namespace onnxfuse {

// A row-major matrix.
struct Matrix {
  Pointer pointer;
  DataType type;
  int64_t rows, columns;
  int64_t stride;        // elements from one row to the next
  int64_t batch_stride;  // elements from one product of the batch to the next
};

enum class Activation : int64_t { kNone = 0, kRelu = 1, kGeluTanh = 2 };

// A product as plan.Matmul describes it in Python.
struct Matmul {
  Matrix x, w, y, c;
  bool transposed = false, has_c = false, has_bias = false, has_workspace = false, has_algorithm = false;
  bool tf32 = false, aligned = false;
  int32_t batch = 1;
  Pointer bias{}, workspace{};
  Activation activation = Activation::kNone;
  uint64_t workspace_bytes = 0;
  Algorithm algorithm{};
};

// Returns text such as "a product of float16 4x8 and 8x3".
std::string describe(const Matmul& matmul);

// A product with cuBLASLt's descriptors, which are made once; a run passes addresses.
// cuBLASLt is column-major: it computes the transposed y from the transposed x and w, which are the same memory.
class CublasMatmul {
 public:
  // Takes cuBLASLt's first choice if the product names no algorithm.  The device's context must be current.
  // Throws std::runtime_error if cuBLASLt cannot compute the product.
  static CublasMatmul make(const Matmul& matmul, int device);
  void run(const Memory& memory, Stream stream) const;
  // Returns up to `max_count` algorithms within the product's workspace, the best by cuBLASLt's own estimate first.
  static std::vector<HeuristicResult> algorithms(const Matmul& matmul, int device, int max_count);

 private:
  CublasMatmul(const Matmul& matmul, int device);
  std::vector<HeuristicResult> heuristic(int max_count) const;
  void check_algorithm() const;
  LayoutDescriptor layout(const Matrix& matrix) const;

  const CublasLt& lt_;
  void* handle_;
  Matmul matmul_;
  MatmulDescriptor operation_;
  LayoutDescriptor x_, w_, y_, c_;
};

}  // namespace onnxfuse
