// Writes the new rows of keys and values into the present caches, and prepares the queries, in one launch.
//
// Sequence b has lengths[b] + 1 rows, and the new rows are the last of them. If there are more new rows than that, the
// sequence has no past, and the new rows begin at its first row. Queries and keys are divided by their root mean square
// (with NORM) and rotated by the angles of their positions; values are copied. LANES threads share one head of one new
// row.
//
// Blocks from `new_blocks` on fill the other rows of the present caches. They copy the rows of the past and clear the
// rows after the new ones. If a past cache is the same memory as its present cache, they only clear the CLEARED rows
// after the new ones, because attention_hopper.cu multiplies the values of these rows by weights of 0.
//
// With QUANTIZED, caches are bytes (quantized_cache.cuh). All rows that the attention reads are then also written as
// X_T to scratch memory, which has the layout of the present caches: new rows are first quantized, as in the cache.
//
// Macros: those of rotation.cuh, where X_T is the type of all operands but the tables and norms; HEADS, KV_HEADS;
// QUERIES, 1: the launch prepares queries; CLEARED; ACCESSES, vectors that a thread copies at once; THREADS; QUANTIZED
// and, with it, PER_CHANNEL.
#include "attention_turns.cuh"
#include "head_tensor.cuh"
#if QUANTIZED
#include "quantized_cache.cuh"
#endif

using i64 = long long;

constexpr int Q_HEADS = QUERIES ? HEADS : 0, ALL_HEADS = Q_HEADS + 2 * KV_HEADS;
constexpr int PER_ROW = SIZE / WIDTH;  // vectors of a row of a cache
constexpr int BLOCK_VECTORS = THREADS * ACCESSES;

static_assert(!NORM || (LANES <= 32 && (LANES & (LANES - 1)) == 0), "a head's threads are lanes of a warp");

struct Lengths {
    int past, end;  // index of the first new row, and of the row after the last one

    __device__ __forceinline__ Lengths(const int* lengths, int batch, int added, int rows)
        : past(max(0, max(0, min(rows - 1, lengths[batch]) + 1) - added)), end(min(rows, past + added)) {}
};

// The sizes, as an argument of the kernel; group_query.py writes the fields in this order.
struct Sizes {
    int batches;
    int added;            // new rows
    int past_rows, rows;  // rows of the past caches and of the present ones
    int new_blocks;       // blocks that have new rows
};
struct CacheMemory {  // caches of keys or of values: contiguous (batch, KV_HEADS, rows, SIZE)
#if QUANTIZED
    const u8* past;
    u8* present;
    X_T* read;  // what the attention reads
    const f32* scales;

    // Writes elements of a new row of a head; `offset` is their place in the present cache.
    __device__ __forceinline__ void write(i64 offset, int head, int column, const Pack<X_T, WIDTH>& x) const {
        float values[WIDTH], factors[WIDTH];
        unpack(x, values), load_scales(scales_of(scales, head, SIZE), column, factors);
        Pack<u8, WIDTH> bytes = {};
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) bytes.words[i / 4] |= quantized(values[i], factors[i]) << i % 4 * 8;
        store_pack<false>(present + offset, bytes);
        read_back(offset, bytes, factors);
    }

    __device__ __forceinline__ void read_back(i64 offset, const Pack<u8, WIDTH>& bytes,
                                              const float (&factors)[WIDTH]) const {
        float values[WIDTH];
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) values[i] = number(bytes.words[i / 4] >> i % 4 * 8) * factors[i];
        store<false>(read + offset, values);
    }
#else
    const X_T* past;
    X_T* present;
#endif
};

