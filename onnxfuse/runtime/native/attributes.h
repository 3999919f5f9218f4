// The attributes of fused nodes as bytes: for Python, which reads them, and for plan files, which hold equal bytes.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ort_api.h"

namespace onnxfuse {

struct AttributeName {
  std::string name;
  char type;  // i, f or s: an integer, a float or a string; I or F: a list of integers or floats
  bool operator==(const AttributeName& other) const { return name == other.name && type == other.type; }
};

// A fused operator, the attributes that its nodes may have, and its inputs that are numbers.  An input that is a number
// is one int32 in host memory; for plans, it has the shape (number).
struct OperatorName {
  std::string name;
  std::vector<AttributeName> attributes;
  std::vector<size_t> numbers;  // indices of inputs, in ascending order
};

// Reads lines such as "layer_norm axis:i epsilon:f", in which @3 says that input 3 is a number.  Throws
// std::runtime_error if the letter after an attribute's name is none of the types in AttributeName.
std::vector<OperatorName> read_operators(std::string_view lines);

// Returns a string attribute of a node; an empty string if it has none.
std::string text_attribute(const Ort& ort, const OrtKernelInfo* info, const char* name);

// Returns those attributes of a node that are in `names`, each as u32 size of its name, name, u8 type, u32 count, and
// then as many int64, float32 or bytes.
std::string read_attributes(const Ort& ort, const OrtKernelInfo* info, const std::vector<AttributeName>& names);

// Returns the bytes that identify a node in plan files, as `node_identity` in plan_file.py writes them: the result of
// `read_attributes` for all names in alphabetical order, except the attribute `attributes`.  Throws std::runtime_error
// if the node has an attribute that is not in `names`.
std::string node_identity(const Ort& ort, const OrtKernelInfo* info, std::vector<AttributeName> names);

}  // namespace onnxfuse
