// The constants and parameters of attention_mma.cuh, and the copies of tiles of q, k and v to shared memory.
#pragma once

#include "attention_results.cuh"
#include "attention_score_tensor.cuh"
#include "head_tensor.cuh"
#include "quantized_cache.cuh"

enum { HALF, TF32, FP32 };                   // values of the macro MATH_KIND
enum { NONE, BOOLEAN, INVERTED, ADDITIVE };  // values of the macro MASK

template <bool FIRST, class A, class B>
struct Conditional {
    using type = A;
};
template <class A, class B>
struct Conditional<false, A, B> {
    using type = B;
};
using Shared = Conditional<MATH_KIND == FP32, f32, T>::type;  // element type in shared memory

constexpr int odd_sixteens(int bytes) { return ((bytes + 15) / 16 | 1) * 16; }
constexpr int up(int n, int step) { return (n + step - 1) / step * step; }

constexpr int SHARED_ITEM = sizeof(Shared);
constexpr int THREADS = 32 * WARPS_M * WARPS_N;
constexpr int BLOCK_M = WARPS_M * M_TILES * 16;  // rows of a block
constexpr int STEP = MATH_KIND == HALF ? 16 : MATH_KIND == TF32 ? 8 : 4;
constexpr int QK_SIZE = up(HEAD_DIM, STEP);
constexpr int QK_STEPS = QK_SIZE / STEP;
constexpr int PV_SIZE = up(HEAD_DIM_V, MATH_KIND == HALF ? 16 : 8);
constexpr int V_TILES = PV_SIZE / 8;
constexpr int WARP_KEYS = BLOCK_N / WARPS_N;
constexpr int KEY_TILES = WARP_KEYS / 8, SIXTEENS = (KEY_TILES + 1) / 2;
constexpr int KEY_ITEM = IS_QUANTIZED ? 1 : SHARED_ITEM;  // bytes of an element of keys and values in shared memory
// A row takes an odd multiple of 16 bytes, so that accesses to eight rows at once, as by ldmatrix, have no bank
// conflicts.
constexpr int Q_ROW = odd_sixteens(QK_SIZE * SHARED_ITEM);
constexpr int K_ROW = odd_sixteens(QK_SIZE * KEY_ITEM), V_ROW = odd_sixteens(PV_SIZE * KEY_ITEM);
constexpr int Q_BYTES = BLOCK_M * Q_ROW, K_BYTES = BLOCK_N * K_ROW, STAGE = K_BYTES + BLOCK_N * V_ROW;

static_assert(WARP_KEYS % (MATH_KIND == FP32 ? 8 : 16) == 0, "a warp takes keys by sixteens");

// Finite scores, times log2(e), stay above LOWEST, so that the sum of two of them is finite. So a row whose scores
// are all the lowest float32 gets equal probabilities, instead of counting as fully masked.
constexpr float LOWEST = -1.6e38f;

extern __shared__ __align__(128) char shared_bytes[];

__device__ __forceinline__ u32 shared_base() {
    u32 address;
    asm("{ .reg .u64 wide; cvta.to.shared.u64 wide, %1; cvt.u32.u64 %0, wide; }" : "=r"(address) : "l"(shared_bytes));
    return address;
}

// ---- from global to shared memory --------------------------------------------------------------------------------

__device__ __forceinline__ void store_shared(u32 to, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}

template <int BYTES>
__device__ __forceinline__ void store_shared(u32 to, const u32* words) {
    if constexpr (BYTES > 16) {
        store_shared<16>(to, words);
        store_shared<BYTES - 16>(to + 16, words + 4);
    } else if constexpr (BYTES == 16) {
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                     "r"(words[3])
                     : "memory");
    } else if constexpr (BYTES == 8) {
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(words[0]), "r"(words[1]) : "memory");
    } else if constexpr (BYTES == 4) {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(words[0]) : "memory");
    } else {
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"((unsigned short)words[0]) : "memory");
    }
}

template <int BYTES>
__device__ __forceinline__ void load_shared(u32 from, u32* words) {
    if constexpr (BYTES == 16)
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                     : "r"(from));
    else if constexpr (BYTES == 8)
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(from));
    else if constexpr (BYTES == 4) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[0]) : "r"(from));
    else
        asm volatile("{ .reg .b16 half; ld.shared.u16 half, [%1]; cvt.u32.u16 %0, half; }"
                     : "=r"(words[0])
                     : "r"(from));
}

