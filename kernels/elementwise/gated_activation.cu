// y = activation(gate) * up: SwiGLU, GEGLU and the like. Gate and up are each a whole tensor, or a slice of every row
// of a tensor.
//
// The kernel moves each element of gate, up and y once, 6 bytes an element in fp16, computes in fp32 and rounds once.
//
//   ROW                     elements of a row of y
//   GATE_ROW, UP_ROW        elements of a row of the whole tensor; equal to ROW if there is no slice
//   GATE_OFFSET, UP_OFFSET  elements of a row of the whole tensor before the slice
#include "types.cuh"
#include "activations.cuh"
#include "elementwise.cuh"

template <int TENSOR_ROW, int OFFSET>
__device__ __forceinline__ INDEX tensor_index(INDEX at) {
    if constexpr (TENSOR_ROW == ROW) return at;
    return at / ROW * TENSOR_ROW + at % ROW + OFFSET;
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
    bool streamed;

    template <int W>
    __device__ __forceinline__ Raw<W> fetch(INDEX at) const {
        return {load_once<W>(gate + tensor_index<GATE_ROW, GATE_OFFSET>(at)),
                load_once<W>(up + tensor_index<UP_ROW, UP_OFFSET>(at))};
    }

    template <int W>
    __device__ __forceinline__ void finish(INDEX at, const Raw<W>& raw) const {
        float gates[W], values[W];
        unpack(raw.gate, gates);
        unpack(raw.up, values);
#pragma unroll
        for (int i = 0; i < W; ++i) values[i] *= activate::ACTIVATION(gates[i], 0.0f, 0.0f);
        store_as(streamed, y + at, values);
    }
};

ELEMENT_KERNEL gated_activation(const GATE_T* gate, const UP_T* up, Y_T* y, long long count) {
    each_element(GatedActivation{gate, up, y, STREAMED}, INDEX(count));
}
