// Runs the attention that is defined above in the translation unit, of one head without an additive mask. `maps` are
// those of queries, keys, values and the result; `integers` and `numbers` are the arguments of these types in order, as
// many as the kernel takes.
template <int... I, int... N>
void run_kernel(const Map* maps, const int* integers, const float* numbers, const void* mask, const void* bias,
                const void* slopes, std::integer_sequence<int, I...>, std::integer_sequence<int, N...>) {
    attention_hopper(TensorMap{maps}, TensorMap{maps + 1}, TensorMap{maps + 2}, TensorMap{maps + 3}, integers[I]...,
                     numbers[N]..., static_cast<const MASK_T*>(mask), 0, 0, 0, static_cast<const BIAS_T*>(bias), 0, 0,
                     0, static_cast<const SLOPE_T*>(slopes), nullptr, nullptr, 0, 0);
}

extern "C" void run(const Map* maps, const int* integers, const float* numbers, const void* mask, const void* bias,
                    const void* slopes, int grid, int shared_bytes) {
    emulated::launch(grid, 1, shared_bytes, [=] {
        run_kernel(maps, integers, numbers, mask, bias, slopes, std::make_integer_sequence<int, 7>(),
                   std::make_integer_sequence<int, NUMBERS>());
    });
}
