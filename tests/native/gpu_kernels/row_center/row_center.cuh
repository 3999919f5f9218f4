// Return the sum of `value` over the threads of a block.
#pragma once

__device__ float row_sum(float value) {
  __shared__ float partial[BLOCK];
  partial[threadIdx.x] = value;
  __syncthreads();
  for (int half = BLOCK / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    __syncthreads();
  }
  const float total = partial[0];
  __syncthreads();
  return total;
}