// The bytes of an access to memory, and of an element in shared memory. E is T or Cached.
template <class E>
constexpr int ACCESS = sizeof(E) > 1                      ? ACCESS_BYTES
                       : HEAD_DIM % 16 || HEAD_DIM_V % 16 ? 8
                                                          : 16;
template <class E>
constexpr int ITEM = sizeof(E) > 1 ? SHARED_ITEM : 1;

#if __CUDA_ARCH__ >= 800
constexpr bool ASYNC = MATH_KIND != FP32 && ACCESS_BYTES >= 4 || MATH_KIND == FP32 && sizeof(T) == 4;
#else
constexpr bool ASYNC = false;
#endif

// Copies ACCESS bytes to shared memory; writes zeros if `inside` is false.
template <class E>
__device__ __forceinline__ void copy(u32 to, const E* from, bool inside) {
    constexpr int BYTES = ACCESS<E>, EACH = BYTES / sizeof(E);
    if constexpr (ASYNC) {
        if constexpr (BYTES == 16)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0)
                         : "memory");
        else
            asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES),
                         "r"(inside ? BYTES : 0)
                         : "memory");
    } else {
        Pack<E, EACH> read = {};
        if (inside) read = load_cached<EACH>(from);
        if constexpr (sizeof(E) == ITEM<E>) {
            store_shared<BYTES>(to, read.words);
        } else {
            float values[EACH];
            unpack(read, values);
            const auto wide = pack<f32>(values);
            store_shared<EACH * 4>(to, wide.words);
        }
    }
}

__device__ __forceinline__ void commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int PENDING>
__device__ __forceinline__ void wait_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// Copies COUNT rows of a tile, from row `first` on; `from` has `rows` rows. Row r lies at r / INTERLEAVE * outer +
// r % INTERLEAVE * inner.
template <int COUNT, int ELEMENTS, int ROW_BYTES, int INTERLEAVE = 1, class E>
__device__ __forceinline__ void load_rows(u32 tile, const E* from, i64 outer, int rows, int first = 0, i64 inner = 0) {
    constexpr int EACH = ACCESS<E> / sizeof(E), PER_ROW = ELEMENTS / EACH;
    constexpr int TOTAL = COUNT * PER_ROW, ROUNDS = (TOTAL + THREADS - 1) / THREADS;
    static_assert(ELEMENTS % EACH == 0, "rows are whole accesses");
    constexpr bool STEADY = INTERLEAVE == 1 && THREADS % PER_ROW == 0;  // a thread's accesses lie in one column
    const i64 step = THREADS / PER_ROW * outer;
    const E* next = from + (first + threadIdx.x / PER_ROW) * outer + threadIdx.x % PER_ROW * EACH;
#pragma unroll(MATH_KIND == FP32 ? 2 : ROUNDS <= 8 ? ROUNDS : 4)
    for (int round = 0; round < ROUNDS; ++round) {
        const int i = round * THREADS + threadIdx.x, r = i / PER_ROW, access = i % PER_ROW, row = first + r;
        if (TOTAL % THREADS && i >= TOTAL) break;
        const bool inside = row < rows;
        if constexpr (STEADY) {
            copy(tile + r * ROW_BYTES + access * EACH * ITEM<E>, inside ? next : from, inside);
            next += step;
        } else {
            const i64 offset = row / INTERLEAVE * outer + row % INTERLEAVE * inner + access * EACH;
            copy(tile + r * ROW_BYTES + access * EACH * ITEM<E>, from + (inside ? offset : 0), inside);
        }
    }
}

// Writes zeros to the columns from `used` up to, but without, `all`: products read them, but no copy writes them.
template <int ROW_BYTES>
__device__ __forceinline__ void clear_columns(u32 tile, int count, int used, int all) {
    const int width = all - used;
    for (int i = threadIdx.x; i < count * width; i += THREADS) {
        const u32 to = tile + i / width * ROW_BYTES + (used + i % width) * SHARED_ITEM;
        const u32 zero = 0;
        store_shared<SHARED_ITEM>(to, &zero);
    }
}

// ---- the parameters, and the work of a block ---------------------------------------------------------------------

