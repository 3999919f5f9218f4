// The gather of x for convolution kernels with the main loop of gemm_mma.cuh. The rows of the product are positions of
// the filter in all images; k runs over taps of the filter and, within a tap, over the channels of the group. A thread
// copies chunks of one position along k for several rows, so that it finds the tap and the channel once for all of
// them. For each row it holds the address and the coordinates that the first tap reads. Elements in the padding become
// zero. A copy never crosses from tap to tap, because X_COPY divides the bytes of a group's channels.
//
// Macros, besides those of gemm_mma.cuh:
//   DIMS               spatial axes: 1 (W), 2 (H, W) or 3 (D, H, W); sizes of missing axes are 1 and not read
//   GROUPS, CHANNELS   groups; channels of x in one group
//   X_NCHW             1: x is (N, C, spatial...), 0: (N, spatial..., C)
//   X_COPY             bytes of a copy to shared memory: 16, 8, 4, or 2; divides the bytes of a group's channels
#pragma once
#include "types.cuh"
#include "conv_sizes.cuh"
#include "gemm_mma.cuh"

constexpr bool HAS_DEPTH = DIMS > 2, HAS_HEIGHT = DIMS > 1;
constexpr int NOWHERE = -(1 << 30);  // a coordinate that lies outside the image at every tap

static_assert(CHANNELS * ITEM % X_COPY == 0 && (!X_NCHW || X_COPY == ITEM), "a copy is of one tap");

struct Shape {
    Position sizes, counts, pads;  // sizes of x; numbers of positions; padding before x

    __device__ __forceinline__ i64 pixels() const {  // pixels per image of x
        return (HAS_DEPTH ? i64(sizes.d) : 1) * (HAS_HEIGHT ? sizes.h : 1) * sizes.w;
    }

    // Returns the index of a pixel of x in its image.
    __device__ __forceinline__ i64 index(const Position& at) const {
        i64 found = at.w;
        if constexpr (HAS_HEIGHT) found += i64(at.h) * sizes.w;
        if constexpr (HAS_DEPTH) found += i64(at.d) * sizes.h * sizes.w;
        return found;
    }

    __device__ __forceinline__ bool has(const Position& at, const Position& tap) const {
        bool inside = unsigned(at.w + tap.w) < unsigned(sizes.w);
        if constexpr (HAS_HEIGHT) inside = inside && unsigned(at.h + tap.h) < unsigned(sizes.h);
        if constexpr (HAS_DEPTH) inside = inside && unsigned(at.d + tap.d) < unsigned(sizes.d);
        return inside;
    }
};

// The positions of a tile: pixels of y, or of one phase of y (conv_phases.cuh). A thread copies every CHUNK_ROWS-th of
// them.
struct Pixels {
    static constexpr int CHUNKS = TILE_K_BYTES / 16, CHUNK_ROWS = THREADS / CHUNKS;
    static constexpr int EACH = (TILE_M + CHUNK_ROWS - 1) / CHUNK_ROWS;
    static_assert(THREADS % CHUNKS == 0, "a thread copies chunks of one position along k");

    const char* x;  // address of the group's first channel in the first pixel
    Shape shape;
    const char* corners[EACH];  // address at which each pixel's first tap reads; can lie outside x
    Position at[EACH];          // coordinates in x of these addresses

    __device__ __forceinline__ static int chunk() { return threadIdx.x % CHUNKS; }
    __device__ __forceinline__ static int row(int i) { return threadIdx.x / CHUNKS + i * CHUNK_ROWS; }
    __device__ __forceinline__ static bool is_in_tile(int i) { return TILE_M % CHUNK_ROWS == 0 || row(i) < TILE_M; }

    // Returns the bytes from the first channel of an image's first pixel to the first channel of `pixel`.
    __device__ __forceinline__ i64 offset(const Position& pixel) const {
        return shape.index(pixel) * (X_NCHW ? 1 : GROUPS * CHANNELS) * ITEM;
    }

