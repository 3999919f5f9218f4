// y = (x - mean(x)) * scale for each row of D elements: in one launch, or in two through scratch memory.
#include "row_center.cuh"

__device__ float mean_of(const float* row) {
  float sum = 0;
  for (int i = threadIdx.x; i < D; i += BLOCK) sum += row[i];
  return row_sum(sum) / D;
}

__device__ void write(const float* row, const float* scale, float* y, float mean) {
  for (int i = threadIdx.x; i < D; i += BLOCK) y[i] = (row[i] - mean) * scale[i];
}

extern "C" __global__ void row_center(const float* x, const float* scale, float* y) {
  const long long start = static_cast<long long>(blockIdx.x) * D;
  write(x + start, scale, y + start, mean_of(x + start));
}

// y = x * scale, one element a thread.
extern "C" __global__ void row_scale(const float* x, const float* scale, float* y) {
  const int column = blockIdx.y * BLOCK + threadIdx.x;
  if (column >= D) return;
  const long long index = static_cast<long long>(blockIdx.x) * D + column;
  y[index] = x[index] * scale[column];
}

extern "C" __global__ void row_means(const float* x, float* means) {
  const float mean = mean_of(x + static_cast<long long>(blockIdx.x) * D);
  if (threadIdx.x == 0) means[blockIdx.x] = mean;
}

extern "C" __global__ void row_center_by(const float* x, const float* scale, const float* means, float* y) {
  const long long start = static_cast<long long>(blockIdx.x) * D;
  write(x + start, scale, y + start, means[blockIdx.x]);
}
