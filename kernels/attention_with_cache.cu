// As attention_decode, of the rows of a past cache and new ones behind them; the tiles go on to the present cache.
//
// The past is read once and the present written once. Where both are one memory, in which a row of the past has its
// place, only the new rows are written. New rows are read from k and v, so that no block waits for another.
#include "attention_decode.cuh"

constexpr bool LARGE = PV_SIZE > 128;  // there are no registers for more

// A cache of a head: `past` rows and what comes behind them.
struct Cache {
    const T *past, *fresh;
    T* present;
    int past_row, fresh_row, present_row;
    int rows;      // of the past
    bool in_place;  // the past is there already
};

template <int BYTES>
__device__ __forceinline__ void load_shared(u32 from, u32* words) {
    if constexpr (BYTES == 16)
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(from));
    else if constexpr (BYTES == 8)
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(from));
    else if constexpr (BYTES == 4)
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[0]) : "r"(from));
    else
        asm volatile("{ .reg .b16 half; ld.shared.u16 half, [%1]; cvt.u32.u16 %0, half; }"
                     : "=r"(words[0]) : "r"(from));
}

struct CachedTiles : Tiles {
    const Cache &keys, &values;

    __device__ __forceinline__ CachedTiles(
        const Problem& p, const Place& at, int begin, int end, const Cache& keys, const Cache& values)
        : Tiles{p, at, begin, end}, keys(keys), values(values) {}

    __device__ __forceinline__ void load(int tile) const {
        if (tile < end) {
            load_half<SIZE, K_ROW>(stage(tile), keys, tile * BLOCK_K);
            load_half<VALUE_SIZE, V_ROW>(stage(tile) + K_BYTES, values, tile * BLOCK_K);
        }
        commit();
    }

    __device__ __forceinline__ void landed(int tile) const {
        store_half<SIZE, K_ROW>(stage(tile), keys, tile * BLOCK_K);
        store_half<VALUE_SIZE, V_ROW>(stage(tile) + K_BYTES, values, tile * BLOCK_K);
    }

    template <int ELEMENTS, int ROW_BYTES>
    __device__ __forceinline__ void load_half(u32 to, const Cache& cache, int first) const {
        if (!LARGE && first + BLOCK_K <= cache.rows) {
            const T* from = cache.past + (i64)first * cache.past_row;
            load_rows<BLOCK_K, ELEMENTS, ROW_BYTES>(to, from, cache.past_row, BLOCK_K);
            return;
        }
        constexpr int EACH = ACCESS / sizeof(T), PER_ROW = ELEMENTS / EACH;
#pragma unroll(LARGE ? 2 : 1)
        for (int i = threadIdx.x; i < BLOCK_K * PER_ROW; i += THREADS) {
            const int r = i / PER_ROW, column = i % PER_ROW * EACH, row = first + r;
            const T* from = row < cache.rows ? cache.past + (i64)row * cache.past_row
                                             : cache.fresh + (i64)(row - cache.rows) * cache.fresh_row;
            const bool there = row < p.keys;
            copy(to + r * ROW_BYTES + column * UNIT, there ? from + column : p.q, there);
        }
    }

    template <int ELEMENTS, int ROW_BYTES>
    __device__ __forceinline__ void store_half(u32 from, const Cache& cache, int first) const {
        static_assert(sizeof(T) == UNIT, "shared memory holds elements as they are");
        constexpr int EACH = ACCESS / sizeof(T), PER_ROW = ELEMENTS / EACH;
        const int begin = cache.in_place ? max(0, cache.rows - first) : 0, end = min(BLOCK_K, p.keys - first);
        T* to = cache.present + (i64)first * cache.present_row;
#pragma unroll(LARGE ? 1 : 4)
        for (int i = begin * PER_ROW + threadIdx.x; i < end * PER_ROW; i += THREADS) {
            const int r = i / PER_ROW, column = i % PER_ROW * EACH;
            u32 words[(ACCESS + 3) / 4];
            load_shared<ACCESS>(from + r * ROW_BYTES + column * UNIT, words);
            store_bytes<true, ACCESS>(reinterpret_cast<char*>(to + r * cache.present_row + column), words);
        }
    }
};

// k and v of the problem are the present caches; `same`: a row has its place at the same distance from either cache.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) IN_CLUSTER attention_with_cache(
    ATTENTION_PARAMETERS, int splits, float* partial, float2* totals, const T* past_k, const T* past_v,
    const T* new_k, const T* new_v, i64 past_k_batch, i64 past_k_head, i64 past_k_row, i64 past_v_batch,
    i64 past_v_head, i64 past_v_row, i64 new_k_batch, i64 new_k_head, i64 new_k_row, i64 new_v_batch, i64 new_v_head,
    i64 new_v_row, int past, int same) {
    wait_for_predecessor();
    release_successor();
    const Problem problem{ATTENTION_ARGUMENTS};
    const int split = blockIdx.x % splits;
    const Place at = place_of(blockIdx.x / splits, problem);
    const Cache cached_keys{
        past_k + at.batch * past_k_batch + at.kv * past_k_head, new_k + at.batch * new_k_batch + at.kv * new_k_head,
        const_cast<T*>(k) + at.batch * k_batch + at.kv * k_head, int(past_k_row), int(new_k_row), int(k_row), past,
        same && past_k == k};
    const Cache cached_values{
        past_v + at.batch * past_v_batch + at.kv * past_v_head, new_v + at.batch * new_v_batch + at.kv * new_v_head,
        const_cast<T*>(v) + at.batch * v_batch + at.kv * v_head, int(past_v_row), int(new_v_row), int(v_row), past,
        same && past_v == v};
    const int tiles = (keys + BLOCK_K - 1) / BLOCK_K, each = (tiles + splits - 1) / splits;
    Warp warp;
    attend(warp, CachedTiles(problem, at, min(split * each, tiles), min((split + 1) * each, tiles), cached_keys,
                             cached_values));
    write_rows(warp, Out(problem, at), split, partial, totals);
}
