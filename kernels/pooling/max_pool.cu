// The largest element of each window of channels-last tensors; windows are defined in pooling.cuh.
//
// Padding counts as -inf, and a NaN in a window gives NaN. A window without an element, possible with dilations, gives
// the lowest finite number of fp32, as in onnxruntime: in 16 bits that is rounded to -inf, and integers get their
// lowest number.
#include "largest.cuh"
#include "pooling.cuh"

struct LargestOfWindow : Largest {
    PoolSizes sizes;

    __device__ __forceinline__ float finish(float largest, int plane, int row, int column) const {
        if ((DILATION_D == 1 && DILATION_H == 1 && DILATION_W == 1) || largest != initial()) return largest;
        const bool has_element =
            elements_inside<KERNEL_D, DILATION_D>(plane * STRIDE_D - sizes.pad_d, 0, sizes.depth) &&
            elements_inside<KERNEL_H, DILATION_H>(row * STRIDE_H - sizes.pad_h, 0, sizes.height) &&
            elements_inside<KERNEL_W, DILATION_W>(column * STRIDE_W - sizes.pad_w, 0, sizes.width);
        return has_element ? largest : __uint_as_float(0xff7fffffu);
    }
};

POOL_KERNEL max_pool(const T* x, T* y, PoolSizes sizes) { pool(LargestOfWindow{{}, sizes}, x, y, sizes); }
