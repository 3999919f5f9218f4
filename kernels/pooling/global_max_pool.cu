// The largest element of each channel of an image; global_pool.cuh divides the pixels among threads.
#include "largest.cuh"
#include "global_pool.cuh"

GLOBAL_POOL_KERNEL global_max_pool(const X_T* x, Y_T* y, int pixels, int parts) {
    global_pool(Largest{}, x, y, pixels, parts);
}