#if RELATIVE
// A table of (heads, positions, HEAD_DIM), and the position of each query and key in it; see attention_mma_relative.cuh.
struct Positions {
    const T* vectors;
    const INDEX_T* indices;
    i64 positions;
};
#endif

// The kernels' argument; mma.py writes the fields in this order.
struct Problem {
    HeadTensor<const T> q;
    HeadTensor<const Cached> k, v;
    HeadTensor<OUT_T> out;
    ScoreTensor<MASK_T> mask;
    ScoreTensor<BIAS_T> bias;
#if RELATIVE
    Positions key_positions, query_positions;
#endif
    const SLOPE_T* slopes;
    const SINK_T* sinks;
    const int* lengths;
    int mask_key, bias_key;  // strides along keys: 0 or 1
    int queries, keys, kv_heads, row_tiles, causal, window;
    float scale, masked, cap;
#if RELATIVE
    float key_positions_scale, query_positions_scale;
#endif
};

struct WorkTile {
    int batch, kv, row;  // kv: the key head; row: the first row
    int begin, end;      // the block's rows see only keys from `begin` up to, but without, `end`
};

// seen_keys and last_key return the end of a range of keys (last key + 1). seen_keys: the keys that a query sees.
// last_key: the keys that a query reads, which are all keys if masked scores are finite and there is no second pass.
__device__ __forceinline__ int seen_keys(int query, int keys, int causal) {
    return CAUSAL ? min(keys, query + causal + 1) : keys;
}
__device__ __forceinline__ int last_key(int query, int keys, int causal) {
    return ADD_MASKED_SCORE && !SECOND_PASS ? keys : seen_keys(query, keys, causal);
}

// The first key that a query sees.
__device__ __forceinline__ int first_key(int query, const Problem& p) {
    return WINDOW ? max(0, seen_keys(query, p.keys, p.causal) - p.window) : 0;
}

// Returns the work of block `index`: tiles that see most keys start first. With LENGTHS, limits the keys of the problem
// to those of the block's batch element.
__device__ __forceinline__ WorkTile work_tile(u32 index, Problem& p) {
    const int tile = CAUSAL ? p.row_tiles - 1 - int(index % p.row_tiles) : int(index % p.row_tiles);
    const int head = index / p.row_tiles, batch = head / p.kv_heads, row = tile * BLOCK_M;
    if constexpr (LENGTHS) {
        p.keys = max(0, min(p.keys - 1, p.lengths[batch]) + 1);
        p.causal = max(0, p.keys - p.queries);
    }
    const int last = min(p.queries * GQA_GROUP - 1, row + BLOCK_M - 1) / GQA_GROUP;
    return {batch, head % p.kv_heads, row, first_key(row / GQA_GROUP, p), max(0, last_key(last, p.keys, p.causal))};
}

// The tiles of keys and values that a block processes: `begin` up to, but without, `end`. STAGES - 1 are in flight.
struct Tiles {
    const Problem& p;
    const WorkTile& at;
    int begin, end;
    u32 stages = shared_base() + Q_BYTES;

    __device__ __forceinline__ u32 stage(int tile) const { return stages + (tile - begin) % STAGES * STAGE; }

    __device__ __forceinline__ void landed(int tile) const {}           // called when all of a tile is in its stage
    __device__ __forceinline__ void prepare_queries(u32 tile) const {}  // called when the first tiles are in flight

    __device__ __forceinline__ void load(int tile) const {
        if (tile < end) {
            const int first = tile * BLOCK_N;
            const Cached* k = p.k.at(at.batch, at.kv) + first * p.k.row;
            const Cached* v = p.v.at(at.batch, at.kv) + first * p.v.row;
            load_rows<BLOCK_N, HEAD_DIM, K_ROW>(stage(tile), k, p.k.row, p.keys - first);
            load_rows<BLOCK_N, HEAD_DIM_V, V_ROW>(stage(tile) + K_BYTES, v, p.v.row, p.keys - first);
        }
        commit();
    }

    __device__ __forceinline__ void load_queries(u32 tile) const {
        const T* q = p.q.at(at.batch, at.kv * GQA_GROUP);
        load_rows<BLOCK_M, HEAD_DIM, Q_ROW, GQA_GROUP>(tile, q, p.q.row, p.queries * GQA_GROUP, at.row, p.q.head);
    }
};
