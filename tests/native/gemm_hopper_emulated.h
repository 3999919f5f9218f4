// Runs the GEMM that is defined above in the translation unit. `maps` are those of x, w (three), up, y (three),
// residual and gate; PRODUCTS says how many of three are used, and pointers of absent operands are null. `given` has the
// arguments of the program in the epilogue, each an address or a number of 64 bits.
#ifndef PROGRAM_GIVEN
#define PROGRAM_GIVEN
#endif
#if X_GATE
#define GATE_GIVEN , factors, pixels
#else
#define GATE_GIVEN
#endif
extern "C" void run(const Map* maps, T* const* outputs, const T* residual, const T* const* biases, const T* up_bias,
                    const T* scale, int m, const int* sizes, int k, int group, int pixels, int grid, int cluster,
                    int shared_bytes, void* const* given) {
    emulated::launch(grid, cluster, shared_bytes, [=] {
        const TensorMap x{maps}, w{maps + 1}, w_2{maps + 2}, w_3{maps + 3}, up{maps + 4};
        const T *bias = biases[0], *bias_2 = biases[1], *bias_3 = biases[2];
        const int n = sizes[0], n_2 = sizes[1], n_3 = sizes[2];
        const TensorMap added{maps + 8}, factors{maps + 9};
#if STORE_BY_THREADS
        T *const results = outputs[0], *const results_2 = outputs[1], *const results_3 = outputs[2];
#else
        const TensorMap results{maps + 5}, results_2{maps + 6}, results_3{maps + 7};
#endif
#if SPLIT_K > 1
        gemm_hopper_split(x, w,
#if GATED
                          up,
#endif
                          outputs[0], residual, bias, up_bias, scale, 0, 0, m, n, k, group GATE_GIVEN PROGRAM_GIVEN);
#else
        gemm_hopper(x, EACH_PRODUCT(, w),
#if GATED
                    up,
#endif
                    EACH_PRODUCT(, results),
#if HAS_RESIDUAL
                    added,
#endif
                    EACH_PRODUCT(, bias), up_bias, scale, 0, 0, m, EACH_PRODUCT(, n), k, group GATE_GIVEN PROGRAM_GIVEN);
#endif
    });
}
