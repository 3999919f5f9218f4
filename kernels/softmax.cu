// y = exp(x - max(x)) / sum(exp(x - max(x))) over the last axis.
//
// Moves each element of x and y once: 4 bytes an element in fp16. One exponential an element: each warp takes it
// against its own maximum, and what the warps' maxima differ by is made good in the factor that divides by the sum.
// A row of -inf, or one with +inf or NaN, gives NaN, as the formula does.
#include "types.cuh"
#include "rows.cuh"

struct Softmax {
    static constexpr bool WEIGHTS_VARY = false;
    static constexpr bool SEEKS = false;
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
            if constexpr (KEPT) return {top, sum + other.sum};  // one maximum for the warp
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
    float own_top;  // what this thread's exponentials are taken against
    float top, factor;

    __device__ __forceinline__ Raw fetch(long long row, int pack) const {
        return load_once<WIDTH>(x + row * ROW + pack * WIDTH);
    }
    __device__ __forceinline__ void copy(Raw& raw, long long row, int pack) const {
        copy_later<WIDTH>(raw, x + row * ROW + pack * WIDTH);
    }
    __device__ __forceinline__ void open(const Raw& raw, long long, int, float (&values)[WIDTH], bool) const {
        unpack(raw, values);
    }
    __device__ __forceinline__ void weights(int, long long, int) const {}

    template <class Has>
    __device__ __forceinline__ Partial local(float (&values)[CHUNKS][WIDTH], Has has) {
        own_top = -LARGEST;
#pragma unroll
        for (int k = 0; k < CHUNKS; ++k) {
            if (!has(k)) continue;
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) own_top = fmaxf(own_top, values[k][i]);
        }
        if constexpr (KEPT) {
#pragma unroll
            for (int offset = LANES / 2; offset > 0; offset /= 2)
                own_top = fmaxf(own_top, __shfl_xor_sync(0xffffffffu, own_top, offset));
        }
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < CHUNKS; ++k) {
            if (!has(k)) continue;
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
                values[k][i] = exp2_fast(LOG2_E * (values[k][i] - own_top));
                sum += values[k][i];
            }
        }
        return {own_top, sum};
    }

    __device__ __forceinline__ void finish(const Partial& row) {
        top = row.top;
        factor = __fdiv_rn(KEPT ? exp2_fast(LOG2_E * (own_top - top)) : 1.0f, row.sum);
    }

    __device__ __forceinline__ void close(long long row, int, int pack, float (&values)[WIDTH]) const {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i)
            values[i] = (KEPT ? values[i] : exp2_fast(LOG2_E * (values[i] - top))) * factor;
        store<STREAMED>(y + row * ROW + pack * WIDTH, values);
    }
};

ROW_KERNEL softmax(const X_T* x, Y_T* y, long long rows) { each_row(Softmax{x, y}, rows); }
