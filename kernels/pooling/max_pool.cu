// The largest element of each window of channels-last tensors; windows are as pooling.cuh has them.
//
// Padding counts as -inf, so that a window without an element gives -inf. A NaN in a window gives NaN.
#include "largest.cuh"
#include "pooling.cuh"

POOL_KERNEL max_pool(const T* x, T* y, int depth, int height, int width, int y_depth, int y_height, int y_width,
                     int pad_d, int pad_h, int pad_w) {
    pool(Largest{}, x, y, {depth, height, width, y_depth, y_height, y_width, pad_d, pad_h, pad_w});
}
