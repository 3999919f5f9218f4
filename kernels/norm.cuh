// What layer norm, RMS norm and group norm have in common: their statistics, and norms along rows with weights.
#pragma once

constexpr float WHOLE = float(CHUNKS) * WIDTH;  // elements of a thread that has all its packs

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

// Mean and variance in one reduction: each thread takes two passes over its registers, and pairs are merged as Chan,
// Golub and LeVeque do (1979), without the cancellation of E[x^2] - E[x]^2.
struct Moments {
    static constexpr bool CENTRED = true;
    static constexpr int VALUES = FULL ? 2 : 3;  // how many a partial counts is known where all are full
    float mean, squares, number;

    static __device__ __forceinline__ Moments none() { return {0.0f, 0.0f, 0.0f}; }

    template <class Has>
    static __device__ __forceinline__ Moments of(const float (&values)[CHUNKS][WIDTH], Has has) {
        float sum = 0.0f, number = FULL ? WHOLE : 0.0f;
#pragma unroll
        for (int k = 0; k < CHUNKS; ++k) {
            if (!has(k)) continue;
            sum += tree_sum(values[k]);
            if constexpr (!FULL) number += WIDTH;
        }
        const float mean = FULL ? sum * (1.0f / WHOLE) : __fdividef(sum, fmaxf(number, 1.0f));
        float squares = 0.0f;
#pragma unroll
        for (int k = 0; k < CHUNKS; ++k) {
            if (!has(k)) continue;
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
    __device__ __forceinline__ float slope(float epsilon) const { return rsqrtf(squares * (1.0f / ROW) + epsilon); }
};

// The sum of squares.
struct Squares {
    static constexpr bool CENTRED = false;
    static constexpr int VALUES = 1;
    float sum;

    static __device__ __forceinline__ Squares none() { return {0.0f}; }

    template <class Has>
    static __device__ __forceinline__ Squares of(const float (&values)[CHUNKS][WIDTH], Has has) {
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < CHUNKS; ++k) {
            if (!has(k)) continue;
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
    __device__ __forceinline__ float slope(float epsilon) const { return rsqrtf(sum * (1.0f / ROW) + epsilon); }
};

// y = (v - shift) * slope * scale + bias with v = x, or v = x + residual, which is also written where SUM is 1.
template <class Statistic>
struct Norm {
    using Partial = Statistic;
    static constexpr bool WEIGHTS_VARY = false;
    struct Raw {
        Pack<X_T, WIDTH> x;
        Pack<RESIDUAL_T, WIDTH> residual;
    };
    struct Weights {
        Pack<SCALE_T, WIDTH> scale;
        Pack<BIAS_T, WIDTH> bias;
    };

    const X_T* x;
    const RESIDUAL_T* residual;
    const SCALE_T* scale;
    const BIAS_T* bias;
    Y_T* y;
    SUM_T* sum;
    float epsilon;
    Weights held[CHUNKS];
    float shift, slope;

    static __device__ __forceinline__ long long at(long long row, int pack) { return row * ROW + pack * WIDTH; }

    __device__ __forceinline__ Raw fetch(long long row, int pack) const {
        Raw raw;
        raw.x = load_once<WIDTH>(x + at(row, pack));
        if constexpr (RESIDUAL) raw.residual = load_once<WIDTH>(residual + at(row, pack));
        return raw;
    }

    __device__ __forceinline__ void open(const Raw& raw, long long row, int pack, float (&values)[WIDTH], bool first) {
        unpack(raw.x, values);
        if constexpr (RESIDUAL) {
            float added[WIDTH];
            unpack(raw.residual, added);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) values[i] += added[i];
        }
        if constexpr (SUM)
            if (first) store<STREAMED>(sum + at(row, pack), values);
    }

    __device__ __forceinline__ void weights(int k, long long, int pack) {
        held[k].scale = load_cached<WIDTH>(scale + pack * WIDTH);
        if constexpr (BIAS) held[k].bias = load_cached<WIDTH>(bias + pack * WIDTH);
    }

    template <class Has>
    __device__ __forceinline__ Partial local(const float (&values)[CHUNKS][WIDTH], Has has) const {
        return Statistic::of(values, has);
    }

    __device__ __forceinline__ void finish(const Partial& row) {
        shift = row.shift();
        slope = row.slope(epsilon);
    }

    __device__ __forceinline__ void close(long long row, int k, int pack, float (&values)[WIDTH]) const {
        float scales[WIDTH], biases[WIDTH];
        unpack(held[k].scale, scales);
        if constexpr (BIAS) unpack(held[k].bias, biases);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const float normal = (Statistic::CENTRED ? values[i] - shift : values[i]) * slope;
            values[i] = BIAS ? fmaf(normal, scales[i], biases[i]) : normal * scales[i];
        }
        store<STREAMED>(y + at(row, pack), values);
    }
};
