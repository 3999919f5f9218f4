// What conv_mma.cu and gemm_mma.cuh need beside cuda_emulated.h: the rest of gemm_multiply.cuh and of types.cuh.
#define load_matrices load_rows
#include "cuda_emulated.h"
#undef load_matrices
#include "packed_words_emulated.h"

enum class Use { ONCE, OFTEN, CONSTANT };

template <Use USE, int BYTES>
void load_bytes(const char* from, unsigned* to) {
    emulated::check(from, BYTES);
    memcpy(to, from, BYTES);
}

inline unsigned short load_half(const char* from) {
    unsigned word = 0;
    load_bytes<Use::OFTEN, 2>(from, &word);
    return word;
}

constexpr bool is_asynchronous(int bytes) { return EMULATED_ARCH >= 800 && bytes >= 4; }

// With COPIES_AT_ONCE, a copy happens when it starts, at the earliest possible time, else when something waits for it.
template <int BYTES>
void copy_async(unsigned to, const char* from, int read) {
    static const char zeros[16] = {};
    char* target = emulated::memory + to;
    emulated::check_shared(target, BYTES);
    if (read != 0 && read != BYTES) emulated::fail("a copy of a part");
    if (read) emulated::check(from, BYTES);
    const char* source = read ? from : zeros;
    if (COPIES_AT_ONCE) memcpy(target, source, BYTES);
    else emulated::begin_copy(target, source, BYTES);
}

template <int PENDING>
void wait_for_groups() {
    wait_for_copy_groups<PENDING>();
}

inline void store_chunk(unsigned to, const unsigned (&words)[4]) {
    emulated::check_shared(emulated::memory + to, 16);
    memcpy(emulated::memory + to, words, 16);
}

template <int WORDS>
void load_words(unsigned from, unsigned (&to)[WORDS]) {
    emulated::check_shared(emulated::memory + from, 4 * WORDS);
    memcpy(to, emulated::memory + from, 4 * WORDS);
}

inline unsigned load_word(unsigned from) {
    unsigned words[1];
    load_words(from, words);
    return words[0];
}

// The offset of 16-byte chunk `chunk` of a row, as gemm_multiply.cuh has it.
template <int ROW_BYTES>
int swizzled_offset(int row, int chunk) {
    return row * ROW_BYTES + ((chunk ^ (ROW_BYTES == 64 ? row >> 1 & 3 : row & 7)) << 4);
}

template <bool TRANSPOSE>
void load_matrices(unsigned (&to)[4], unsigned from) {
    if constexpr (!TRANSPOSE) {
        load_rows<false>(to, from);
    } else {
        auto& addresses = emulated::exchange(&from, 1);
        const int lane = threadIdx.x % 32;
        for (int i = 0; i < 4; ++i) {
            unsigned halves[2] = {};
            for (int j = 0; j < 2; ++j) {
                const char* row = emulated::memory + addresses[i * 8 + lane % 4 * 2 + j][0];
                emulated::check_shared(row, 16);
                memcpy(&halves[j], row + lane / 4 * 2, 2);
            }
            to[i] = halves[0] | halves[1] << 16;
        }
        emulated::finish_exchange();
    }
}

// Runs a kernel; `grid` has its three sizes.
template <class Kernel>
void launch_all(Kernel kernel, const void* const* arguments, const int* grid, int threads, int shared_bytes) {
    for (int z = 0; z < grid[2]; ++z)
        emulated::launch(grid[0], grid[1], threads, shared_bytes, [=] {
            blockIdx.z = z;
            gridDim.z = grid[2];
            emulated::call(kernel, arguments);
        });
}
