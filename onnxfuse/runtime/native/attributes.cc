// The attributes of a node as bytes, which read_attributes in plan_bytes.py reads.
#include <cstring>

#include "kernel.h"

namespace onnxfuse {
namespace {

void append(std::string& text, const void* data, size_t size) { text.append(static_cast<const char*>(data), size); }

void append_header(std::string& text, const AttributeName& attribute, size_t count) {
  const auto size = static_cast<uint32_t>(attribute.name.size());
  const auto items = static_cast<uint32_t>(count);
  append(text, &size, sizeof size);
  text += attribute.name;
  text += attribute.type;
  append(text, &items, sizeof items);
}

// Returns whether a status is a success, and releases it.
bool is_ok(const Ort& ort, OrtStatus* status) {
  if (status) ort.ReleaseStatus(status);
  return !status;
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

std::string read_attributes(const Ort& ort, const OrtKernelInfo* info, const std::vector<AttributeName>& names) {
  std::string text;
  for (const AttributeName& attribute : names) {
    const char* name = attribute.name.c_str();
    int64_t integer = 0;
    float real = 0;
    if (attribute.type == 'i' && is_ok(ort, ort.KernelInfoGetAttribute_int64(info, name, &integer))) {
      append_header(text, attribute, 1);
      append(text, &integer, sizeof integer);
    } else if (attribute.type == 'f' && is_ok(ort, ort.KernelInfoGetAttribute_float(info, name, &real))) {
      append_header(text, attribute, 1);
      append(text, &real, sizeof real);
    } else if (attribute.type == 's') {
      std::string value;
      size_t size = 0;
      if (!is_ok(ort, ort.KernelInfoGetAttribute_string(info, name, nullptr, &size))) continue;
      value.resize(size);
      if (!is_ok(ort, ort.KernelInfoGetAttribute_string(info, name, value.data(), &size))) continue;
      value.resize(std::strlen(value.c_str()));
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

}  // namespace onnxfuse
