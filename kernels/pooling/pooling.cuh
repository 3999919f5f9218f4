// Windows over channels-last tensors: x is (n, depth, height, width, channels), where depth or height may be 1.
//
// A thread computes TILE_H x TILE_W neighbouring results of WIDTH channels. It reads every element of their windows
// once, one row of x after the other. It reduces a row of x to one value for each column of the tile, and merges these
// values into the rows of the tile whose windows contain this row of x. Elements that neighbouring threads share come
// from L1, so a block is a tile of the image with few channels.
//
//   T            storage type of x and y             CHANNELS, WIDTH  channels, and channels of a vector access
//   KERNEL_*, STRIDE_*, DILATION_*, with the suffixes D, H and W
//   TILE_H, TILE_W    results of a thread            LANES_C, LANES_W, LANES_H  threads of a block along x, y and z
//   ROW_UNROLL   rows of x whose loads are in flight together
//   COLUMN_CHUNK vectors of a row whose loads are in flight together
//   STREAMED     1: y leaves L2 first                RELEASE  1: the next kernel may start before this one stores
//   STREAMED and RELEASE are numbers, or expressions that depend on the grid.
//
// A pooling op has
//   Value, VALUES                           type and number of the values in which a thread has WIDTH elements
//   static Value initial()                  the result over no elements
//   static Value merge(Value, Value)
//   Pack<T, WIDTH> padding()                elements that change no result
//   void read(pack, values)                 the values of WIDTH elements
//   Pack<T, WIDTH> result(values, z, row, column)     the elements of y from the reductions of their windows
// OfFloats makes one of an op on single floats: initial, merge and
//   float finish(float, z, row, column)     the result of a window from its reduction
#pragma once
#include "types.cuh"

constexpr int VECTORS = CHANNELS / WIDTH;
constexpr int BLOCKS_C = (VECTORS + LANES_C - 1) / LANES_C;
// The rows and columns that the windows of a tile span.
constexpr int ROWS_IN = (TILE_H - 1) * STRIDE_H + (KERNEL_H - 1) * DILATION_H + 1;
constexpr int COLUMNS_IN = (TILE_W - 1) * STRIDE_W + (KERNEL_W - 1) * DILATION_W + 1;

static_assert(CHANNELS % WIDTH == 0, "a vector would cross pixels");

#define POOL_KERNEL extern "C" __global__ void __launch_bounds__(LANES_C * LANES_W * LANES_H)

// The sizes of x and y, and the padding, as an argument of kernels; tiles.py writes the fields in this order.
struct PoolSizes {
    int depth, height, width;  // sizes of x
    int y_depth, y_height, y_width;
    int pad_d, pad_h, pad_w;  // padding before x
};

template <class Op>
struct OfFloats {
    Op op;

    using Value = float;
    static constexpr int VALUES = WIDTH;
    static __device__ __forceinline__ float initial() { return Op::initial(); }
    static __device__ __forceinline__ float merge(float a, float b) { return Op::merge(a, b); }
    static __device__ __forceinline__ Pack<T, WIDTH> padding() {
        float initials[WIDTH];
#pragma unroll
        for (float& each : initials) each = initial();
        return pack<T, WIDTH>(initials);
    }
    static __device__ __forceinline__ void read(const Pack<T, WIDTH>& raw, float (&values)[WIDTH]) {
        unpack(raw, values);
    }
    __device__ __forceinline__ Pack<T, WIDTH> result(float (&values)[WIDTH], int plane, int row, int column) const {
#pragma unroll
        for (float& each : values) each = op.finish(each, plane, row, column);
        return pack<T, WIDTH>(values);
    }
};

// Whether an element belongs to window `index` of a tile; `offset` is its distance from the first element of the tile's
// first window, along one axis.
template <int KERNEL, int STRIDE, int DILATION>
__device__ __forceinline__ constexpr bool in_window(int offset, int index) {
    const int from_start = offset - index * STRIDE;
    return from_start >= 0 && from_start <= (KERNEL - 1) * DILATION && from_start % DILATION == 0;
}

template <int KERNEL, int STRIDE, int DILATION, int TILE>
__device__ __forceinline__ constexpr bool in_any_window(int offset) {
    for (int i = 0; i < TILE; ++i)
        if (in_window<KERNEL, STRIDE, DILATION>(offset, i)) return true;
    return false;
}

// Returns how many elements of the window at `start` lie in [first, end).
template <int KERNEL, int DILATION>
__device__ __forceinline__ int elements_inside(int start, int first, int end) {
    const int low = start < first ? (first - start + DILATION - 1) / DILATION : 0;
    const int high = min(KERNEL, max(end - start + DILATION - 1, 0) / DILATION);
    return max(high - low, 0);
}

