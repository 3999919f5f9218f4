// Runs the attention that is defined above in the translation unit, of one head without an additive mask. `maps` are
// those of queries, keys, values and the result; `integers` and `numbers` are the arguments of these types in order, as
// many as the kernel takes, `tables` are cos, sin and the scale of the queries' norm.
#ifndef ROTATED
#define ROTATED 0
#endif
#if ROTATED
#define ROTATION                                                                                                    \
    , static_cast<const COS_T*>(tables[0]), static_cast<const SIN_T*>(tables[1]), 0,                                \
        static_cast<const SCALE_T*>(tables[2]), epsilon
#else
#define ROTATION
#endif

template <int... I, int... N>
void run_kernel(const Map* maps, const int* integers, const float* numbers, const void* mask, const void* bias,
                const void* slopes, const void* const* tables, float epsilon,
                std::integer_sequence<int, I...>, std::integer_sequence<int, N...>) {
    attention_hopper(TensorMap{maps}, TensorMap{maps + 1}, TensorMap{maps + 2}, TensorMap{maps + 3}, integers[I]...,
                     numbers[N]..., static_cast<const MASK_T*>(mask), 0, 0, 0, static_cast<const BIAS_T*>(bias), 0, 0,
                     0, static_cast<const SLOPE_T*>(slopes), nullptr, nullptr, 0, 0 ROTATION);
}

extern "C" void run(const Map* maps, const int* integers, const float* numbers, const void* mask, const void* bias,
                    const void* slopes, const void* const* tables, float epsilon, int grid, int shared_bytes) {
    emulated::launch(grid, 1, shared_bytes, [=] {
        run_kernel(maps, integers, numbers, mask, bias, slopes, tables, epsilon, std::make_integer_sequence<int, 7>(),
                   std::make_integer_sequence<int, NUMBERS>());
    });
}