// Fills the rows of a present cache that are not new. `blocks` blocks share the work; `block` is this block's index.
#if QUANTIZED
__device__ __forceinline__ void fill(CacheMemory cache, const int* lengths, Sizes sizes, int block, int blocks) {
    const bool in_place = cache.past == cache.present;
    const int rows = sizes.rows, parts = (int)(((i64)rows * PER_ROW + BLOCK_VECTORS - 1) / BLOCK_VECTORS);
    for (int part = block; part < parts * KV_HEADS * sizes.batches; part += blocks) {
        const int plane = part / parts;
        const Lengths own(lengths, plane / KV_HEADS, sizes.added, rows);
        const i64 first = (i64)(part % parts) * BLOCK_VECTORS + threadIdx.x;
        Pack<u8, WIDTH> bytes[ACCESSES];
#pragma unroll
        for (int i = 0; i < ACCESSES; ++i) {
            const i64 vector = first + i * THREADS, from = (i64)plane * sizes.past_rows * SIZE + vector * WIDTH;
            bytes[i] = {};
            if (vector / PER_ROW < min(own.past, sizes.past_rows)) bytes[i] = load_once<WIDTH>(cache.past + from);
        }
#pragma unroll
        for (int i = 0; i < ACCESSES; ++i) {
            const i64 vector = first + i * THREADS, to = (i64)plane * rows * SIZE + vector * WIDTH;
            const i64 row = vector / PER_ROW;
            if (row >= rows || (row >= own.past && row < own.end)) continue;
            if (!in_place) store_pack<false>(cache.present + to, bytes[i]);
            if (row >= own.end + CLEARED) continue;
            float factors[WIDTH];
            load_scales(scales_of(cache.scales, plane % KV_HEADS, SIZE), int(vector % PER_ROW) * WIDTH, factors);
            cache.read_back(to, bytes[i], factors);
        }
    }
}
#else
__device__ __forceinline__ void fill(CacheMemory cache, const int* lengths, Sizes sizes, int block, int blocks) {
    const bool in_place = cache.past == cache.present;
    if (in_place && CLEARED == 0) return;
    const int rows = sizes.rows, parts = (int)(((i64)rows * PER_ROW + BLOCK_VECTORS - 1) / BLOCK_VECTORS);
    for (int part = block; part < parts * KV_HEADS * sizes.batches; part += blocks) {
        const int plane = part / parts;
        const Lengths own(lengths, plane / KV_HEADS, sizes.added, rows);
        const int cleared = in_place ? min(rows, own.end + CLEARED) : rows;
        Pack<X_T, WIDTH> read[ACCESSES];
        i64 targets[ACCESSES];
#pragma unroll
        for (int i = 0; i < ACCESSES; ++i) {
            const i64 vector = (i64)(part % parts) * BLOCK_VECTORS + i * THREADS + threadIdx.x;
            const int row = (int)(vector / PER_ROW), column = (int)(vector % PER_ROW) * WIDTH;
            const bool copied = !in_place && row < own.past && row < sizes.past_rows;
            targets[i] = copied || (row >= own.end && row < cleared) ? ((i64)plane * rows + row) * SIZE + column : -1;
            read[i] = {};
            if (copied) read[i] = load_once<WIDTH>(cache.past + ((i64)plane * sizes.past_rows + row) * SIZE + column);
        }
#pragma unroll
        for (int i = 0; i < ACCESSES; ++i)
            if (targets[i] >= 0) store_pack<false>(cache.present + targets[i], read[i]);
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    group_query_append(const __grid_constant__ HeadTensor<const X_T> q, const __grid_constant__ HeadTensor<const X_T> k,
                       const __grid_constant__ HeadTensor<const X_T> v, X_T* queries,
                       const __grid_constant__ CacheMemory keys, const __grid_constant__ CacheMemory values,
                       const int* lengths, Sizes sizes, const __grid_constant__ Turns turns) {
    release_successor();
    wait_for_predecessor();
    if (blockIdx.x >= sizes.new_blocks) {
        const int block = blockIdx.x - sizes.new_blocks, blocks = gridDim.x - sizes.new_blocks;
        fill(keys, lengths, sizes, block, blocks);
        fill(values, lengths, sizes, block, blocks);
        return;
    }
    const i64 item = (i64)blockIdx.x * THREADS + threadIdx.x;
    const int lane = (int)(item % LANES), head = (int)(item / LANES % ALL_HEADS);
    const i64 outer = item / LANES / ALL_HEADS;
    const bool present = outer < (i64)sizes.batches * sizes.added;
    if (!NORM && !present) return;  // with NORM all lanes take part in shuffles
    const int batch = present ? (int)(outer / sizes.added) : 0, row = present ? (int)(outer % sizes.added) : 0;
    const Lengths own(lengths, batch, sizes.added, sizes.rows);
    const bool of_query = head < Q_HEADS, of_key = !of_query && head < Q_HEADS + KV_HEADS;
    const int kv = head - Q_HEADS - (of_key ? 0 : KV_HEADS);
    const X_T* const x = of_query ? q.at(batch, head) + row * q.row
                         : of_key ? k.at(batch, kv) + row * k.row
                                  : v.at(batch, kv) + row * v.row;
#if QUANTIZED
    const i64 cached = (((i64)batch * KV_HEADS + kv) * sizes.rows + own.past + row) * SIZE;
    X_T* const y = queries + (outer * HEADS + head) * SIZE;
#else
    X_T* const y = of_query ? queries + (outer * HEADS + head) * SIZE
                            : (of_key ? keys.present : values.present) +
                                  (((i64)batch * KV_HEADS + kv) * sizes.rows + own.past + row) * SIZE;
#endif
    const auto write = [&](int column, const Pack<X_T, WIDTH>& vector) {
#if QUANTIZED
        if (!of_query) return (of_key ? keys : values).write(cached + column, kv, column, vector);
#endif
        store_pack<false>(y + column, vector);
    };

    Vectors raw[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const Piece piece(lane + s * LANES);
        raw[s] = {};  // an absent piece adds 0 to the sum of squares
        if (!piece.exists) continue;
        raw[s].first = load_once<WIDTH>(x + piece.first);
        if (piece.rotated) raw[s].second = load_once<WIDTH>(x + piece.second);
    }
    const float factor = NORM ? inverse_rms(raw, lane, of_query ? turns.q_epsilon : turns.k_epsilon) : 1.0f;
    if (!present || (!of_query && own.past + row >= own.end)) return;
    const i64 table = turns.table(outer, own.past + row);
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const Piece piece(lane + s * LANES);
        if (!piece.exists) continue;
        if (!of_query && !of_key) {
            write(piece.first, raw[s].first);
            if (piece.rotated) write(piece.second, raw[s].second);
            continue;
        }
        Rotation rotation;
        if (piece.rotated) rotation.load(turns.cos + table, turns.sin + table, lane + s * LANES);
        float one[WIDTH], other[WIDTH];
        turn(raw[s], piece, factor, of_query ? turns.q_scale : turns.k_scale, rotation, true, one, other);
        write(piece.y_first, pack<X_T>(one));
        if (piece.rotated) write(piece.y_second, pack<X_T>(other));
    }
}
