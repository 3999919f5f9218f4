// Depthwise convolutions of channels-last tensors by CUDA cores, in fp32: one, two or three spatial axes, any filter.
//
//   y = epilogue(conv(x, w))    each channel of y reads the same channel of x
//
// A thread computes a strip: TH x TW positions of y of VEC neighbouring channels. One after the other, it processes the
// rows of x that these positions read: it loads the columns of a row, widens them to fp32 once, and adds their products
// to every position of y that reads them. AHEAD rows are being loaded while one is used. A block is a patch of BH x BW
// such strips: neighbouring threads read some elements of x in common, which come from L1.
// The block's weights lie in shared memory in fp32; threads keep the weights of small filters in registers.
//
// The rows are processed in one of two ways:
//   ROLLED 0   The rows are unrolled, so that one row of x serves several rows of y. Filters have two axes at most.
//   ROLLED 1   TH is 1, and a loop processes the rows of the filter, each cut into pieces of PIECE taps. Filters can
//              have any size.
//
// Macros:
//   CHANNELS            channels of x and y
//   VEC                 elements of an access: divides CHANNELS
//   BX, BW, BH          threads of a block: vectors of channels, strips along the width and along the height
//   TW, TH              positions of y of a thread along the width and along the height
//   AHEAD               rows of x that are loaded ahead; 1 if ROLLED
//   PIECE               taps of a filter's row that are used at a time; KW with ROLLED 0
//   K?, S?, D?          filter size, stride and dilation along depth (D), height (H) and width (W); 1 for missing axes
//   W_HWIO              1: w is (taps, CHANNELS); 0: (CHANNELS, taps)
//   WEIGHTS_CONSTANT    1: no kernel writes w
//   MIN_BLOCKS          blocks that must fit on a multiprocessor: a bound on registers
//   and those of epilogue.cuh
#include "types.cuh"
#include "epilogue.cuh"
#include "conv_columns.cuh"
#include "conv_sizes.cuh"

constexpr int THREADS = BX * BW * BH, SLICE = BX * VEC;                      // SLICE: channels of a block
constexpr int PIECES = (KW + PIECE - 1) / PIECE, ROW_TAPS = PIECES * PIECE;  // pieces and taps of a padded filter row
constexpr int TAPS = KD * KH * ROW_TAPS;
constexpr int ROWS = (TH - 1) * SH + (KH - 1) * DH + 1;  // with ROLLED 0: rows of x that a strip reads
constexpr int PLANE = VEC < 4 ? VEC : 4;                 // channels per load of weights from shared memory
constexpr bool HELD = !ROLLED && TAPS * VEC <= 36;       // weights are kept in registers

static_assert(ROLLED ? TH == 1 && AHEAD == 1 : KD == 1 && PIECE == KW, "see above");

// Returns whether any position of a strip reads row `row`.
__device__ constexpr bool reads_row(int row) {
    for (int r = 0; r < KH; ++r) {
        const int from = row - r * DH;
        if (from >= 0 && from % SH == 0 && from / SH < TH) return true;
    }
    return false;
}

// ---- weights -----------------------------------------------------------------------------------------------------

// Returns the offset of a vector's weights at a tap. The weights of a tap lie in planes, each of which has PLANE
// channels of all BX vectors, so that lanes read different banks.
__device__ __forceinline__ int weight_offset(int tap, int vector) { return tap * SLICE + vector * PLANE; }

__device__ __forceinline__ Pack<T, VEC> load_weights(const T* w, int tap, int channel) {
    const int row = tap / ROW_TAPS, s = tap % ROW_TAPS;
    Pack<T, VEC> loaded = {};
    if (s >= KW || channel >= CHANNELS) return loaded;
    if constexpr (W_HWIO) {
        loaded = load_cached<VEC, WEIGHTS_CONSTANT>(w + (row * KW + s) * CHANNELS + channel);
    } else {
        float values[VEC];
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            float one[1];
            unpack(load_cached<1, WEIGHTS_CONSTANT>(w + i64(channel + v) * (KD * KH * KW) + row * KW + s), one);
            values[v] = one[0];
        }
        loaded = pack<T>(values);
    }
    return loaded;
}

