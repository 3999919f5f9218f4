// y = (x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias over the last axis.
//
// The kernel moves each element of x and y once, 4 bytes an element in fp16; weights stay in registers or L1.
// It computes in fp32; the struct Moments of statistics.cuh computes mean and variance.
#include "types.cuh"
#include "rows.cuh"
#include "norm.cuh"

ROW_KERNEL layer_norm(const X_T* x, const SCALE_T* scale, const BIAS_T* bias, Y_T* y, float epsilon,
                      long long rows PROGRAM_PARAMETERS) {
    each_row(Norm<Moments>{x, nullptr, scale, bias, y, nullptr, epsilon, STREAMED, {{PROGRAM_ARGUMENTS}}}, rows);
}
