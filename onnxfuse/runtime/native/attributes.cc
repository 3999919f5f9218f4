// The attributes of a node as bytes, which read_attributes in plan_bytes.py reads.
#include "attributes.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <stdexcept>

namespace onnxfuse {
namespace {

constexpr const char* kListOfNames = "attributes";  // an attribute that lists the names of all others

void append(std::string& text, const void* data, size_t size) { text.append(static_cast<const char*>(data), size); }

void append_header(std::string& text, const AttributeName& attribute, size_t count) {
  const auto size = static_cast<uint32_t>(attribute.name.size());
  const auto items = static_cast<uint32_t>(count);
  append(text, &size, sizeof size);
  text += attribute.name;
  // An empty list of floats is written as one of ints, because Python cannot tell the two apart.
  text += count || attribute.type != 'F' ? attribute.type : 'I';
  append(text, &items, sizeof items);
}

// Returns whether a status is a success, and releases it.
bool is_ok(const Ort& ort, OrtStatus* status) {
  if (status) ort.ReleaseStatus(status);
  return !status;
}

bool read_text(const Ort& ort, const OrtKernelInfo* info, const char* name, std::string& value) {
  size_t size = 0;
  if (!is_ok(ort, ort.KernelInfoGetAttribute_string(info, name, nullptr, &size))) return false;
  value.resize(size);
  if (!is_ok(ort, ort.KernelInfoGetAttribute_string(info, name, value.data(), &size))) return false;
  value.resize(std::strlen(value.c_str()));
  return true;
}

template <class Item, class Get>
void append_list(std::string& text, const Ort& ort, const AttributeName& attribute, Get get) {
  size_t count = 0;
  if (!is_ok(ort, get(nullptr, &count))) return;
  std::vector<Item> items(count);
  if (count && !is_ok(ort, get(items.data(), &count))) return;
  append_header(text, attribute, count);
  append(text, items.data(), count * sizeof(Item));
}

}  // namespace

std::vector<OperatorName> read_operators(std::string_view text) {
  std::vector<OperatorName> operators;
  std::istringstream lines{std::string(text)};
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    OperatorName op;
    words >> op.name;
    for (std::string word; words >> word;) {
      const size_t size = word.size();
      if (word[0] == '@') {
        op.numbers.push_back(std::stoul(word.substr(1)));
        continue;
      }
      if (size < 3 || word[size - 2] != ':' || !std::strchr("ifsIF", word[size - 1])) {
        throw std::runtime_error("operator " + op.name + " has an attribute '" + word + "' without a type");
      }
      op.attributes.push_back({word.substr(0, size - 2), word[size - 1]});
    }
    operators.push_back(std::move(op));
  }
  return operators;
}

std::string text_attribute(const Ort& ort, const OrtKernelInfo* info, const char* name) {
  std::string value;
  return read_text(ort, info, name, value) ? value : "";
}

std::string read_attributes(const Ort& ort, const OrtKernelInfo* info, const std::vector<AttributeName>& names) {
  std::string text;
  for (const AttributeName& attribute : names) {
    const char* name = attribute.name.c_str();
    int64_t integer = 0;
    float real = 0;
    std::string value;
    if (attribute.type == 'i' && is_ok(ort, ort.KernelInfoGetAttribute_int64(info, name, &integer))) {
      append_header(text, attribute, 1);
      append(text, &integer, sizeof integer);
    } else if (attribute.type == 'f' && is_ok(ort, ort.KernelInfoGetAttribute_float(info, name, &real))) {
      append_header(text, attribute, 1);
      append(text, &real, sizeof real);
    } else if (attribute.type == 's' && read_text(ort, info, name, value)) {
      append_header(text, attribute, value.size());
      text += value;
    } else if (attribute.type == 'I') {
      append_list<int64_t>(text, ort, attribute, [&](int64_t* data, size_t* count) {
        return ort.KernelInfoGetAttributeArray_int64(info, name, data, count);
      });
    } else if (attribute.type == 'F') {
      append_list<float>(text, ort, attribute, [&](float* data, size_t* count) {
        return ort.KernelInfoGetAttributeArray_float(info, name, data, count);
      });
    }
  }
  return text;
}

std::string node_identity(const Ort& ort, const OrtKernelInfo* info, std::vector<AttributeName> names) {
  std::istringstream present(text_attribute(ort, info, kListOfNames));
  for (std::string word; present >> word;) {
    const auto has_name = [&](const AttributeName& each) { return each.name == word; };
    if (std::none_of(names.begin(), names.end(), has_name)) {
      throw std::runtime_error("its attribute " + word + " is unknown to the plan files; the model was changed");
    }
  }
  const auto by_name = [](const AttributeName& a, const AttributeName& b) { return a.name < b.name; };
  std::sort(names.begin(), names.end(), by_name);
  const auto is_list = [](const AttributeName& each) { return each.name == kListOfNames; };
  names.erase(std::remove_if(names.begin(), names.end(), is_list), names.end());
  return read_attributes(ort, info, names);
}

}  // namespace onnxfuse
