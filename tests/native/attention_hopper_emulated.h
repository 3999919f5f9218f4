// Runs the attention that is defined above in the translation unit, without an additive mask. `arguments` point to the
// kernel's parameters, as those of cuLaunchKernel do; the parameter of a tensor map is a pointer to a Map.
template <class... Parameters, size_t... I>
void call(void (*kernel)(Parameters...), const void* const* arguments, std::index_sequence<I...>) {
    kernel(*static_cast<const Parameters*>(arguments[I])...);
}

template <class... Parameters>
void call(void (*kernel)(Parameters...), const void* const* arguments) {
    call(kernel, arguments, std::index_sequence_for<Parameters...>());
}

extern "C" void run(const void* const* arguments, int grid, int shared_bytes) {
    emulated::launch(grid, 1, shared_bytes, [=] { call(attention_hopper, arguments); });
}
