// Resize of the spatial axes of channels-last tensors: x is (n, depth, height, width, CHANNELS), where depth and height
// may be 1.
//
// Coordinates are computed in fp32, with each operation rounded separately, exactly as onnxruntime's CPU provider
// computes them; along an axis of scale 1, coordinates equal indices. A block computes a part of a row of y; elements
// of x that neighbouring results share come from L1 and L2.
//
//   T                      storage type of x and y    WIDTH    elements of a vector access
//   COORDINATE, NEAREST    functions below, by the names of ONNX's coordinate_transformation_mode and nearest_mode
//   LINEAR                 1: interpolate between the two nearest elements of each axis; 0: copy the nearest element
//   HAS_DEPTH              0: depth is 1              QUANTIZED  1: x and y are integers (image_quantizers.cuh)
//   STREAMED               1: L2 evicts y first        RELEASE  1: the next kernel may start before this one stores
//   STREAMED and RELEASE are numbers, or expressions that depend on the grid.
#include "types.cuh"
#if QUANTIZED
#include "image_quantizers.cuh"
#define QUANTIZERS IMAGE_QUANTIZERS,
#else
#define QUANTIZERS
#endif

static_assert(CHANNELS % WIDTH == 0, "a vector would cross pixels");

// A spatial axis, as an argument of the kernel: its sizes in x and in y. host.py writes the fields in this order.
struct Axis {
    int size, y_size;
    float scale;
};

namespace coordinate {

// Each function maps an index in y to a coordinate in x.
__device__ __forceinline__ float asymmetric(float index, const Axis& of) { return __fdiv_rn(index, of.scale); }

__device__ __forceinline__ float half_pixel(float index, const Axis& of) {
    return __fadd_rn(__fdiv_rn(__fadd_rn(index, 0.5f), of.scale), -0.5f);
}

__device__ __forceinline__ float pytorch_half_pixel(float index, const Axis& of) {
    return of.y_size > 1 ? half_pixel(index, of) : 0.0f;
}

__device__ __forceinline__ float align_corners(float index, const Axis& of) {
    return of.y_size == 1 ? 0.0f : __fdiv_rn(__fmul_rn(index, float(of.size) - 1.0f), float(of.y_size) - 1.0f);
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

__device__ __forceinline__ float place_of(int index, const Axis& of) {
    return of.scale == 1.0f ? float(index) : coordinate::COORDINATE(float(index), of);
}

__device__ __forceinline__ int nearest_index(int index, const Axis& of) {
    if (of.scale == 1.0f) return min(index, of.size - 1);
    return min(max(nearest::NEAREST(place_of(index, of)), 0), of.size - 1);
}

// The two elements of an axis between which a coordinate lies, and the weight of the second element.
struct Between {
    int low, high;
    float weight;

    __device__ __forceinline__ Between(int index, const Axis& of) {
        const float place = fmaxf(0.0f, fminf(place_of(index, of), float(of.size - 1)));
        low = min(int(place), of.size - 1);
        high = min(low + 1, of.size - 1);
        weight = low == high ? 0.0f : place - float(low);
    }
};

// A plane (height, width) of an image of x; the address points to the thread's channels of its first pixel.
struct Plane {
    const T* x;
    int width;

    __device__ __forceinline__ Pack<T, WIDTH> element(int row, int column) const {
        return load_cached<WIDTH>(x + ((long long)row * width + column) * CHANNELS);
    }

    __device__ __forceinline__ void interpolate(const Between& rows, const Between& columns,
                                                float (&results)[WIDTH]) const {
        const Pack<T, WIDTH> raw[4] = {element(rows.low, columns.low), element(rows.low, columns.high),
                                       element(rows.high, columns.low), element(rows.high, columns.high)};
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
};

extern "C" __global__ void __launch_bounds__(THREADS)
    resize(const T* x, QUANTIZERS T* y, const __grid_constant__ Axis depth, const __grid_constant__ Axis height,
           const __grid_constant__ Axis width) {
    wait_for_predecessor();
    const unsigned y_slice = blockIdx.x / height.y_size, image = HAS_DEPTH ? y_slice / depth.y_size : y_slice;
    const int y_row = blockIdx.x - y_slice * height.y_size, at = blockIdx.y * THREADS + threadIdx.x;
    const int y_plane = HAS_DEPTH ? y_slice - image * depth.y_size : 0;
    const int y_column = at / (CHANNELS / WIDTH), channel = at % (CHANNELS / WIDTH) * WIDTH;
    if (y_column >= width.y_size) return;
    const long long plane = (long long)height.size * width.size * CHANNELS;
    x += (HAS_DEPTH ? (long long)image * depth.size : image) * plane + channel;
    y += (long long)blockIdx.x * width.y_size * CHANNELS + (long long)at * WIDTH;
    float results[WIDTH];
    if constexpr (!LINEAR) {
        if constexpr (HAS_DEPTH) x += nearest_index(y_plane, depth) * plane;
        const Pack<T, WIDTH> raw =
            Plane{x, width.size}.element(nearest_index(y_row, height), nearest_index(y_column, width));
        unpack(raw, results);
    } else {
        const Between rows(y_row, height), columns(y_column, width);
        if constexpr (!HAS_DEPTH) {
            Plane{x, width.size}.interpolate(rows, columns, results);
        } else {
            const Between planes(y_plane, depth);
            float high[WIDTH];
            Plane{x + planes.low * plane, width.size}.interpolate(rows, columns, results);
            Plane{x + planes.high * plane, width.size}.interpolate(rows, columns, high);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) results[i] = (1.0f - planes.weight) * results[i] + planes.weight * high[i];
        }
    }
    if (RELEASE) release_successor();
#if QUANTIZED
    // The weights of an interpolation add up to 1, so that the zero point can be subtracted after it.
    const ImageQuantizers quantizers(x_scale, x_zero, y_scale, y_zero);
#pragma unroll
    for (float& each : results) each = quantizers.quantized(each - quantizers.x_zero);
#endif
    store_as(STREAMED, y, results);
}