__device__ __forceinline__ void store_weights(float* to, const Pack<T, VEC>& loaded, int tap, int vector) {
    float values[VEC];
    unpack(loaded, values);
#pragma unroll
    for (int v = 0; v < VEC; ++v) to[weight_offset(tap, vector) + v / PLANE * (BX * PLANE) + v % PLANE] = values[v];
}

// The copy of the block's weights to shared memory takes FETCHED vectors per thread at a time.
constexpr int VECTORS = TAPS * BX, FETCHES = (VECTORS + THREADS - 1) / THREADS, FETCHED = FETCHES < 4 ? FETCHES : 4;

struct Weights {
    Pack<T, VEC> fetched[FETCHED];

    __device__ __forceinline__ void load(const T* w, int channel, int from) {
#pragma unroll
        for (int i = 0; i < FETCHED; ++i) {
            const int at = from + i * THREADS + threadIdx.x;
            if (at < VECTORS) fetched[i] = load_weights(w, at / BX, channel + at % BX * VEC);
        }
    }

    __device__ __forceinline__ void store(float* to, int from) const {
#pragma unroll
        for (int i = 0; i < FETCHED; ++i) {
            const int at = from + i * THREADS + threadIdx.x;
            if (at < VECTORS) store_weights(to, fetched[i], at / BX, at % BX);
        }
    }
};

__device__ __forceinline__ void read_weights(const float* from, float (&to)[VEC]) {
#pragma unroll
    for (int plane = 0; plane < VEC / PLANE; ++plane) {
        const float* at = from + plane * (BX * PLANE);
        if constexpr (PLANE == 4) {
            const float4 four = *reinterpret_cast<const float4*>(at);
            to[plane * 4] = four.x;
            to[plane * 4 + 1] = four.y;
            to[plane * 4 + 2] = four.z;
            to[plane * 4 + 3] = four.w;
        } else if constexpr (PLANE == 2) {
            const float2 two = *reinterpret_cast<const float2*>(at);
            to[0] = two.x;
            to[1] = two.y;
        } else {
            to[0] = at[0];
        }
    }
}

// ---- sums --------------------------------------------------------------------------------------------------------

