// sum = x + residual; y = rms_norm(sum), see rms_norm.cu. The sum is written only if another node reads it.
//
// The kernel moves 8 bytes an element in fp16 (6 without the sum): x, residual, y and sum once each.
// It normalizes the sum in fp32, before the sum is rounded to its storage type.
#include "types.cuh"
#include "rows.cuh"
#include "norm.cuh"

ROW_KERNEL add_rms_norm(const X_T* x, const RESIDUAL_T* residual, const SCALE_T* scale, const BIAS_T* bias, Y_T* y,
                        SUM_T* sum, float epsilon, long long rows PROGRAM_PARAMETERS) {
    each_row(Norm<Squares>{x, residual, scale, bias, y, sum, epsilon, STREAMED, {{PROGRAM_ARGUMENTS}}}, rows);
}
