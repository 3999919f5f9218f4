// Depthwise convolutions of channels-last tensors by CUDA cores, in fp32, for filters of stride and dilation 1 along
// the height; one or two spatial axes.
//
//   y = epilogue(conv(x, w))    each channel of y reads the same channel of x
//
// A thread computes a strip of `strip_rows` x TW positions of y of VEC neighbouring channels, and keeps the weights of
// these channels in registers. It slides down the rows of x: a row is loaded while earlier rows are used, is widened to
// fp32 once, and is added to the KH rows of y that read it. The oldest of these rows of y is then complete. A row of y
// that used row r of the filter uses row r + 1 with the next row of x. Its sums move to the registers of row r + 1,
// too: the first fma reads one register and writes another, so that the loop over rows needs neither copies nor
// unrolling. The first and the last KH - 1 rows of x contribute to fewer rows of the strip and have separate code,
// because a branch per row of the filter makes the compiler copy all sums. A block is a patch of BH x BW such strips:
// neighbouring threads read some elements of x in common, which come from L1.
//
// A strip has at least KH - 1 rows, and y is no smaller than a strip.
//
// Macros:
//   CHANNELS            channels of x and y
//   VEC                 elements of an access: divides CHANNELS
//   BX, BW, BH          threads of a block: vectors of channels, strips along the width and along the height
//   TW                  positions of y of a thread along the width
//   AHEAD               rows of x that are loaded ahead: 1 or 2
//   KH, KW, SW, DW      filter sizes, and stride and dilation along the width
//   W_HWIO              1: w is (KH, KW, CHANNELS); 0: (CHANNELS, KH, KW)
//   WEIGHTS_CONSTANT    1: no kernel writes w
//   MIN_BLOCKS          blocks that must fit on a multiprocessor: a bound on registers
//   EIGHT_BITS          1: x is integers of 8 bits and w is s8, whose sums are exact; they are scaled before the
//                       epilogue, which may have a program. With it: OPERAND, W_SCALES and X_ZERO as in conv_stem.cu
//   and those of epilogue.cuh
#include "types.cuh"
#include "epilogue.cuh"

#define PIECE KW
#include "conv_columns.cuh"
#include "conv_sizes.cuh"

constexpr int THREADS = BX * BW * BH;
#if EIGHT_BITS
using W_T = s8;

// Scales and the zero point, as an argument of the kernel; the host writes the fields in this order.
struct Integers {
    const T *x_scale, *w_scale;
    const X_T* x_zero;
};
#define INTEGER_PARAMETERS , Integers integers PROGRAM_PARAMETERS
#else
using W_T = T;
#define INTEGER_PARAMETERS
#endif

static_assert(AHEAD == 1 || AHEAD == 2, "rows ahead move to the front");

// ---- weights -----------------------------------------------------------------------------------------------------

struct Weights {
    float taps[KH][KW][VEC];

    __device__ __forceinline__ void load(const W_T* w, int channel) {
#pragma unroll
        for (int r = 0; r < KH; ++r)
#pragma unroll
            for (int s = 0; s < KW; ++s) load_tap(w, r * KW + s, channel, taps[r][s]);
    }

    __device__ __forceinline__ static void load_tap(const W_T* w, int tap, int channel, float (&to)[VEC]) {
        if constexpr (W_HWIO) {
            unpack(load_cached<VEC, WEIGHTS_CONSTANT>(w + tap * CHANNELS + channel), to);
        } else {
#pragma unroll
            for (int v = 0; v < VEC; ++v) {
                float one[1];
                unpack(load_cached<1, WEIGHTS_CONSTANT>(w + i64(channel + v) * (KH * KW) + tap), one);
                to[v] = one[0];
            }
        }
    }
};

// ---- sums --------------------------------------------------------------------------------------------------------

// Sums of the rows of y that read the current row of x. sums[r] belongs to the row of y that multiplies the current row
// of x by row r of the filter.
struct Sums {
    float rows[KH][TW][VEC];

    // Adds the products of a row of x and row `r` of the filter to the sums that the previous row of x left in row
    // r - 1, and writes the new sums to row r.
    __device__ __forceinline__ void add(int r, const float (&values)[COLUMNS][VEC], const Weights& weights) {
#pragma unroll
        for (int s = 0; s < KW; ++s)
#pragma unroll
            for (int t = 0; t < TW; ++t)
#pragma unroll
                for (int v = 0; v < VEC; ++v) {
                    const float before = s ? rows[r][t][v] : r ? rows[r - 1][t][v] : 0.0f;
                    rows[r][t][v] = fmaf(values[t * SW + s * DW][v], weights.taps[r][s][v], before);
                }
    }
};

