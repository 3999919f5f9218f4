// y = activation((x - mean) / sqrt(var + epsilon) * scale + bias) over groups of channels of x (n, c, ...).
//
// A group of an image is a row in memory: CHANNELS channels, each with all pixels. The kernel moves each element of x
// and y once, 4 bytes an element in fp16, and computes in fp32. The struct Moments of statistics.cuh computes mean and
// variance.
//
//   GROUPS         groups of an image    CHANNELS  channels of a group
//   CHANNEL_PACKS  vectors of a channel, as a number or, if the length is an argument, as the Divisor `packs`; a vector
//                  does not cross a channel's end
#include "types.cuh"
#include "activations.cuh"
#include "program.cuh"
#include "rows.cuh"
#include "statistics.cuh"

struct GroupNorm {
    static constexpr bool WEIGHTS_VARY = true;
    static constexpr bool LOCATES = false;
    using Partial = Moments;
    using Raw = Pack<X_T, WIDTH>;

    const X_T* x;
    const SCALE_T* scale;
    const BIAS_T* bias;
    Y_T* y;
    float epsilon;
    Divisor packs;
    int length;
    bool streamed;
    Program program;
    Pack<SCALE_T, 1> scales[CHUNKS];
    Pack<BIAS_T, 1> biases[CHUNKS];
    float shift, slope;

    __device__ __forceinline__ Raw fetch(long long row, int pack) const {
        return load_once<WIDTH>(x + row * ROW + pack * WIDTH);
    }
    __device__ __forceinline__ void copy_async(Raw& raw, long long row, int pack) const {
        copy_to_shared<WIDTH>(raw, x + row * ROW + pack * WIDTH);
    }
    __device__ __forceinline__ void convert(const Raw& raw, long long, int, float (&values)[WIDTH], bool) const {
        unpack(raw, values);
    }
    __device__ __forceinline__ void load_weights(int k, long long row, int pack) {
        const int channel = int(row % GROUPS) * CHANNELS + pack / CHANNEL_PACKS;
        scales[k] = load_cached<1, WEIGHTS_CONSTANT>(scale + channel);
        biases[k] = load_cached<1, WEIGHTS_CONSTANT>(bias + channel);
    }
    template <class Exists>
    __device__ __forceinline__ Partial reduce_thread(const float (&values)[CHUNKS][WIDTH], Exists exists) const {
        return Moments::of(values, exists);
    }
    __device__ __forceinline__ void set_statistics(const Partial& row) {
        shift = row.shift();
        slope = row.slope(ROW, epsilon);
    }
    __device__ __forceinline__ void store_result(long long row, int k, int pack, float (&values)[WIDTH]) const {
        float weight[1], offset[1];
        unpack(scales[k], weight);
        unpack(biases[k], offset);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i)
            values[i] = activate::ACTIVATION(fmaf((values[i] - shift) * slope, weight[0], offset[0]), 0.0f, 0.0f);
        if constexpr (HAS_PROGRAM) {
            const int channel = pack / CHANNEL_PACKS, column = (pack - channel * int(packs.value)) * WIDTH;
            const long long at = row * ROW + pack * WIDTH;
            apply_program(program, {int(row * CHANNELS + channel), 0, at - column}, column, values);
        }
        store_as(streamed, y + row * ROW + pack * WIDTH, values);
    }
};

ROW_KERNEL group_norm(const X_T* x, const SCALE_T* scale, const BIAS_T* bias, Y_T* y, float epsilon, u32 packs,
                      u64 packs_multiplier, int length, long long rows PROGRAM_PARAMETERS) {
    each_row(GroupNorm{x, scale, bias, y, epsilon, {packs, packs_multiplier}, length, STREAMED, {PROGRAM_ARGUMENTS}},
             rows, length);
}
