// A stand-in for libcublasLt, which computes products on the host, column-major as the real library.
// The functions fake_... tell tests about the last product, and let the heuristic find nothing.
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <vector>

#include "fake_values.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum Status { kSuccess = 0, kAllocationFailed = 3, kInvalidValue = 7, kNotSupported = 15 };

struct Operation {
  int32_t compute, scale, transpose, epilogue;
  const void* bias;
};
struct Layout {
  int32_t type, batch;
  uint64_t rows, columns;
  int64_t leading, batch_stride;
};
struct Preference {
  uint64_t workspace;
  uint32_t reductions, alignment[4];
};
struct Algorithm {
  uint64_t mark, workspace, rest[6];
};
struct Result {
  Algorithm algorithm;
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
};

constexpr uint64_t kMark = 0xA160;  // the first word of every algorithm
std::atomic<int64_t> handles{0}, products{0};
std::atomic<int> no_algorithm{0};
std::mutex mutex;
Operation last_operation{}, asked_operation{};
Preference last_preference{};

float activate(int epilogue, float value) {
  if (epilogue & 2) return value > 0 ? value : 0;
  if (epilogue & 32) return 0.5f * value * (1 + std::tanh(0.7978845608f * (value + 0.044715f * value * value * value)));
  return value;
}

bool fits(const Operation& op, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
  const uint64_t m = op.transpose ? a.columns : a.rows, k = op.transpose ? a.rows : a.columns;
  const bool leading = a.leading >= static_cast<int64_t>(a.rows) && b.leading >= static_cast<int64_t>(b.rows) &&
                       c.leading >= static_cast<int64_t>(c.rows) && d.leading >= static_cast<int64_t>(d.rows);
  return leading && b.rows == k && d.rows == m && d.columns == b.columns && c.rows == m && c.columns == d.columns &&
         a.type == b.type && c.type == d.type && a.batch == b.batch && a.batch == c.batch && a.batch == d.batch;
}

template <class T>
int set(T& field, const void* value, size_t size) {
  if (size != sizeof field) return kInvalidValue;
  std::memcpy(&field, value, size);
  return kSuccess;
}

}  // namespace

