// y = activation(gate) * up: SwiGLU, GEGLU and their kind.
//
// Moves each element of gate, up and y once: 6 bytes an element in fp16. Computed in fp32, rounded once.
//
//   ROW                            elements of a row of y
//   GATE_ROW, UP_ROW               of rows of which the operand is a part; where they are ROW it is all of them
//   GATE_OFFSET, UP_OFFSET         elements of such a row in front of the part
#include "types.cuh"
#include "activations.cuh"
#include "elementwise.cuh"

template <int WHOLE_ROW, int OFFSET>
__device__ __forceinline__ INDEX place(INDEX at) {
    if constexpr (WHOLE_ROW == ROW) return at;
    return at / ROW * WHOLE_ROW + at % ROW + OFFSET;
}

struct GatedActivation {
    template <int W>
    struct Raw {
        Pack<GATE_T, W> gate;
        Pack<UP_T, W> up;
    };

    const GATE_T* gate;
    const UP_T* up;
    Y_T* y;

    template <int W>
    __device__ __forceinline__ Raw<W> fetch(INDEX at) const {
        return {load_once<W>(gate + place<GATE_ROW, GATE_OFFSET>(at)), load_once<W>(up + place<UP_ROW, UP_OFFSET>(at))};
    }

    template <int W>
    __device__ __forceinline__ void finish(INDEX at, const Raw<W>& raw) const {
        float gates[W], values[W];
        unpack(raw.gate, gates);
        unpack(raw.up, values);
#pragma unroll
        for (int i = 0; i < W; ++i) values[i] *= activate::ACTIVATION(gates[i], 0.0f, 0.0f);
        store<STREAMED>(y + at, values);
    }
};

ELEMENT_KERNEL gated_activation(const GATE_T* gate, const UP_T* up, Y_T* y, long long count) {
    each_element(GatedActivation{gate, up, y}, INDEX(count));
}
