// y = exp(x - max(x)) / sum(exp(x - max(x))) over the last axis.
//
// The kernel moves each element of x and y once, 4 bytes an element in fp16, and takes one exponential an element. Each
// warp subtracts its own maximum. The factor that divides a warp's results by the row's sum also accounts for the
// difference between the warp's maximum and the row's.
// A row of -inf, or one with +inf or NaN, gives NaN, as the formula does.
#include "types.cuh"
#include "rows.cuh"

struct Softmax {
    static constexpr bool WEIGHTS_VARY = false;
    static constexpr bool LOCATES = false;
    using Raw = Pack<X_T, WIDTH>;
    struct Partial {
        static constexpr int VALUES = 2;
        float top, sum;  // sum of exp(x - top); top is finite even if all x are -inf

        static __device__ __forceinline__ Partial none() { return {-LARGEST, 0.0f}; }
        __device__ __forceinline__ Partial merge(const Partial& other) const {
            const float both = fmaxf(top, other.top);
            return {both, sum * exp2_fast(LOG2_E * (top - both)) + other.sum * exp2_fast(LOG2_E * (other.top - both))};
        }
        __device__ __forceinline__ Partial merge_lanes(const Partial& other) const {
            if constexpr (IN_REGISTERS) return {top, sum + other.sum};  // all lanes have the same maximum
            return merge(other);
        }
        __device__ __forceinline__ float count() const { return 0.0f; }
        __device__ __forceinline__ void save(float (&to)[VALUES]) const { to[0] = top, to[1] = sum; }
        static __device__ __forceinline__ Partial load(const float (&from)[VALUES], float) {
            return {from[0], from[1]};
        }
    };

    const X_T* x;
    Y_T* y;
    int length;
    bool streamed;
    float own_top;  // the maximum that this thread has subtracted from x in its exponentials
    float top, factor;

    __device__ __forceinline__ Raw fetch(long long row, int pack) const {
        return load_once<WIDTH>(x + row * ROW + pack * WIDTH);
    }
    __device__ __forceinline__ void copy_async(Raw& raw, long long row, int pack) const {
        copy_to_shared<WIDTH>(raw, x + row * ROW + pack * WIDTH);
    }
    __device__ __forceinline__ void convert(const Raw& raw, long long, int, float (&values)[WIDTH], bool) const {
        unpack(raw, values);
    }
    __device__ __forceinline__ void load_weights(int, long long, int) const {}

    template <class Exists>
    __device__ __forceinline__ Partial reduce_thread(float (&values)[CHUNKS][WIDTH], Exists exists) {
        own_top = -LARGEST;
#pragma unroll
        for (int k = 0; k < CHUNKS; ++k) {
            if (!exists(k)) continue;
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) own_top = fmaxf(own_top, values[k][i]);
        }
        if constexpr (IN_REGISTERS) {
#pragma unroll
            for (int offset = LANES / 2; offset > 0; offset /= 2)
                own_top = fmaxf(own_top, __shfl_xor_sync(0xffffffffu, own_top, offset));
        }
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < CHUNKS; ++k) {
            if (!exists(k)) continue;
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
                values[k][i] = exp2_fast(LOG2_E * (values[k][i] - own_top));
                sum += values[k][i];
            }
        }
        return {own_top, sum};
    }

    __device__ __forceinline__ void set_statistics(const Partial& row) {
        top = row.top;
        factor = __fdiv_rn(IN_REGISTERS ? exp2_fast(LOG2_E * (own_top - top)) : 1.0f, row.sum);
    }

    __device__ __forceinline__ void store_result(long long row, int, int pack, float (&values)[WIDTH]) const {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i)
            values[i] = (IN_REGISTERS ? values[i] : exp2_fast(LOG2_E * (values[i] - top))) * factor;
        store_as(streamed, y + row * ROW + pack * WIDTH, values);
    }
};

ROW_KERNEL softmax(const X_T* x, Y_T* y, int length, long long rows) {
    each_row(Softmax{x, y, length, STREAMED}, rows, length);
}