#ifndef VERSION
#define VERSION 12'09'03
#endif
EXPORT size_t cublasLtGetVersion() { return VERSION; }
EXPORT const char* cublasLtGetStatusName(int status) {
  return status == kInvalidValue ? "CUBLAS_STATUS_INVALID_VALUE" : nullptr;
}
EXPORT const char* cublasLtGetStatusString(int) { return "said the stand-in"; }
EXPORT int cublasLtCreate(void** handle) {
  *handle = reinterpret_cast<void*>(++handles);
  return kSuccess;
}
EXPORT int cublasLtMatmulDescInit_internal(Operation* operation, size_t size, int compute, int scale) {
  if (size < sizeof *operation) return kAllocationFailed;
  *operation = {compute, scale, 0, 1, nullptr};
  return kSuccess;
}
EXPORT int cublasLtMatmulDescSetAttribute(Operation* operation, int attribute, const void* value, size_t size) {
  if (attribute == 3) return set(operation->transpose, value, size);
  if (attribute == 7) return set(operation->epilogue, value, size);
  if (attribute == 8) return set(operation->bias, value, size);
  return kInvalidValue;
}
EXPORT int cublasLtMatrixLayoutInit_internal(Layout* layout, size_t size, int type, uint64_t rows, uint64_t columns,
                                             int64_t leading) {
  if (size < sizeof *layout) return kAllocationFailed;
  *layout = {type, 1, rows, columns, leading, 0};
  return kSuccess;
}
EXPORT int cublasLtMatrixLayoutSetAttribute(Layout* layout, int attribute, const void* value, size_t size) {
  if (attribute == 5) return set(layout->batch, value, size);
  if (attribute == 6) return set(layout->batch_stride, value, size);
  return kInvalidValue;
}
EXPORT int cublasLtMatmulPreferenceInit_internal(Preference* preference, size_t size) {
  if (size < sizeof *preference) return kAllocationFailed;
  *preference = {0, 7, {256, 256, 256, 256}};
  return kSuccess;
}
EXPORT int cublasLtMatmulPreferenceSetAttribute(Preference* preference, int attribute, const void* value, size_t size) {
  if (attribute == 1) return set(preference->workspace, value, size);
  if (attribute == 3) return set(preference->reductions, value, size);
  if (attribute >= 5 && attribute <= 8) return set(preference->alignment[attribute - 5], value, size);
  return kInvalidValue;
}
// Offers up to five algorithms; the first needs no workspace, each other one 1024 bytes more than the one before it.
EXPORT int cublasLtMatmulAlgoGetHeuristic(void* handle, const Operation* operation, const Layout* a, const Layout* b,
                                          const Layout* c, const Layout* d, const Preference* preference, int max_count,
                                          Result* results, int* found) {
  if (!handle || !fits(*operation, *a, *b, *c, *d)) return kInvalidValue;
  std::lock_guard<std::mutex> lock(mutex);
  last_preference = *preference;
  asked_operation = *operation;
  if (no_algorithm) return kNotSupported;
  *found = 0;
  for (uint64_t i = 0; i < 5 && *found < max_count && i * 1024 <= preference->workspace; ++i) {
    results[(*found)++] = {{kMark, i * 1024, {}}, i * 1024, kSuccess, 1.0f, {}};
  }
  return kSuccess;
}
EXPORT int cublasLtMatmulAlgoCheck(void*, const Operation*, const Layout*, const Layout*, const Layout*, const Layout*,
                                   const Algorithm* algorithm, Result* result) {
  if (algorithm->mark != kMark) return kInvalidValue;
  result->workspace = algorithm->workspace;
  return kSuccess;
}
EXPORT int cublasLtMatmul(void* handle, const Operation* operation, const float* alpha, const void* a, const Layout* at,
                          const void* b, const Layout* bt, const float* beta, const void* c, const Layout* ct, void* d,
                          const Layout* dt, const Algorithm* algorithm, void* workspace, size_t workspace_bytes,
                          void*) {
  // The real library requires an alignment of 256 bytes; onnxruntime's allocator for the CPU aligns to 64.
  const bool has_workspace = workspace_bytes >= algorithm->workspace && (workspace || !algorithm->workspace) &&
                    reinterpret_cast<uintptr_t>(workspace) % 64 == 0;
  if (!handle || algorithm->mark != kMark || !has_workspace) return kInvalidValue;
  if (!fits(*operation, *at, *bt, *ct, *dt)) return kInvalidValue;
  if (algorithm->workspace) std::memset(workspace, 0xEE, algorithm->workspace);
  const int64_t m = static_cast<int64_t>(dt->rows), n = static_cast<int64_t>(dt->columns);
  const auto k = static_cast<int64_t>(bt->rows);
  for (int64_t batch = 0; batch < dt->batch; ++batch) {
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        float sum = 0;
        for (int64_t l = 0; l < k; ++l) {
          const int64_t index = operation->transpose ? l + i * at->leading : i + l * at->leading;
          sum += load_value(a, at->type, batch * at->batch_stride + index) *
                 load_value(b, bt->type, batch * bt->batch_stride + l + j * bt->leading);
        }
        sum *= *alpha;
        if (*beta != 0) sum += *beta * load_value(c, ct->type, batch * ct->batch_stride + i + j * ct->leading);
        if (operation->epilogue & 4) sum += load_value(operation->bias, dt->type, i);
        store_value(d, dt->type, batch * dt->batch_stride + i + j * dt->leading, activate(operation->epilogue, sum));
      }
    }
  }
  ++products;
  std::lock_guard<std::mutex> lock(mutex);
  last_operation = *operation;
  return kSuccess;
}

EXPORT int64_t fake_products() { return products; }
EXPORT int64_t fake_handles() { return handles; }
// Lets the heuristic find nothing, or something again.
EXPORT void fake_no_algorithm(int on) { no_algorithm = on; }
// Writes compute type, transpose and epilogue of the last product; and of the last question to the heuristic reductions,
// four alignments and the bias's address modulo 256.
EXPORT void fake_last_product(int* out) {
  std::lock_guard<std::mutex> lock(mutex);
  const int words[] = {last_operation.compute, last_operation.transpose, last_operation.epilogue,
                       static_cast<int>(last_preference.reductions), static_cast<int>(last_preference.alignment[0]),
                       static_cast<int>(last_preference.alignment[1]), static_cast<int>(last_preference.alignment[2]),
                       static_cast<int>(last_preference.alignment[3]),
                       static_cast<int>(reinterpret_cast<uintptr_t>(asked_operation.bias) % 256)};
  std::memcpy(out, words, sizeof words);
}