    // Finds this thread's positions in a tile. The tile begins at position number `first` of all `count` positions.
    // Neighbouring positions lie `steps` apart in x.
    __device__ __forceinline__ Pixels(const T* whole, const Shape& given, const Position& steps, int group, int first,
                                      int count)
        : shape(given) {
        const i64 volume = shape.pixels();
        x = reinterpret_cast<const char*>(whole + i64(group) * CHANNELS * (X_NCHW ? volume : 1));
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            unsigned rest = first + row(i);
            const bool exists = rest < unsigned(count);
            at[i] = {};
            at[i].w = int(rest % shape.counts.w) * steps.w - shape.pads.w;
            rest /= shape.counts.w;
            if constexpr (HAS_HEIGHT) {
                at[i].h = int(rest % shape.counts.h) * steps.h - shape.pads.h;
                rest /= shape.counts.h;
            }
            if constexpr (HAS_DEPTH) {
                at[i].d = int(rest % shape.counts.d) * steps.d - shape.pads.d;
                rest /= shape.counts.d;
            }
            corners[i] = x + rest * volume * (GROUPS * CHANNELS * ITEM) + offset(at[i]);
            if (!exists) at[i].w = NOWHERE;
        }
    }
};

// Copies the part of x that belongs to one stage. The class Taps has
//   WHOLE      whether the elements along k fill whole stages
//   k()        the number of elements along k
//   operator() the offset of a tap, given its index, from the first tap
template <class Taps>
struct PixelCopy {
    static constexpr bool THROUGH_REGISTERS = !is_asynchronous(X_COPY);
    unsigned registers[THROUGH_REGISTERS ? Pixels::EACH : 1][4];

    // A piece of X_COPY bytes along k: the tap and the channel where it begins.
    struct Piece {
        Position tap;
        i64 offset;   // bytes from a pixel's corner (the address that its first tap reads) to the piece
        bool exists;  // whether the piece lies within k

        __device__ __forceinline__ Piece(const Pixels& pixels, const Taps& taps, int k) {
            const unsigned channel = unsigned(k) % CHANNELS;
            tap = taps(unsigned(k) / CHANNELS);
            offset = pixels.offset(tap) + channel * (X_NCHW ? pixels.shape.pixels() : 1) * ITEM;
            exists = Taps::WHOLE || k < taps.k();
        }
    };

    __device__ __forceinline__ void begin(const Pixels& pixels, const Taps& taps, unsigned to, int k) {
        constexpr int PIECES = 16 / X_COPY;
        const int first = k + Pixels::chunk() * (16 / ITEM);
        if constexpr (THROUGH_REGISTERS) {
#pragma unroll
            for (int i = 0; i < Pixels::EACH; ++i) {
                const auto piece = [&](int at) { return Piece(pixels, taps, first + at / ITEM); };
                fetch_chunk<X_COPY>(
                    registers[i],
                    [&](int at) {
                        const Piece found = piece(at);
                        return found.exists && pixels.shape.has(pixels.at[i], found.tap);
                    },
                    [&](int at) { return pixels.corners[i] + piece(at).offset; });
            }
        } else {
#pragma unroll
            for (int part = 0; part < PIECES; ++part) {
                const Piece piece(pixels, taps, first + part * (X_COPY / ITEM));
#pragma unroll
                for (int i = 0; i < Pixels::EACH; ++i) {
                    if (!Pixels::is_in_tile(i)) continue;
                    const bool inside = piece.exists && pixels.shape.has(pixels.at[i], piece.tap);
                    const unsigned target = to + swizzled_offset<TILE_K_BYTES>(Pixels::row(i), Pixels::chunk());
                    copy_async<X_COPY>(target + part * X_COPY, inside ? pixels.corners[i] + piece.offset : pixels.x,
                                       inside ? X_COPY : 0);
                }
            }
        }
    }

    __device__ __forceinline__ void end(unsigned to) const {
        if constexpr (THROUGH_REGISTERS) {
#pragma unroll
            for (int i = 0; i < Pixels::EACH; ++i)
                if (Pixels::is_in_tile(i))
                    store_chunk(to + swizzled_offset<TILE_K_BYTES>(Pixels::row(i), Pixels::chunk()), registers[i]);
        }
    }
};
