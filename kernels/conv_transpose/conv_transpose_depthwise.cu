// Depthwise transposed convolutions of channels-last tensors by CUDA cores, in fp32: one, two or three spatial axes.
//
//   y = epilogue(conv_transpose(x, w))    each channel of y reads the same channel of x
//
// A thread computes STRIDE_W neighbouring pixels of y, of WIDTH neighbouring channels. The pixels have different
// phases, which are their columns modulo STRIDE_W. These pixels begin at a multiple of STRIDE_W, counted from the start
// of the padding before y. So the phase to which a tap contributes, and the tap's offset in x, are compile-time
// constants. A row of x that the pixels read is loaded once for all of them, and the loads of neighbouring threads
// overlap, so that L1 serves them. The taps along the depth and the height that contribute to a row of y are found when
// the kernel runs (conv_phases.cuh).
//
// Macros:
//   KERNEL_D, KERNEL_H, KERNEL_W, STRIDE_*, DILATION_*    sizes, strides and dilations of the filter, by axis; 1 for
//                      axes that are missing
//   CHANNELS           channels of x and y; w is (taps, CHANNELS)
//   WIDTH              elements of an access: divides CHANNELS
//   THREADS            threads of a block
//   WEIGHTS_CONSTANT   1: no kernel writes w
//   and those of epilogue.cuh
#include "types.cuh"
#include "epilogue.cuh"
#include "conv_phases.cuh"
#include "conv_sizes.cuh"

using i64 = long long;

constexpr int VECTORS = CHANNELS / WIDTH;                            // vectors per pixel
constexpr int OFFSETS = (KERNEL_W - 1) * DILATION_W / STRIDE_W + 1;  // pixels of a row of x that a thread reads
static_assert(CHANNELS % WIDTH == 0, "a pixel is whole vectors");

using Row = float[STRIDE_W][WIDTH];

// Adds the products of a row of x to the pixels of y. `at` is the last pixel of x that these pixels of y read; x and w
// begin at the thread's channels.
__device__ __forceinline__ void add_row(Row& sums, const T* x, const T* w, int at, int width) {
#pragma unroll
    for (int offset = 0; offset < OFFSETS; ++offset) {
        if (unsigned(at - offset) >= unsigned(width)) continue;
        float values[WIDTH];
        unpack(load_cached<WIDTH>(x + i64(at - offset) * CHANNELS), values);
#pragma unroll
        for (int tap = 0; tap < KERNEL_W; ++tap) {
            if (tap * DILATION_W / STRIDE_W != offset) continue;
            float (&sum)[WIDTH] = sums[tap * DILATION_W % STRIDE_W];
            float weights[WIDTH];
            unpack(load_cached<WIDTH, WEIGHTS_CONSTANT>(w + tap * CHANNELS), weights);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) sum[i] = fmaf(values[i], weights[i], sum[i]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    conv_transpose_depthwise(const T* x, const T* w, EpilogueOperands epilogue_operands,
                             ConvSizes sizes PROGRAM_PARAMETERS) {
    const int d = sizes.x.d, h = sizes.x.h, width = sizes.x.w, y_d = sizes.y.d, y_h = sizes.y.h, y_w = sizes.y.w;
    const int pad_w = sizes.pads.w;
    const int begin = pad_w / STRIDE_W, across = (y_w - 1 + pad_w) / STRIDE_W + 1 - begin;
    const i64 index = i64(blockIdx.x) * THREADS + threadIdx.x;
    const i64 strip = index / VECTORS, row = strip / across;
    release_successor();
    wait_for_predecessor();
    if (row >= i64(sizes.images) * y_d * y_h) return;
    const int channel = index % VECTORS * WIDTH, at = begin + int(strip % across), y_row = row % y_h;
    const AxisTaps<KERNEL_D, STRIDE_D, DILATION_D> along_d(row / y_h % y_d, sizes.pads.d);
    const AxisTaps<KERNEL_H, STRIDE_H, DILATION_H> along_h(y_row, sizes.pads.h);
    const i64 image = row / y_h / y_d;

    Row sums = {};
#pragma unroll 1
    for (int i = 0; i < along_d.count; ++i) {
        const int x_d = along_d.from - i * along_d.SHIFT;
        if (unsigned(x_d) >= unsigned(d)) continue;
#pragma unroll 1
        for (int j = 0; j < along_h.count; ++j) {
            const int x_h = along_h.from - j * along_h.SHIFT;
            if (unsigned(x_h) >= unsigned(h)) continue;
            const i64 tap = (along_d.tap(i) * KERNEL_H + along_h.tap(j)) * KERNEL_W;
            add_row(sums, x + ((image * d + x_d) * h + x_h) * width * CHANNELS + channel, w + tap * CHANNELS + channel,
                    at, width);
        }
    }
    const Epilogue epilogue{epilogue_operands, {PROGRAM_ARGUMENTS}};
#pragma unroll
    for (int phase = 0; phase < STRIDE_W; ++phase) {
        const int column = at * STRIDE_W + phase - pad_w;
        if (unsigned(column) < unsigned(y_w))
            epilogue.finish(sums[phase], sums[phase], row * y_w + column, channel, CHANNELS);
    }
}
