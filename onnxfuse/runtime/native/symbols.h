// Functions of libraries that are opened while a process runs.
#pragma once
#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace onnxfuse {

// Sets `symbol` to a function of a library.  Throws if a required one is missing; the message begins with `owner`.
template <class Symbol>
void find_symbol(void* library, const char* owner, const char* name, Symbol& symbol, bool required = true) {
  symbol = reinterpret_cast<Symbol>(dlsym(library, name));
  if (!symbol && required) throw std::runtime_error(std::string(owner) + " has no function " + name);
}

}  // namespace onnxfuse
