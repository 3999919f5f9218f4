// Writes the operands of a convolution of integers as matrices, for quantized_gemm.cu: a row for each pixel of y with
// the elements of x at all taps, and the weights in rows of the same length.
//
// `columns` is a matrix (pixels, ROW) of bytes: element k of a row is x at tap k / CHANNELS, channel k % CHANNELS, or
// x_zero where the tap is outside x. `rows`, the weights, is a matrix (filters, ROW). ROW is LENGTH = taps * CHANNELS,
// rounded up to 16; the elements after LENGTH are 0. A thread gathers the row of a pixel in unrolled loops, in which
// taps are constants, and the block stores its rows through shared memory. The last blocks write the weights. x is
// (n, d, h, w, CHANNELS), and y has y_d x y_h x y_w pixels for each of n images.
//
// Macros:
//   CHANNELS, KERNEL_*, DILATION_*    as in conv_operands.cuh
//   STRIDE_*, PAD_*                   as in conv_edges.cuh
//   OPERAND    s8 or u8, the type of x and x_zero       X_ZERO     1: x has a zero point; 0: x has none
//   THREADS    threads and pixels of a block            SHARED_PITCH   words from a row to the next in shared memory
#include "types.cuh"
#include "conv_sizes.cuh"

constexpr int TAPS = KERNEL_D * KERNEL_H * KERNEL_W, LENGTH = TAPS * CHANNELS, VECTORS = (LENGTH + 15) / 16;
static_assert(SHARED_PITCH % 8 == 4 && SHARED_PITCH >= 4 * VECTORS, "vectors of eight threads use different banks");

// The sizes, as an argument of the kernel; columns.py writes the fields in this order.
struct Sizes {
    int pixels, filters;
    Position x, y;
};

// Writes one row of the matrix that is multiplied by the weights: the elements of x that a pixel of y reads.
__device__ __forceinline__ void gather(u32* row, const OPERAND* x, u32 zero, int pixel, const Sizes& of) {
    const int line = pixel / of.y.w, plane = line / of.y.h, image = plane / of.y.d;
    const int w = (pixel - line * of.y.w) * STRIDE_W - PAD_W, h = (line - plane * of.y.h) * STRIDE_H - PAD_H;
    const int d = (plane - image * of.y.d) * STRIDE_D - PAD_D;
    const OPERAND* from = x + size_t(image) * of.x.d * of.x.h * of.x.w * CHANNELS;
#pragma unroll
    for (int vector = 0; vector < VECTORS; ++vector) {
        u32 words[4] = {};
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int k = vector * 16 + i, tap = k / CHANNELS;
            if (k >= LENGTH) break;
            const int at_w = w + tap % KERNEL_W * DILATION_W, at_h = h + tap / KERNEL_W % KERNEL_H * DILATION_H;
            const int at_d = d + tap / (KERNEL_W * KERNEL_H) * DILATION_D;
            const bool inside = u32(at_w) < u32(of.x.w) && u32(at_h) < u32(of.x.h) && u32(at_d) < u32(of.x.d);
            const u32 byte = inside ? u8(from[((at_d * of.x.h + at_h) * of.x.w + at_w) * CHANNELS + k % CHANNELS])
                                    : zero;
            words[i / 4] |= byte << 8 * (i % 4);
        }
        reinterpret_cast<uint4*>(row)[vector] = uint4{words[0], words[1], words[2], words[3]};
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    quantized_columns(const OPERAND* x, const OPERAND* x_zero, const s8* w, uint4* columns, uint4* rows, Sizes sizes) {
    __shared__ __align__(16) u32 memory[THREADS * SHARED_PITCH];
    release_successor();
    wait_for_predecessor();
    const int first = blockIdx.x * THREADS, count = min(sizes.pixels - first, THREADS);
    if (count > 0) {
        const u32 zero = X_ZERO ? u8(*x_zero) : 0;
        gather(memory + threadIdx.x * SHARED_PITCH, x, zero, min(first + int(threadIdx.x), sizes.pixels - 1), sizes);
        __syncthreads();
        for (int i = threadIdx.x; i < count * VECTORS; i += THREADS)
            columns[size_t(first) * VECTORS + i] =
                *reinterpret_cast<const uint4*>(memory + i / VECTORS * SHARED_PITCH + i % VECTORS * 4);
        return;
    }
    const int blocks = (sizes.pixels + THREADS - 1) / THREADS, at = (blockIdx.x - blocks) * THREADS + threadIdx.x;
    if (at >= sizes.filters * VECTORS) return;
    u32 words[4] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const int k = at % VECTORS * 16 + i;
        if (k < LENGTH) words[i / 4] |= u32(u8(w[at / VECTORS * LENGTH + k])) << 8 * (i % 4);
    }
    rows[at] = uint4{words[0], words[1], words[2], words[3]};
}