// Adds a row of x, multiplied with the weights of tap `s` of a row of the filter, to a row of y.
__device__ __forceinline__ void multiply_tap(float (&sums)[TW][VEC], const float (&values)[COLUMNS][VEC],
                                             const float (&weights)[VEC], int s) {
#pragma unroll
    for (int t = 0; t < TW; ++t)
#pragma unroll
        for (int v = 0; v < VEC; ++v) sums[t][v] = fmaf(values[t * SW + s * DW][v], weights[v], sums[t][v]);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    conv_depthwise(const T* x, const T* w, EpilogueOperands epilogue_operands, ConvSizes sizes) {
    extern __shared__ __align__(16) char memory[];
    float* staged = reinterpret_cast<float*>(memory);
    const int vector = threadIdx.x % BX, strip = threadIdx.x / BX;
    const int first_channel = blockIdx.y * SLICE, channel = first_channel + vector * VEC;

    const int depth = sizes.x.d, height = sizes.x.h, width = sizes.x.w;
    const int out_depth = sizes.y.d, out_height = sizes.y.h, out_width = sizes.y.w;
    const int patches_w = (out_width + TW * BW - 1) / (TW * BW), patches_h = (out_height + TH * BH - 1) / (TH * BH);
    int patch = blockIdx.x;
    const int patch_w = patch % patches_w;
    patch /= patches_w;
    const int patch_h = patch % patches_h;
    patch /= patches_h;
    const int out_z = patch % out_depth, image = patch / out_depth;
    const int out_row = (patch_h * BH + strip / BW) * TH, out_column = (patch_w * BW + strip % BW) * TW;
    const bool active = channel < CHANNELS && out_row < out_height && out_column < out_width;

    const int row = out_row * SH - sizes.pads.h, column = out_column * SW - sizes.pads.w;
    const int z = out_z * SD - sizes.pads.d;
    const i64 pitch = i64(width) * CHANNELS;
    const u32 inside = active ? columns_inside(column, width) : 0;
    const T* corner = x + i64(image) * depth * height * pitch + i64(column) * CHANNELS + channel;

    Weights weights;
    release_successor();
    if constexpr (WEIGHTS_CONSTANT) weights.load(w, first_channel, 0);
    wait_for_predecessor();

    float sums[TH][TW][VEC] = {};
    Row ring[AHEAD];
    const auto load_row = [&](Row& to, int at_z, int at_row) {
        const bool outside = unsigned(at_z) >= unsigned(depth) || unsigned(at_row) >= unsigned(height);
        to.load(corner + (i64(at_z) * height + at_row) * pitch, outside ? 0 : inside);
    };
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
        if (ROLLED || (i < ROWS && reads_row(i))) load_row(ring[i], z, row + i);

    if constexpr (!WEIGHTS_CONSTANT) weights.load(w, first_channel, 0);
    weights.store(staged, 0);
#pragma unroll 1
    for (int from = FETCHED * THREADS; from < VECTORS; from += FETCHED * THREADS) {
        weights.load(w, first_channel, from);
        weights.store(staged, from);
    }
    __syncthreads();
    if (!active) return;
    staged += weight_offset(0, vector);

    if constexpr (ROLLED) {
        int at_z = z, at_row = row, piece = 0;
        u32 next_inside = inside;
        const T* next_corner = corner;
#pragma unroll 1
        for (int i = 0; i < KD * KH * PIECES; ++i) {
            float values[COLUMNS][VEC];
            ring[0].widen_to(values);
            if (++piece == PIECES) {
                piece = 0;
                at_row += DH;
                if (at_row == row + KH * DH) {
                    at_row = row;
                    at_z += DD;
                }
            }
            if constexpr (PIECES > 1) {
                next_inside = columns_inside(column + piece * (PIECE * DW), width);
                next_corner = corner + piece * (PIECE * DW * CHANNELS);
            }
            if (i + 1 < KD * KH * PIECES) {
                const bool outside = unsigned(at_z) >= unsigned(depth) || unsigned(at_row) >= unsigned(height);
                ring[0].load(next_corner + (i64(at_z) * height + at_row) * pitch, outside ? 0 : next_inside);
            }
#pragma unroll
            for (int s = 0; s < PIECE; ++s) {
                float taps[VEC];
                read_weights(staged + s * SLICE, taps);
                multiply_tap(sums[0], values, taps, s);
            }
            staged += PIECE * SLICE;
        }
    } else {
        float held[HELD ? TAPS : 1][VEC];
        if constexpr (HELD) {
#pragma unroll
            for (int tap = 0; tap < TAPS; ++tap) read_weights(staged + tap * SLICE, held[tap]);
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            float values[COLUMNS][VEC];
            if (reads_row(i)) ring[i % AHEAD].widen_to(values);
            if (i + AHEAD < ROWS && reads_row(i + AHEAD)) load_row(ring[i % AHEAD], z, row + i + AHEAD);
#pragma unroll
            for (int t = 0; t < TH; ++t) {
                const int from = i - t * SH, r = from / DH;
                if (from < 0 || from % DH || r >= KH) continue;
#pragma unroll
                for (int s = 0; s < KW; ++s) {
                    if constexpr (HELD) {
                        multiply_tap(sums[t], values, held[r * KW + s], s);
                    } else {
                        float taps[VEC];
                        read_weights(staged + (r * KW + s) * SLICE, taps);
                        multiply_tap(sums[t], values, taps, s);
                    }
                }
            }
        }
    }

    const Epilogue epilogue{epilogue_operands};
    EpilogueLoads<VEC, false> loads[TW];
    epilogue.load_columns(loads[0], channel, CHANNELS);
#pragma unroll
    for (int t = 1; t < TW; ++t) {
        loads[t].bias = loads[0].bias;
        loads[t].extra = loads[0].extra;
        loads[t].scale = loads[0].scale;
    }
    const i64 first = (((i64(image) * out_depth + out_z) * out_height + out_row) * out_width + out_column) * CHANNELS;
#pragma unroll
    for (int t = 0; t < TH; ++t) {
        if (out_row + t >= out_height) break;
        const i64 at = first + i64(t) * out_width * CHANNELS + channel;
#pragma unroll
        for (int j = 0; j < TW; ++j)
            if (out_column + j < out_width) epilogue.load_residual(loads[j], at + j * CHANNELS);
#pragma unroll
        for (int j = 0; j < TW; ++j)
            if (out_column + j < out_width) epilogue.finish<false>(at + j * CHANNELS, loads[j], sums[t][j], sums[t][j]);
    }
}
