// A kernel to run before a programmatic dependent launch: it releases that launch at once, and writes its inputs late.
#include "types.cuh"

__device__ void copy(const unsigned char* from, unsigned char* to, long long bytes) {
  for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < bytes; i += gridDim.x * blockDim.x) to[i] = from[i];
}

__device__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// After `wait` nanoseconds: kept = written, which shows what the next kernel wrote too early, and read = source, which
// the next kernel must not have read before.
extern "C" __global__ void late(const unsigned char* source, const unsigned char* written, unsigned char* read,
                                unsigned char* kept, long long read_bytes, long long written_bytes, long long wait) {
  release_successor();
  const unsigned long long start = nanoseconds();
  while (nanoseconds() - start < wait) __nanosleep(1000);
  copy(written, kept, written_bytes);
  copy(source, read, read_bytes);
}

// y = x, of `bytes`; if RACING, without waiting for the kernel before it.
extern "C" __global__ void copy_early(const unsigned char* x, unsigned char* y, long long bytes) {
#if !RACING
  wait_for_predecessor();
#endif
  copy(x, y, bytes);
}
