// Runs the GEMM above it in the translation unit: maps of x, w, up, y, residual; pointers are null where absent.
extern "C" void run(const Map* maps, T* y, const T* residual, const T* bias, const T* up_bias, const T* scale, int m,
                    int n, int k, int group, int grid, int cluster, int shared_bytes) {
    emulated::launch(grid, cluster, shared_bytes, [=] {
        const TensorMap x{maps}, w{maps + 1}, up{maps + 2}, results{maps + 3}, added{maps + 4};
#if SPLIT > 1
        gemm_hopper_split(x, w,
#if GATED
                          up,
#endif
                          y, residual, bias, up_bias, scale, 0, 0, m, n, k, group);
#else
        gemm_hopper(x, w,
#if GATED
                    up,
#endif
                    results,
#if RESIDUAL
                    added,
#endif
                    bias, up_bias, scale, 0, 0, m, n, k, group);
#endif
    });
}
