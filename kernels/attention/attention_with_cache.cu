// Attention of few queries over a growing cache: attention_decode, whose blocks also write the present caches.
//
// The keys and values are rows of the past caches, followed by the new rows. A block reads them tile by tile as
// attention_decode does, and stores each tile to the present cache once it is in shared memory. So the past caches are
// read once, and the present caches are written once. If a past cache and its present cache are the same memory, and a
// row has the same offset in both, only the new rows are written. New rows are always read from k and v, so that no
// block waits for another.
//
// With LENGTHS, each batch element has a past of its own length. With TURNS, new keys and queries are normalized and
// rotated in shared memory before they are used.
//
// With QUANTIZED, tiles are bytes, which the products convert (attention_mma_warp.cuh). New rows lie after the stages
// in shared memory, as T, until they are turned and quantized into their tile: a row is attended to as the cache holds
// it. The scale of the keys is part of the scale of the scores. With PER_CHANNEL, the queries are multiplied by each
// element's share of the largest scale. The sums of values are multiplied by their scales once.
//
// Macros: those of attention_decode.cu; TURNS and, with it, those of attention_turns.cuh; QUANTIZED and, with it,
// PER_CHANNEL.
#include "attention_cache.cuh"
#include "attention_decode.cuh"
#include "attention_turns.cuh"

constexpr bool LARGE_HEAD_DIM = PV_SIZE > 128;  // loops are unrolled less, to save registers

struct CachedTiles : Tiles {
    const Cache &keys, &values;
    const Turns& turns;

    __device__ __forceinline__ CachedTiles(const Problem& p, const WorkTile& at, int begin, int end, const Cache& keys,
                                           const Cache& values, const Turns& turns)
        : Tiles{p, at, begin, end}, keys(keys), values(values), turns(turns) {}

    __device__ __forceinline__ void load(int tile) const {
        if (tile < end) {
            load_half<HEAD_DIM, K_ROW>(stage(tile), keys, tile * BLOCK_N);
            load_half<HEAD_DIM_V, V_ROW>(stage(tile) + K_BYTES, values, tile * BLOCK_N);
        }
        commit();
    }

    // The copies of queries, and of new rows, are a group of their own if prepare_queries waits for it.
    __device__ __forceinline__ void load_queries(u32 tile) const {
        Tiles::load_queries(tile);
#if QUANTIZED
        if (end * BLOCK_N > keys.rows) {
            load_rows<ADDED_ROWS, HEAD_DIM, Q_ROW>(added(), keys.added, keys.added_row, p.keys - keys.rows);
            load_rows<ADDED_ROWS, HEAD_DIM, Q_ROW>(added() + ADDED_BYTES, values.added, values.added_row,
                                                   p.keys - keys.rows);
        }
#endif
        if (TURNS || IS_QUANTIZED) commit();
    }

    __device__ __forceinline__ void prepare_queries(u32 tile) const {
#if TURNS || QUANTIZED
        wait_copies<STAGES - 1>();
        __syncthreads();
#endif
#if TURNS
        const int count = min(BLOCK_M, p.queries * GQA_GROUP - at.row);
        turn_rows(tile, 0, count, turns.q_scale, turns.q_epsilon, [&](int r) { return (at.row + r) / GQA_GROUP; });
#endif
#if QUANTIZED && PER_CHANNEL
        __syncthreads();
        scale_queries(tile);
#endif
    }

    __device__ __forceinline__ void landed(int tile) const {
#if TURNS || QUANTIZED
        const int start = tile * BLOCK_N, first = max(0, keys.rows - start), end = min(BLOCK_N, p.keys - start);
        if (first < end) {
#if QUANTIZED
            const u32 new_keys = added() + (start - keys.rows) * Q_ROW, new_values = new_keys + ADDED_BYTES;
#else
            const u32 new_keys = stage(tile);
#endif
#if TURNS
            turn_rows(new_keys, first, end, turns.k_scale, turns.k_epsilon,
                      [&](int r) { return start + r - keys.rows; });
            __syncthreads();
#endif
#if QUANTIZED
            quantize_rows<K_ROW>(stage(tile), new_keys, first, end, key_scales);
            quantize_rows<V_ROW>(stage(tile) + K_BYTES, new_values, first, end, value_scales);
            __syncthreads();
#endif
        }
#endif
        store_half<HEAD_DIM, K_ROW>(stage(tile), keys, tile * BLOCK_N);
        store_half<HEAD_DIM_V, V_ROW>(stage(tile) + K_BYTES, values, tile * BLOCK_N);
    }

#if TURNS
    // Normalizes and rotates the rows from `first` up to, but without, `end` of a tile. Row r has the position of new
    // row `added(r)`.
    template <class Added>
    __device__ __forceinline__ void turn_rows(u32 tile, int first, int end, const SCALE_T* scale, float epsilon,
                                              const Added& added) const {
        constexpr int BYTES = WIDTH * sizeof(T), ROWS = THREADS / LANES;
        const int lane = threadIdx.x % LANES;
        for (int from = first; from < end; from += ROWS) {  // all lanes run every round, because inverse_rms shuffles
            const int r = from + threadIdx.x / LANES;
            const u32 row = tile + r * Q_ROW;
            Vectors raw[STEPS];
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                const Piece piece(lane + s * LANES);
                raw[s] = {};  // an absent piece adds 0 to the sum of squares
                if (r >= end || !piece.exists) continue;
                load_shared<BYTES>(row + piece.first * SHARED_ITEM, raw[s].first.words);
                if (piece.rotated) load_shared<BYTES>(row + piece.second * SHARED_ITEM, raw[s].second.words);
            }
            const float factor = NORM ? inverse_rms(raw, lane, epsilon) : 1.0f;
            if (r >= end) continue;
            const i64 table = turns.table((i64)at.batch * p.queries + added(r), keys.rows + added(r));
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                const Piece piece(lane + s * LANES);
                if (!piece.exists) continue;
                Rotation rotation;
                if (piece.rotated) rotation.load(turns.cos + table, turns.sin + table, lane + s * LANES);
                float one[WIDTH], other[WIDTH];
                turn(raw[s], piece, factor, scale, rotation, true, one, other);
                store_shared<BYTES>(row + piece.y_first * SHARED_ITEM, pack<T>(one).words);
                if (piece.rotated) store_shared<BYTES>(row + piece.y_second * SHARED_ITEM, pack<T>(other).words);
            }
        }
    }