template <class Op>
__device__ __forceinline__ void reduce_row(const Op& op, const T* row, int left, int width, bool exists,
                                           typename Op::Value (&reduced)[TILE_W][Op::VALUES]) {
    const Pack<T, WIDTH> padding = op.padding();
#pragma unroll
    for (int j = 0; j < TILE_W; ++j)
#pragma unroll
        for (int i = 0; i < Op::VALUES; ++i) reduced[j][i] = Op::initial();
#pragma unroll 1
    for (int first = 0; first < COLUMNS_IN; first += COLUMN_CHUNK) {
        Pack<T, WIDTH> raw[COLUMN_CHUNK];
#pragma unroll
        for (int k = 0; k < COLUMN_CHUNK; ++k) {
            const int column = first + k;
            raw[k] = padding;
            if (column >= COLUMNS_IN || !in_any_window<KERNEL_W, STRIDE_W, DILATION_W, TILE_W>(column)) continue;
            if (exists && unsigned(left + column) < unsigned(width))
                raw[k] = load_cached<WIDTH>(row + column * CHANNELS);
        }
#pragma unroll
        for (int k = 0; k < COLUMN_CHUNK; ++k) {
            const int column = first + k;
            if (column >= COLUMNS_IN || !in_any_window<KERNEL_W, STRIDE_W, DILATION_W, TILE_W>(column)) continue;
            typename Op::Value values[Op::VALUES];
            op.read(raw[k], values);
#pragma unroll
            for (int j = 0; j < TILE_W; ++j) {
                if (!in_window<KERNEL_W, STRIDE_W, DILATION_W>(column, j)) continue;
#pragma unroll
                for (int i = 0; i < Op::VALUES; ++i) reduced[j][i] = Op::merge(reduced[j][i], values[i]);
            }
        }
    }
}

template <class Op>
__device__ __forceinline__ void pool(const Op& op, const T* x, T* y, const PoolSizes& sizes) {
    wait_for_predecessor();
    const int blocks_w = (sizes.y_width + LANES_W * TILE_W - 1) / (LANES_W * TILE_W);
    const int blocks_h = (sizes.y_height + LANES_H * TILE_H - 1) / (LANES_H * TILE_H);
    const unsigned block = blockIdx.x / BLOCKS_C, block_row = block / blocks_w, slice = block_row / blocks_h;
    const int vector = blockIdx.x % BLOCKS_C * LANES_C + threadIdx.x;
    const int y_column = ((block - block_row * blocks_w) * LANES_W + threadIdx.y) * TILE_W;
    const int y_row = ((block_row - slice * blocks_h) * LANES_H + threadIdx.z) * TILE_H;
    if ((VECTORS % LANES_C && vector >= VECTORS) || y_column >= sizes.y_width || y_row >= sizes.y_height) return;
    const unsigned image = slice / sizes.y_depth, y_plane = slice - image * sizes.y_depth;
    const int left = y_column * STRIDE_W - sizes.pad_w, top = y_row * STRIDE_H - sizes.pad_h;

    typename Op::Value results[TILE_H][TILE_W][Op::VALUES];
#pragma unroll
    for (int t = 0; t < TILE_H; ++t)
#pragma unroll
        for (int j = 0; j < TILE_W; ++j)
#pragma unroll
            for (int i = 0; i < Op::VALUES; ++i) results[t][j][i] = Op::initial();
#pragma unroll 1
    for (int k = 0; k < KERNEL_D; ++k) {
        const int plane = int(y_plane) * STRIDE_D - sizes.pad_d + k * DILATION_D;
        if (KERNEL_D > 1 && unsigned(plane) >= unsigned(sizes.depth)) continue;
        const bool inside = unsigned(plane) < unsigned(sizes.depth);
        const long long first_row = ((long long)image * sizes.depth + plane) * sizes.height + top;
        const T* row = x + (first_row * sizes.width + left) * CHANNELS + vector * WIDTH;
        const long long pitch = (long long)sizes.width * CHANNELS;
#pragma unroll ROW_UNROLL
        for (int r = 0; r < ROWS_IN; ++r, row += pitch) {
            if (!in_any_window<KERNEL_H, STRIDE_H, DILATION_H, TILE_H>(r)) continue;
            typename Op::Value reduced[TILE_W][Op::VALUES];
            const bool exists = inside && unsigned(top + r) < unsigned(sizes.height);
            reduce_row(op, row, left, sizes.width, exists, reduced);
#pragma unroll
            for (int t = 0; t < TILE_H; ++t) {
                if (!in_window<KERNEL_H, STRIDE_H, DILATION_H>(r, t)) continue;
#pragma unroll
                for (int j = 0; j < TILE_W; ++j)
#pragma unroll
                    for (int i = 0; i < Op::VALUES; ++i) results[t][j][i] = Op::merge(results[t][j][i], reduced[j][i]);
            }
        }
    }
    if (RELEASE) release_successor();
    const long long y_first = ((long long)slice * sizes.y_height + y_row) * sizes.y_width + y_column;
    T* to = y + y_first * CHANNELS + vector * WIDTH;
#pragma unroll
    for (int t = 0; t < TILE_H; ++t)
#pragma unroll
        for (int j = 0; j < TILE_W; ++j) {
            if (y_row + t >= sizes.y_height || y_column + j >= sizes.y_width) continue;
            const Pack<T, WIDTH> found = op.result(results[t][j], int(y_plane), y_row + t, y_column + j);
            store_pack_as(STREAMED, to + ((long long)t * sizes.y_width + j) * CHANNELS, found);
        }
}
