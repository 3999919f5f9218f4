// y = (x - mean(x)) * scale per row of D elements, for tests of the provider: in one step, or in two through scratch.
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

// One element a thread, as an elementwise operator has it.
extern "C" __global__ void row_scale(const float* x, const float* scale, float* y) {
  const int column = blockIdx.y * BLOCK + threadIdx.x;
  if (column >= D) return;
  const long long place = static_cast<long long>(blockIdx.x) * D + column;
  y[place] = x[place] * scale[column];
}

extern "C" __global__ void row_means(const float* x, float* means) {
  const float mean = mean_of(x + static_cast<long long>(blockIdx.x) * D);
  if (threadIdx.x == 0) means[blockIdx.x] = mean;
}

extern "C" __global__ void row_center_by(const float* x, const float* scale, const float* means, float* y) {
  const long long start = static_cast<long long>(blockIdx.x) * D;
  write(x + start, scale, y + start, means[blockIdx.x]);
}