#endif

#if QUANTIZED
    static constexpr int ADDED_ROWS = BLOCK_M / GQA_GROUP, ADDED_BYTES = ADDED_ROWS * Q_ROW;
    static_assert(HEAD_DIM == HEAD_DIM_V && HEAD_DIM % 8 == 0, "keys and values have the same rows");
    static_assert(sizeof(T) == SHARED_ITEM, "shared memory holds new rows as they are");
    const f32 *key_scales, *value_scales;  // of the head
    float largest;                         // the largest of the scales of keys, up to the sign

    __device__ __forceinline__ u32 added() const { return stages + STAGES * STAGE; }  // keys, followed by values

    template <int ELEMENTS, int ROW_BYTES>
    __device__ __forceinline__ void load_half(u32 to, const Cache& cache, int first) const {
        const u8* from = cache.past + (i64)first * cache.past_row;
        load_rows<BLOCK_N, ELEMENTS, ROW_BYTES>(to, from, cache.past_row, cache.rows - first);
    }

    // Quantizes the new rows of a tile, from row `first` up to, but without, `end`; row r lies at `rows` + r * Q_ROW.
    template <int ROW_BYTES>
    __device__ __forceinline__ void quantize_rows(u32 tile, u32 rows, int first, int end, const f32* scales) const {
        constexpr int PER_ROW = HEAD_DIM / 4;
        for (int i = first * PER_ROW + threadIdx.x; i < end * PER_ROW; i += THREADS) {
            const int r = i / PER_ROW, column = i % PER_ROW * 4;
            Pack<T, 4> raw;
            load_shared<4 * SHARED_ITEM>(rows + r * Q_ROW + column * SHARED_ITEM, raw.words);
            float x[4], factors[4];
            unpack(raw, x), load_scales(scales, column, factors);
            u32 word = 0;
#pragma unroll
            for (int c = 0; c < 4; ++c) word |= quantized(x[c], factors[c]) << 8 * c;
            store_shared<4>(tile + r * ROW_BYTES + column, &word);
        }
    }

    // Multiplies each element of the queries by its scale of the keys, divided by the largest one.
    __device__ __forceinline__ void scale_queries(u32 tile) const {
        constexpr int PER_ROW = HEAD_DIM / 4;
        const float share = inverse(largest);
        for (int i = threadIdx.x; i < BLOCK_M * PER_ROW; i += THREADS) {
            const int column = i % PER_ROW * 4;
            const u32 to = tile + i / PER_ROW * Q_ROW + column * SHARED_ITEM;
            Pack<T, 4> raw;
            load_shared<4 * SHARED_ITEM>(to, raw.words);
            float x[4], factors[4];
            unpack(raw, x), load_scales(key_scales, column, factors);
#pragma unroll
            for (int c = 0; c < 4; ++c) x[c] *= factors[c] * share;
            store_shared<4 * SHARED_ITEM>(to, pack<T>(x).words);
        }
    }
#else
    template <int ELEMENTS, int ROW_BYTES>
    __device__ __forceinline__ void load_half(u32 to, const Cache& cache, int first) const {
        if (!LARGE_HEAD_DIM && first + BLOCK_N <= cache.rows) {
            const T* from = cache.past + (i64)first * cache.past_row;
            load_rows<BLOCK_N, ELEMENTS, ROW_BYTES>(to, from, cache.past_row, BLOCK_N);
            return;
        }
        constexpr int EACH = ACCESS_BYTES / sizeof(T), PER_ROW = ELEMENTS / EACH;
#pragma unroll(LARGE_HEAD_DIM ? 2 : 1)
        for (int i = threadIdx.x; i < BLOCK_N * PER_ROW; i += THREADS) {
            const int r = i / PER_ROW, column = i % PER_ROW * EACH, row = first + r;
            const T* from = row < cache.rows ? cache.past + (i64)row * cache.past_row
                                             : cache.added + (i64)(row - cache.rows) * cache.added_row;
            const bool inside = row < p.keys;
            copy(to + r * ROW_BYTES + column * SHARED_ITEM, inside ? from + column : p.q.data, inside);
        }
    }

