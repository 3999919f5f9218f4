// The sums of a tile for a single row of x and weights of 4 bits, for nbits_mma.cu.
//
// mma's right operand has eight columns. Column c holds the elements of x that 16-byte chunk c of a stage's weights is
// multiplied by, and zeros elsewhere. So the sums of the eight chunks stay apart until the end of the stage, and the
// scales and zero points of their blocks are applied once for each chunk, not once for each mma.
//
// The four lanes of a row of weights read one chunk each: chunks 0 to 3, and then 4 to 7. So an mma multiplies four
// chunks at once, and only the sums of their four columns count. Of the four lanes that supply column c of x, only the
// lane with the place of chunk c among the four chunks supplies elements of x; the others supply zeros.
//
// In fp16, weights are multiplied as subnormal numbers: the bits of a weight q are the number 2^-24 q, or 2^-20 q if
// they are four bits higher. Each of these units has sums of its own. Zero points are subtracted from the sums.
#pragma once

constexpr bool SUBNORMAL = HALF;
constexpr int UNITS = SUBNORMAL ? 2 : 1;
constexpr float UNIT = SUBNORMAL ? 16777216.0f : 1.0f;     // by which sums are multiplied
constexpr bool SUBTRACTS = SUBNORMAL && (ZEROS || ZERO);   // zero points, from sums
constexpr int CHUNK_K = 128 / BITS, EIGHTS = CHUNK_K / 8;  // elements of a chunk, and groups of eight of them
constexpr bool SCALES_DIFFER = BLOCK_SIZE == CHUNK_K;      // two neighbouring chunks have two blocks

struct TileSums {
    // For each mma tile, the sums of rows lane / 4 and lane / 4 + 8, over two of the eight chunks of each stage.
    float of[MMA_N][2] = {};
    Elements own[EIGHTS] = {};  // the elements of x that this lane supplies; zeros if it supplies none

    // Adds the products of a stage. `row` is the address of the stage's elements of x.
    __device__ __forceinline__ void add_stage(const Slot& slot, unsigned row, int stage, const Masks& masks) {
        const int place = threadIdx.x % 4, column = threadIdx.x % 32 / 4;
        if (column % 4 == place)
#pragma unroll
            for (int i = 0; i < EIGHTS; ++i) own[i].load_eight(row + (column * EIGHTS + i) * 16);
        // A lane's columns count in one of the two fours. A factor takes fewer cycles than a selection, but makes results
        // NaN if x is infinite, as subtracting a zero point times x does.
        const float shares[2] = {place < 2 ? UNIT : 0.0f, place < 2 ? 0.0f : UNIT};
        float totals[4] = {};  // of x, for chunks 2 * place and 2 * place + 1
        if constexpr (SUBTRACTS) {
            constexpr unsigned ONES[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
            unsigned x[4];
            load_words(row + (column * EIGHTS + place) * 16, x);
            multiply(T(), totals, ONES, x[0], x[1]);
            multiply(T(), totals, ONES, x[2], x[3]);
        }
#pragma unroll
        for (int n = 0; n < MMA_N; ++n) {
            float sums[2][UNITS][4] = {};
#pragma unroll
            for (int four = 0; four < 2; ++four) multiply_chunks(sums[four], slot, n, four * 4 + place, stage, masks);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float scales[2];
                load_scales(slot, 2 * n + half, place, scales);
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float sum, fours[2];
#pragma unroll
                    for (int four = 0; four < 2; ++four) {
                        const float low = sums[four][0][2 * half + c], high = sums[four][UNITS - 1][2 * half + c];
                        fours[four] = SUBNORMAL ? fmaf(high, 0.0625f, low) : low;
                    }
                    if constexpr (SUBTRACTS) {
                        const float zero = slot.zero_value(2 * n + half, block_of(2 * place + c), stage);
                        sum = fmaf(fours[1], shares[1], fmaf(fours[0], shares[0], -zero * totals[c]));
                    } else {
                        sum = UNIT * (place < 2 ? fours[0] : fours[1]);
                    }
                    of[n][half] = fmaf(scales[c], sum, of[n][half]);
                }
            }
        }
    }

    // Writes the sums of a warp's tile to shared memory, added up over the chunks of its stages.
    __device__ __forceinline__ void store(float (&to)[SUM_ROWS][PITCH]) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < MMA_N; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                of[n][half] += __shfl_xor_sync(0xffffffffu, of[n][half], 1);
                of[n][half] += __shfl_xor_sync(0xffffffffu, of[n][half], 2);
                if (lane % 4 == 0) to[0][n * 16 + half * 8 + lane / 4] = of[n][half];
            }
    }

private:
    __device__ __forceinline__ static int block_of(int chunk) { return chunk * CHUNK_K / BLOCK_SIZE % BLOCKS; }

    __device__ __forceinline__ static void load_scales(const Slot& slot, int eight, int place, float (&to)[2]) {
        if constexpr (SCALES_DIFFER) {
            widen(T(), load_word(slot.scale_at(eight, 2 * place)), to);
        } else {
            to[0] = to[1] = slot.scale(eight, block_of(2 * place));
        }
    }

    // Adds the products of mma tile n with four chunks; `chunk` is the lane's.
    __device__ __forceinline__ void multiply_chunks(float (&sums)[UNITS][4], const Slot& slot, int n, int chunk,
                                                    int stage, const Masks& masks) const {
        unsigned words[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) slot.load_chunk(2 * n + half, chunk, words[half]);
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) {
            unsigned pairs[2][4];
#pragma unroll
            for (int half = 0; half < 2; ++half)
                if constexpr (SUBNORMAL) {
                    const unsigned word = words[half][i] ^ SIGNS;
#pragma unroll
                    for (int p = 0; p < 4; ++p)
                        pairs[half][p] = (p < 2 ? word : word >> 8) & (p % 2 ? masks.high : masks.low);
                } else {
                    const unsigned word[1] = {words[half][i] ^ SIGNS};
                    numbers(word, masks, Offsets(slot.zero(2 * n + half, block_of(chunk), stage)), pairs[half]);
                }
#pragma unroll
            for (int p = 0; p < 2; ++p) {
                const unsigned a[4] = {pairs[0][p], pairs[1][p], pairs[0][p + 2], pairs[1][p + 2]};
                multiply(T(), sums[p % UNITS], a, own[i].pairs[p], own[i].pairs[p + 2]);
            }
        }
    }
};
