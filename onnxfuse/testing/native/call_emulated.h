// Calls a kernel that is compiled for the CPU; `arguments` are the addresses of its arguments, as cuLaunchKernel has
// them. The argument of a tensor map is a pointer to a Map.
#pragma once
#include <utility>

namespace emulated {

template <class... Parameters, size_t... I>
void call(void (*kernel)(Parameters...), const void* const* arguments, std::index_sequence<I...>) {
    kernel(*static_cast<const Parameters*>(arguments[I])...);
}

template <class... Parameters>
void call(void (*kernel)(Parameters...), const void* const* arguments) {
    call(kernel, arguments, std::index_sequence_for<Parameters...>());
}

}  // namespace emulated
