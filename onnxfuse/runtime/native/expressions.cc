// Reading and evaluating expressions.
#include "expressions.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace onnxfuse {
namespace {

constexpr int64_t kMaxRows = 1 << 20;

// The numbers of onnxfuse.runtime.expressions.Op.
enum Op : int64_t {
  kConstant, kSize, kAdd, kSubtract, kMultiply, kFloorDivide, kModulo, kMinimum, kMaximum, kLess, kLessEqual, kEqual,
  kGcd, kCeiling, kFloor, kFloatBits, kRealLess, kRealLessEqual, kRealEqual, kRealConstant, kToReal, kRealAdd,
  kRealSubtract, kRealMultiply, kRealDivide, kRealMinimum, kRealMaximum, kPower, kOps
};

double real(int64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

int64_t bits(double value) {
  int64_t word;
  std::memcpy(&word, &value, sizeof word);
  return word;
}

int64_t float_bits(double value) {
  const auto rounded = static_cast<float>(value);
  uint32_t word;
  std::memcpy(&word, &rounded, sizeof word);
  return word;
}

// As in Python, floor_divide rounds down, and the result of modulo has the sign of the divisor.  Both return 0 if the
// divisor is 0, which the guards of a plan (conditions on sizes) exclude.
int64_t floor_divide(int64_t a, int64_t b) {
  if (b == 0) return 0;
  if (b == -1) return a == std::numeric_limits<int64_t>::min() ? a : -a;
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

int64_t modulo(int64_t a, int64_t b) {
  if (b == 0 || b == -1) return 0;
  const int64_t rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

// Converts a real number without a fraction to an integer; `overflowed` becomes true if the number does not fit.  The
// result is 0 for NaN and infinity, as after a division by 0, which the guards of a plan (conditions on sizes) exclude.
int64_t integer(double value, bool& overflowed) {
  if (!std::isfinite(value)) return 0;
  if (value >= -9e18 && value <= 9e18) return static_cast<int64_t>(value);
  overflowed = true;
  return 0;
}

int64_t evaluate_integers(int64_t op, int64_t a, int64_t b, bool& overflowed) {
  int64_t result = 0;
  switch (op) {
    case kAdd: overflowed |= __builtin_add_overflow(a, b, &result); return result;
    case kSubtract: overflowed |= __builtin_sub_overflow(a, b, &result); return result;
    case kMultiply: overflowed |= __builtin_mul_overflow(a, b, &result); return result;
    case kFloorDivide: return floor_divide(a, b);
    case kModulo: return modulo(a, b);
    case kMinimum: return std::min(a, b);
    case kMaximum: return std::max(a, b);
    case kLess: return a < b;
    case kLessEqual: return a <= b;
    case kEqual: return a == b;
    case kGcd: return std::gcd(a, b);
    default: return bits(static_cast<double>(a));  // kToReal
  }
}

int64_t evaluate_reals(int64_t op, double a, double b, bool& overflowed) {
  switch (op) {
    case kCeiling: return integer(std::ceil(a), overflowed);
    case kFloor: return integer(std::floor(a), overflowed);
    case kFloatBits: return float_bits(a);
    case kRealLess: return a < b;
    case kRealLessEqual: return a <= b;
    case kRealEqual: return a == b;
    case kRealAdd: return bits(a + b);
    case kRealSubtract: return bits(a - b);
    case kRealMultiply: return bits(a * b);
    case kRealDivide: return bits(a / b);
    case kRealMinimum: return bits(std::min(a, b));
    case kRealMaximum: return bits(std::max(a, b));
    default: return bits(std::pow(a, b));  // kPower
  }
}

bool takes_integers(int64_t op) { return op < kCeiling || op == kToReal; }
bool gives_real(int64_t op) { return op >= kRealConstant; }
bool is_leaf(int64_t op) { return op == kConstant || op == kSize || op == kRealConstant; }
bool is_unary(int64_t op) { return op == kToReal || (op >= kCeiling && op <= kFloatBits); }

}  // namespace

Expressions::Expressions(WordReader& reader, size_t sizes) {
  const size_t count = reader.count("the number of expressions", kMaxRows);
  const auto operand = [&](int64_t op) {
    const int64_t at = reader.next("an expression's operand", 0, static_cast<int64_t>(rows_.size()) - 1);
    if (gives_real(rows_[static_cast<size_t>(at)].op) == takes_integers(op)) {
      malformed("an expression's operand is of the wrong kind");
    }
    return at;
  };
  for (size_t i = 0; i < count; ++i) {
    Row row{reader.next("an operation", 0, kOps - 1), 0, 0};
    if (row.op == kSize) {
      row.a = reader.next("the number of a size", 0, static_cast<int64_t>(sizes) - 1);
    } else if (is_leaf(row.op)) {
      row.a = static_cast<int64_t>(reader.bits("a constant"));
    } else {
      row.a = operand(row.op);
    }
    row.b = is_leaf(row.op) || is_unary(row.op) ? reader.next("an unused operand", 0, 0) : operand(row.op);
    rows_.push_back(row);
  }
}

std::vector<int64_t> Expressions::evaluate(const std::vector<int64_t>& sizes, bool& overflowed) const {
  std::vector<int64_t> values(rows_.size());
  for (size_t i = 0; i < rows_.size(); ++i) {
    const Row& row = rows_[i];
    if (row.op == kSize) {
      values[i] = sizes[static_cast<size_t>(row.a)];
    } else if (is_leaf(row.op)) {
      values[i] = row.a;
    } else {
      const int64_t a = values[static_cast<size_t>(row.a)], b = values[static_cast<size_t>(row.b)];
      values[i] = takes_integers(row.op) ? evaluate_integers(row.op, a, b, overflowed)
                                         : evaluate_reals(row.op, real(a), real(b), overflowed);
    }
  }
  return values;
}

double Expressions::miss(size_t expression, bool answer, const std::vector<int64_t>& values) const {
  if ((values[expression] != 0) == answer) return 0.0;
  const Row& row = rows_[expression];
  if (row.op != kRealLess && row.op != kRealLessEqual && row.op != kRealEqual) return HUGE_VAL;
  const double a = real(values[static_cast<size_t>(row.a)]), b = real(values[static_cast<size_t>(row.b)]);
  const double less = std::min(a, b), greater = std::max(a, b);
  return less > 0 ? greater / less - 1 : HUGE_VAL;
}

}  // namespace onnxfuse