#endif

    template <int ELEMENTS, int ROW_BYTES>
    __device__ __forceinline__ void store_half(u32 from, const Cache& cache, int first) const {
        static_assert(sizeof(Cached) == KEY_ITEM, "shared memory holds elements as they are");
        constexpr int BYTES = ACCESS<Cached>, EACH = BYTES / sizeof(Cached), PER_ROW = ELEMENTS / EACH;
        const int begin = cache.in_place ? max(0, cache.rows - first) : 0, end = min(BLOCK_N, p.keys - first);
        Cached* to = cache.present + (i64)first * cache.present_row;
#pragma unroll(LARGE_HEAD_DIM ? 1 : 4)
        for (int i = begin * PER_ROW + threadIdx.x; i < end * PER_ROW; i += THREADS) {
            const int r = i / PER_ROW, column = i % PER_ROW * EACH;
            u32 words[(BYTES + 3) / 4];
            load_shared<BYTES>(from + r * ROW_BYTES + column * KEY_ITEM, words);
            store_bytes<true, BYTES>(reinterpret_cast<char*>(to + r * cache.present_row + column), words);
        }
    }
};

// Prefetches the first tiles of a block's part of the past into L2 while the previous kernel runs. That kernel can
// still be writing the lengths, but here they only decide which rows are prefetched.
__device__ __forceinline__ void prefetch_past(const Problem& p, const CacheRows& keys, const CacheRows& values,
                                              int past, int plane, int split, int splits) {
#if __CUDA_ARCH__ >= 900
    const int batch = plane / p.kv_heads, head = plane % p.kv_heads;
    const Cached *const past_k = keys.past.at(batch, head), *const past_v = values.past.at(batch, head);
    int rows = past + p.queries;
    if constexpr (LENGTHS) rows = min(rows, max(0, static_cast<const volatile int*>(p.lengths)[batch]) + 1);
    const int tiles = (rows + BLOCK_N - 1) / BLOCK_N, each = (tiles + splits - 1) / splits;
    const int first = split * each * BLOCK_N, end = min(min(past, rows), first + min(each, STAGES - 1) * BLOCK_N);
    for (int row = first + threadIdx.x; row < end; row += THREADS) {
        const char* const k = reinterpret_cast<const char*>(past_k + row * keys.past.row);
        const char* const v = reinterpret_cast<const char*>(past_v + row * values.past.row);
        for (int i = 0; i < HEAD_DIM * int(sizeof(Cached)); i += 128)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(k + i));
        for (int i = 0; i < HEAD_DIM_V * int(sizeof(Cached)); i += 128)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(v + i));
    }
#endif
}

// k and v of the problem are the present caches. `same_offsets`: a row has the same offset in the past and the present.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) IN_CLUSTER
    attention_with_cache(const __grid_constant__ Problem given, Splits splits, CacheRows keys, CacheRows values,
                         int past, int same_offsets, const __grid_constant__ Turns turns
#if QUANTIZED
                         ,
                         CacheScales scales
#endif
    ) {
    release_successor();
    const int split = blockIdx.x % splits.count, plane = blockIdx.x / splits.count;
    if constexpr (!WINDOW) prefetch_past(given, keys, values, past, plane, split, splits.count);
    wait_for_predecessor();
    Problem problem = given;
    WorkTile at = work_tile(plane, problem);
    const bool in_place = same_offsets && keys.past.data == problem.k.data && values.past.data == problem.v.data;
    if constexpr (LENGTHS) {
        past = min(past, max(0, problem.keys - problem.queries));
        problem.keys = at.end = min(problem.keys, past + problem.queries);
    }
    if (!in_place) at.begin = 0;  // rows before a window are copied, too
    const Cache cached_keys(keys, problem.k, at.batch, at.kv, past, in_place);
    const Cache cached_values(values, problem.v, at.batch, at.kv, past, in_place);
    const int first = at.begin / BLOCK_N, tiles = (problem.keys + BLOCK_N - 1) / BLOCK_N - first;
    const int each = (tiles + splits.count - 1) / splits.count;
    WarpState warp;
    if (split == 0) warp.begin_with_sinks(problem, at);
    CachedTiles source(problem, at, first + min(split * each, tiles), first + min((split + 1) * each, tiles),
                       cached_keys, cached_values, turns);
#if QUANTIZED
    source.key_scales = scales_of(scales.keys, at.kv, HEAD_DIM);
    source.value_scales = scales_of(scales.values, at.kv, HEAD_DIM);
    source.largest = largest_scale(source.key_scales, HEAD_DIM);
    problem.scale *= source.largest * NUMBER_UNIT;
#endif
    attend(warp, source);
#if QUANTIZED
    warp.scale_values(source.value_scales);
#endif
    write_rows(warp, Out(problem, at), split, splits);
}
