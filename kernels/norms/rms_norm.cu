// y = x / sqrt(mean(x^2) + epsilon) * scale over the last axis.
//
// The kernel moves each element of x and y once, 4 bytes an element in fp16; weights stay in registers or L1.
// It computes in fp32, where squares of fp16's largest values do not overflow.
#include "types.cuh"
#include "rows.cuh"
#include "norm.cuh"

ROW_KERNEL rms_norm(const X_T* x, const SCALE_T* scale, Y_T* y, float epsilon, long long rows PROGRAM_PARAMETERS) {
    each_row(Norm<Squares>{x, nullptr, scale, nullptr, y, nullptr, epsilon, STREAMED, {{PROGRAM_ARGUMENTS}}}, rows);
}
