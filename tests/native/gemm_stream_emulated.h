// What gemm_stream.cu needs in addition to hopper_emulated.h: its part of gemm_multiply.cuh, and its exchange of sums.
#include "hopper_emulated.h"

using hopper::shared_address;

// st.async to a block of the cluster: four floats arrive, and that block's mbarrier counts them.
inline void store_async(u32 to, u32 barrier, int block, const float (&values)[4]) {
    hopper::store_at(to, block, values);
    emulated::count(block, barrier, 0, -16);
}

template <int ROW_BYTES>
int swizzled_offset(int row, int chunk) {
    static_assert(ROW_BYTES == 128);
    return row * ROW_BYTES + ((chunk ^ row & 7) << 4);
}

inline void store_chunk(u32 to, const u32 (&words)[4]) { memcpy(emulated::memory + to, words, 16); }

template <bool TRANSPOSE>
void load_matrices(u32 (&to)[4], u32 from) {
    const u32* rows = emulated::exchange(from);
    const int group = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 2; ++j) {
            const u32 element = TRANSPOSE ? rows[8 * i + pair + j] + group * 2 : rows[8 * i + group] + (pair + j) * 2;
            memcpy(reinterpret_cast<char*>(&to[i]) + 2 * j, emulated::memory + element, 2);
        }
    emulated::end_exchange();
}

template <class T>
void multiply(T, float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    float rows[2][16], columns[2][16];  // of this lane's sums; four lanes have the elements of a row or column
    const int group = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
    const auto take = [&](u32 word, int first, float* to) {
        const u32* all = emulated::exchange(word);
        for (int lane = 0; lane < 4; ++lane) widen(T(), all[first + lane], to + lane * 2);
        return all;
    };
    for (int i = 0; i < 4; ++i) {
        take(a[i], group * 4, rows[i % 2] + i / 2 * 8);
        emulated::end_exchange();
    }
    for (int i = 0; i < 2; ++i) {
        const u32* all = take(i ? b1 : b0, pair * 4, columns[0] + i * 8);
        for (int lane = 0; lane < 4; ++lane) widen(T(), all[pair * 4 + 4 + lane], columns[1] + i * 8 + lane * 2);
        emulated::end_exchange();
    }
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 16; ++k) sum[i] += rows[i / 2][k] * columns[i % 2][k];
}
