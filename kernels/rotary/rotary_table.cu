// Cosines and sines of position * frequency. A row has the values of a position, REPEATS times one after another. A
// thread computes one angle.
//
// The product is rounded to fp32 as the replaced ONNX operators round it. Positions of a long context need the exact
// range reduction of sincosf. Tables are small compared with the tensors that they rotate: the gain is one launch in
// place of six.
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    rotary_table(const POSITION_T* positions, const FREQUENCY_T* frequencies, COS_T* cosines, SIN_T* sines,
                 float factor, long long count) {
    const INDEX at = INDEX(blockIdx.x) * THREADS + threadIdx.x;
    wait_for_predecessor();
    if (RELEASE) release_successor();
    if (at >= INDEX(count)) return;
    const INDEX row = at / HALF, column = at % HALF;
    float frequency[1], sine[1], cosine[1];
    unpack(load_cached<1>(frequencies + column), frequency);
    sincosf(__fmul_rn(float(positions[row]), frequency[0]), sine, cosine);
    sine[0] *= factor;
    cosine[0] *= factor;
#pragma unroll
    for (int repeat = 0; repeat < REPEATS; ++repeat) {
        const INDEX to = (row * REPEATS + repeat) * HALF + column;
        store<0>(cosines + to, cosine);
        store<0>(sines + to, sine);
    }
}