// Makes the compiler keep a pointer in registers; otherwise each access computes its address from kernel arguments.
template <class P>
__device__ __forceinline__ void keep(P*& pointer) {
    asm volatile("" : "+l"(pointer));
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    conv_depthwise_sliding(const X_T* x, const W_T* w, EpilogueOperands epilogue_operands, ConvSizes sizes,
                           int strip_rows INTEGER_PARAMETERS) {
    const int height = sizes.x.h, width = sizes.x.w, out_height = sizes.y.h, out_width = sizes.y.w;
    const int vector = threadIdx.x % BX, strip = threadIdx.x / BX;
    const int channel = (blockIdx.y * BX + vector) * VEC;
    const int patches_w = (out_width + TW * BW - 1) / (TW * BW);
    const int patches_h = (out_height + strip_rows * BH - 1) / (strip_rows * BH);
    const int patch = blockIdx.x % (patches_w * patches_h), image = blockIdx.x / (patches_w * patches_h);
    const int strip_row = (patch / patches_w * BH + strip / BW) * strip_rows;
    const int strip_column = (patch % patches_w * BW + strip % BW) * TW;
    release_successor();
    if (channel >= CHANNELS || strip_row >= out_height || strip_column >= out_width) return;

    // The last strips have full size too: they recompute some positions of the strips before them.
    const int out_row = min(strip_row, out_height - strip_rows), out_column = min(strip_column, out_width - TW);
    int row = out_row - sizes.pads.h;
    const int column = out_column * SW - sizes.pads.w;
    const i64 pitch = i64(width) * CHANNELS;
    const u32 inside = columns_inside(column, width);
    const X_T* from = x + (i64(image) * height + row) * pitch + i64(column) * CHANNELS + channel;

    Weights weights;
    if constexpr (WEIGHTS_CONSTANT) weights.load(w, channel);
    wait_for_predecessor();
    u32 outside = 0;
#if EIGHT_BITS
    float zero = 0.0f, factors[VEC];
    if constexpr (X_ZERO) {
        zero = float(*integers.x_zero);
        outside = 0x01010101u * (u32(*integers.x_zero) & 0xffu);
    }
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
        float scales[2][1];
        unpack(load_cached<1>(integers.x_scale), scales[0]);
        unpack(load_cached<1>(integers.w_scale + W_SCALES * (channel + v)), scales[1]);
        factors[v] = scales[0][0] * scales[1][0];
    }
#endif
    Row ahead[AHEAD];
    const auto load_next = [&](Row& to) {
        to.load_some(from, unsigned(row) < unsigned(height) ? inside : 0, outside);
        from += pitch;
        keep(from);
        ++row;
    };
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) load_next(ahead[i]);
    if constexpr (!WEIGHTS_CONSTANT) weights.load(w, channel);
#if EIGHT_BITS
    const Epilogue epilogue{epilogue_operands, {PROGRAM_ARGUMENTS}};
    i64 pixel = (i64(image) * out_height + out_row) * out_width + out_column;
#else
    const i64 out_pitch = i64(out_width) * CHANNELS;
    const i64 first = (i64(image) * out_height + out_row) * out_pitch + i64(out_column) * CHANNELS + channel;
    Epilogue epilogue{epilogue_operands};
    epilogue.y += first;
    if constexpr (HAS_RESIDUAL) epilogue.residual += first;
    EpilogueLoads<VEC, false> loads[TW];
    epilogue.load_columns(loads[0], channel, CHANNELS);
#pragma unroll
    for (int t = 1; t < TW; ++t) {
        loads[t].bias = loads[0].bias;
        loads[t].extra = loads[0].extra;
        loads[t].scale = loads[0].scale;
    }
#endif

    Sums sums;
    // Widens a row of x to fp32, and starts the loads of a later row.
    const auto next_row = [&](float (&values)[COLUMNS][VEC], bool is_more = true) {
        ahead[0].widen_to(values);
#if EIGHT_BITS
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
            for (int v = 0; v < VEC; ++v)
                if (X_ZERO && reads_column(j)) values[j][v] -= zero;
#endif
        if constexpr (AHEAD > 1) ahead[0] = ahead[1];
        if (is_more) load_next(ahead[AHEAD - 1]);
    };
    const auto finish_row = [&] {
#if EIGHT_BITS
#pragma unroll
        for (int t = 0; t < TW; ++t) {
            float scaled[VEC];
#pragma unroll
            for (int v = 0; v < VEC; ++v) scaled[v] = sums.rows[KH - 1][t][v] * factors[v];
            epilogue.finish(scaled, scaled, pixel + t, channel, CHANNELS);
        }
        pixel += out_width;
#else
#pragma unroll
        for (int t = 0; t < TW; ++t) epilogue.load_residual(loads[t], t * CHANNELS);
#pragma unroll
        for (int t = 0; t < TW; ++t)
            epilogue.finish<false>(t * CHANNELS, loads[t], sums.rows[KH - 1][t], sums.rows[KH - 1][t]);
        epilogue.y += out_pitch;
        keep(epilogue.y);
        if constexpr (HAS_RESIDUAL) epilogue.residual += out_pitch;
#endif
    };
#pragma unroll
    for (int i = 0; i < KH - 1; ++i) {  // rows of x that complete no row of y yet
        float values[COLUMNS][VEC];
        next_row(values);
#pragma unroll
        for (int r = i; r >= 0; --r) sums.add(r, values, weights);
    }
#pragma unroll 1
    for (int i = KH - 1; i < strip_rows; ++i) {
        float values[COLUMNS][VEC];
        next_row(values);
#pragma unroll
        for (int r = KH - 1; r >= 0; --r) sums.add(r, values, weights);
        finish_row();
    }
#pragma unroll
    for (int i = 0; i < KH - 1; ++i) {  // rows of x at which no further row of y begins
        float values[COLUMNS][VEC];
        next_row(values, i + AHEAD < KH - 1);
#pragma unroll
        for (int r = KH - 1; r > i; --r) sums.add(r, values, weights);
        finish_row();
    }
}
