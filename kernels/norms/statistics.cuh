// The statistics of LayerNorm, GroupNorm and RMSNorm. Each is a Partial, which rows.cuh merges over the threads of a
// row.
#pragma once

constexpr float THREAD_ELEMENTS = float(CHUNKS) * WIDTH;  // elements of a thread whose packs all lie in the row

__device__ __forceinline__ float tree_sum(const float (&values)[WIDTH]) {
    float sums[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) sums[i] = values[i];
#pragma unroll
    for (int half = WIDTH / 2; half > 0; half /= 2)
#pragma unroll
        for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
    return sums[0];
}

// Mean and variance in one reduction: each thread takes two passes over its registers, and pairs of threads are merged
// as by Chan, Golub and LeVeque (1979), without the cancellation of E[x^2] - E[x]^2.
struct Moments {
    static constexpr bool CENTRED = true;
    static constexpr int VALUES = FULL ? 2 : 3;  // with FULL, the number of elements is a constant
    float mean, squares, number;                 // squares: the sum of (x - mean)^2; number: how many elements

    static __device__ __forceinline__ Moments none() { return {0.0f, 0.0f, 0.0f}; }

    template <class Exists>
    static __device__ __forceinline__ Moments of(const float (&values)[CHUNKS][WIDTH], Exists exists) {
        float sum = 0.0f, number = FULL ? THREAD_ELEMENTS : 0.0f;
#pragma unroll
        for (int k = 0; k < CHUNKS; ++k) {
            if (!exists(k)) continue;
            sum += tree_sum(values[k]);
            if constexpr (!FULL) number += WIDTH;
        }
        const float mean = FULL ? sum * (1.0f / THREAD_ELEMENTS) : __fdividef(sum, fmaxf(number, 1.0f));
        float squares = 0.0f;
#pragma unroll
        for (int k = 0; k < CHUNKS; ++k) {
            if (!exists(k)) continue;
            float parts[WIDTH];
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) parts[i] = (values[k][i] - mean) * (values[k][i] - mean);
            squares += tree_sum(parts);
        }
        return {mean, squares, number};
    }

    __device__ __forceinline__ Moments merge(const Moments& other) const {
        const float delta = other.mean - mean;
        if constexpr (FULL)
            return {0.5f * (mean + other.mean), squares + other.squares + delta * delta * (0.5f * number),
                    2.0f * number};
        const float total = number + other.number;
        const float share = __fdividef(other.number, fmaxf(total, 1.0f));
        return {fmaf(delta, share, mean), squares + other.squares + delta * delta * (number * share), total};
    }
    __device__ __forceinline__ Moments merge_lanes(const Moments& other) const { return merge(other); }

    __device__ __forceinline__ float count() const { return number; }
    __device__ __forceinline__ void save(float (&to)[VALUES]) const {
        to[0] = mean;
        to[1] = squares;
        if constexpr (!FULL) to[VALUES - 1] = number;
    }
    static __device__ __forceinline__ Moments load(const float (&from)[VALUES], float count) {
        return {from[0], from[1], FULL ? count : from[VALUES - 1]};
    }

    __device__ __forceinline__ float shift() const { return mean; }
    __device__ __forceinline__ float slope(int length, float epsilon) const {
        return rsqrtf(squares * (1.0f / length) + epsilon);
    }
};

// The sum of squares, for RMSNorm.
struct Squares {
    static constexpr bool CENTRED = false;
    static constexpr int VALUES = 1;
    float sum;

    static __device__ __forceinline__ Squares none() { return {0.0f}; }

    template <class Exists>
    static __device__ __forceinline__ Squares of(const float (&values)[CHUNKS][WIDTH], Exists exists) {
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < CHUNKS; ++k) {
            if (!exists(k)) continue;
            float parts[WIDTH];
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) parts[i] = values[k][i] * values[k][i];
            sum += tree_sum(parts);
        }
        return {sum};
    }

    __device__ __forceinline__ Squares merge(const Squares& other) const { return {sum + other.sum}; }
    __device__ __forceinline__ Squares merge_lanes(const Squares& other) const { return merge(other); }
    __device__ __forceinline__ float count() const { return 0.0f; }
    __device__ __forceinline__ void save(float (&to)[VALUES]) const { to[0] = sum; }
    static __device__ __forceinline__ Squares load(const float (&from)[VALUES], float) { return {from[0]}; }
    __device__ __forceinline__ float shift() const { return 0.0f; }
    __device__ __forceinline__ float slope(int length, float epsilon) const {
        return rsqrtf(sum * (1.0f / length) + epsilon);
    }
};
