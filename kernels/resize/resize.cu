// Resize of height and width of channels-last tensors: x is (n, height, width, CHANNELS), where height may be 1.
//
// Coordinates are computed in fp32, each operation rounded by itself, exactly as onnxruntime's CPU provider computes
// them; along an axis of scale 1 they are the indices. A block computes a part of a row of y; what neighbouring results
// share of x comes from L1 and L2.
//
//   T                      storage type of x and y    WIDTH    elements of a vector access
//   COORDINATE, NEAREST    functions below, by the names of ONNX's coordinate_transformation_mode and nearest_mode
//   LINEAR                 1: interpolate between the two nearest rows and columns; 0: copy the nearest element
//   STREAMED               1: y leaves L2 first        RELEASE  1: the next kernel may start before this one stores
#include "types.cuh"

static_assert(CHANNELS % WIDTH == 0, "a vector would cross pixels");

namespace coordinate {

// Of an index in y: the place in x. `scale` is that of the axis, `y_size` and `size` are its lengths.
__device__ __forceinline__ float asymmetric(float index, float scale, int, int) { return __fdiv_rn(index, scale); }

__device__ __forceinline__ float half_pixel(float index, float scale, int, int) {
    return __fadd_rn(__fdiv_rn(__fadd_rn(index, 0.5f), scale), -0.5f);
}

__device__ __forceinline__ float pytorch_half_pixel(float index, float scale, int y_size, int) {
    return y_size > 1 ? half_pixel(index, scale, 0, 0) : 0.0f;
}

__device__ __forceinline__ float align_corners(float index, float, int y_size, int size) {
    return y_size == 1 ? 0.0f : __fdiv_rn(__fmul_rn(index, float(size) - 1.0f), float(y_size) - 1.0f);
}

}  // namespace coordinate

namespace nearest {

__device__ __forceinline__ int floor(float place) { return int(floorf(place)); }
__device__ __forceinline__ int ceil(float place) { return int(ceilf(place)); }
__device__ __forceinline__ int round_prefer_ceil(float place) { return int(roundf(place)); }  // halves away from zero

__device__ __forceinline__ int round_prefer_floor(float place) {
    return place == __fadd_rn(float(int(place)), 0.5f) ? int(floorf(place)) : int(roundf(place));
}

}  // namespace nearest

__device__ __forceinline__ float place_of(int index, float scale, int y_size, int size) {
    return scale == 1.0f ? float(index) : coordinate::COORDINATE(float(index), scale, y_size, size);
}

__device__ __forceinline__ int nearest_index(int index, float scale, int y_size, int size) {
    if (scale == 1.0f) return min(index, size - 1);
    return min(max(nearest::NEAREST(place_of(index, scale, y_size, size)), 0), size - 1);
}

// The two elements of an axis between which a place lies, and the weight of the second one.
struct Between {
    int low, high;
    float weight;

    __device__ __forceinline__ Between(int index, float scale, int y_size, int size) {
        const float place = fmaxf(0.0f, fminf(place_of(index, scale, y_size, size), float(size - 1)));
        low = min(int(place), size - 1);
        high = min(low + 1, size - 1);
        weight = low == high ? 0.0f : place - float(low);
    }
};

__device__ __forceinline__ Pack<T, WIDTH> element(const T* x, int row, int column, int width) {
    return load_cached<WIDTH>(x + ((long long)row * width + column) * CHANNELS);
}

extern "C" __global__ void __launch_bounds__(THREADS)
resize(const T* x, T* y, int height, int width, int y_height, int y_width, float scale_h, float scale_w) {
    wait_for_predecessor();
    const unsigned image = blockIdx.x / y_height;
    const int y_row = blockIdx.x - image * y_height, at = blockIdx.y * THREADS + threadIdx.x;
    const int y_column = at / (CHANNELS / WIDTH), channel = at % (CHANNELS / WIDTH) * WIDTH;
    if (y_column >= y_width) return;
    x += (long long)image * height * width * CHANNELS + channel;
    y += (long long)blockIdx.x * y_width * CHANNELS + (long long)at * WIDTH;
    float results[WIDTH];
    if constexpr (!LINEAR) {
        const Pack<T, WIDTH> raw = element(x, nearest_index(y_row, scale_h, y_height, height),
                                           nearest_index(y_column, scale_w, y_width, width), width);
        unpack(raw, results);
    } else {
        const Between rows(y_row, scale_h, y_height, height), columns(y_column, scale_w, y_width, width);
        const Pack<T, WIDTH> raw[4] = {element(x, rows.low, columns.low, width),
                                       element(x, rows.low, columns.high, width),
                                       element(x, rows.high, columns.low, width),
                                       element(x, rows.high, columns.high, width)};
        float corners[4][WIDTH];
#pragma unroll
        for (int k = 0; k < 4; ++k) unpack(raw[k], corners[k]);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const float low = (1.0f - columns.weight) * corners[0][i] + columns.weight * corners[1][i];
            const float high = (1.0f - columns.weight) * corners[2][i] + columns.weight * corners[3][i];
            results[i] = (1.0f - rows.weight) * low + rows.weight * high;
        }
    }
    if constexpr (RELEASE) release_successor();
    store<STREAMED>(y, results);
}
