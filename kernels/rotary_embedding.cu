// y = x * cos + rotate_half(x) * sin for each head.
//
// Moves each element of x and y once, 4 bytes an element in fp16; a thread reads its piece of the tables once for
// HEADS_EACH heads. Computed in fp32.
//
//   SIZE           of a head; ROTATED of them are rotated, the rest is copied
//   HEADS          HEADS_EACH of them per thread
//   WIDTH          elements of a vector access; divides ROTATED / 2 and SIZE - ROTATED
//   INTERLEAVED    1: the elements of a pair are neighbours; 0: half of ROTATED apart
//   WHOLE_TABLE    1: a row of the tables has ROTATED elements, and both halves count; 0: it has ROTATED / 2
//   TABLE_BATCHED  1: each element of the batch has tables of its own
//   X_HEADS_FIRST, Y_HEADS_FIRST  1: (batch, heads, seq, size); 0: (batch, seq, heads, size)
#include "types.cuh"

constexpr int HALF = ROTATED / 2;
constexpr int TURNS = HALF / WIDTH;  // pieces of a head that are rotated: two vectors each
constexpr int PIECES = TURNS + (SIZE - ROTATED) / WIDTH;
constexpr int GROUPS = (HEADS + HEADS_EACH - 1) / HEADS_EACH;
constexpr int TABLE_ROW = WHOLE_TABLE ? ROTATED : HALF;

static_assert(HALF % WIDTH == 0 && (SIZE - ROTATED) % WIDTH == 0, "a piece is of one kind");

template <bool HEADS_FIRST>
__device__ __forceinline__ INDEX head(INDEX batch, int head, INDEX place, INDEX seq) {
    return HEADS_FIRST ? ((batch * HEADS + head) * seq + place) * SIZE : ((batch * seq + place) * HEADS + head) * SIZE;
}

// Values that lie as first0 second0 first1 second1 ... in two vectors, sorted into first and second, and back.
__device__ __forceinline__ void sort_pairs(float (&first)[WIDTH], float (&second)[WIDTH]) {
    float both[2 * WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) both[i] = first[i], both[WIDTH + i] = second[i];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) first[i] = both[2 * i], second[i] = both[2 * i + 1];
}

__device__ __forceinline__ void mix_pairs(float (&first)[WIDTH], float (&second)[WIDTH]) {
    float both[2 * WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) both[2 * i] = first[i], both[2 * i + 1] = second[i];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) first[i] = both[i], second[i] = both[WIDTH + i];
}

struct Turn {  // by the angles of one piece of the tables
    float cos_first[WIDTH], sin_first[WIDTH], cos_second[WIDTH], sin_second[WIDTH];

    __device__ __forceinline__ Turn(const COS_T* cos, const SIN_T* sin, INDEX at) {
        unpack(load_cached<WIDTH>(cos + at), cos_first);
        unpack(load_cached<WIDTH>(sin + at), sin_first);
        unpack(load_cached<WIDTH>(cos + at + (WHOLE_TABLE ? HALF : 0)), cos_second);
        unpack(load_cached<WIDTH>(sin + at + (WHOLE_TABLE ? HALF : 0)), sin_second);
    }

    __device__ __forceinline__ void apply(float (&first)[WIDTH], float (&second)[WIDTH]) const {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const float one = first[i], other = second[i];
            first[i] = fmaf(one, cos_first[i], -other * sin_first[i]);
            second[i] = fmaf(other, cos_second[i], one * sin_second[i]);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    rotary_embedding(const X_T* x, const COS_T* cos, const SIN_T* sin, Y_T* y, long long seq_length, long long count) {
    const INDEX item = INDEX(blockIdx.x) * THREADS + threadIdx.x;
    if (item >= INDEX(count)) return;
    const int piece = int(item % PIECES);
    const INDEX seq = INDEX(seq_length), place = item / PIECES % seq, above = item / PIECES / seq;
    const int from = int(above % GROUPS) * HEADS_EACH;
    const INDEX batch = above / GROUPS;
    const bool turned = piece < TURNS;
    const int first = !turned ? ROTATED + (piece - TURNS) * WIDTH : piece * WIDTH * (INTERLEAVED ? 2 : 1);
    const int second = first + (INTERLEAVED ? WIDTH : HALF);

    Pack<X_T, WIDTH> raw[HEADS_EACH][2];
#pragma unroll
    for (int k = 0; k < HEADS_EACH; ++k) {
        if (HEADS % HEADS_EACH != 0 && from + k >= HEADS) continue;
        const X_T* row = x + head<X_HEADS_FIRST>(batch, from + k, place, seq);
        raw[k][0] = load_once<WIDTH>(row + first);
        if (turned) raw[k][1] = load_once<WIDTH>(row + second);
    }
    const INDEX table = ((TABLE_BATCHED ? batch : 0) * seq + place) * TABLE_ROW;
    const Turn turn(cos, sin, table + (turned ? piece * WIDTH : 0));
#pragma unroll
    for (int k = 0; k < HEADS_EACH; ++k) {
        if (HEADS % HEADS_EACH != 0 && from + k >= HEADS) continue;
        Y_T* row = y + head<Y_HEADS_FIRST>(batch, from + k, place, seq);
        float one[WIDTH], other[WIDTH];
        unpack(raw[k][0], one);
        if (turned) {
            unpack(raw[k][1], other);
            if (INTERLEAVED) sort_pairs(one, other);
            turn.apply(one, other);
            if (INTERLEAVED) mix_pairs(one, other);
            store<STREAMED>(row + second, other);
        }
        store<STREAMED>(row + first, one);
    }
}
