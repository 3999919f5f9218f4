// A matrix product by cuBLASLt, as a step of a plan.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "address.h"
#include "cublas_lt.h"
#include "driver.h"

namespace onnxfuse {

// Row-major: `stride` elements from row to row, `batch_stride` from one product of the batch to the next.
struct Matrix {
  Address address;
  DataType type;
  int64_t rows, columns, stride, batch_stride;
};

enum class Activation : int64_t { kNone = 0, kRelu = 1, kGeluTanh = 2 };

// What plan.Matmul says in Python.
struct Product {
  Matrix x, w, y, c;
  bool transposed = false, has_c = false, has_bias = false, has_workspace = false, has_algorithm = false;
  bool tf32 = false, aligned = false;
  int32_t batch = 1;
  Address bias{}, workspace{};
  Activation activation = Activation::kNone;
  uint64_t workspace_bytes = 0;
  Algorithm algorithm{};
};

// "a product of float16 4x8 and 8x3", for messages
std::string describe(const Product& product);

// cuBLASLt is column-major: it is told to compute the transposed y from the transposed x and w, which are the same
// memory.  All is made here once; a run passes addresses.
class Matmul {
 public:
  // Needs the device's context; where the product names no algorithm, cuBLASLt's first choice is taken.
  // Throws std::runtime_error where cuBLASLt cannot do it.
  static Matmul make(const Product& product, int device);
  void run(const Memory& memory, Stream stream) const;
  // Up to `most` algorithms within the product's workspace, the best by cuBLASLt's own estimate first.
  static std::vector<HeuristicResult> algorithms(const Product& product, int device, int most);

 private:
  Matmul(const Product& product, int device);
  std::vector<HeuristicResult> heuristic(int most) const;
  void check_algorithm() const;
  LayoutDescriptor layout(const Matrix& matrix) const;

  const CublasLt& lt_;
  void* handle_;
  Product product_;
  MatmulDescriptor operation_;
  LayoutDescriptor x_, w_, y_, c_;
};

}  // namespace onnxfuse
