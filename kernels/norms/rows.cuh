// Reductions along rows: every row is read once, kept in registers, reduced, and written once.
//
// A row belongs to THREADS threads (a power of two: part of a warp, a warp, or a block of several warps) in each of
// CLUSTER blocks. Each thread has CHUNKS packs of WIDTH elements. A row op is the struct with the operations of one
// norm or softmax. The Partial that it computes per thread, a few floats, is merged over the lanes by shuffles, then
// over warps and blocks through shared memory with one barrier. A row too long for the registers of its threads is
// processed in batches that fit. Between its two passes it is kept in shared memory (IN_SHARED), or it is read a second
// time.
//
//   ROW               elements of a row, see below           WIDTH    elements of a vector access; divides ROW
//   THREADS           threads per row and block              CHUNKS   vectors per thread and batch
//   ROWS_PER_BLOCK    rows side by side; 1 if THREADS > 32   CLUSTER  blocks that share a row (sm_90 and later)
//   FULL_BLOCKS       1: ROWS_PER_BLOCK divides the number of rows
//   PERSISTENT        1: blocks take further rows, and load the next one while they compute this one
//   STREAMED          1: outputs leave the L2 cache first; an expression over the kernel's arguments
//   PREFETCH_WEIGHTS  1: weights are loaded along with the row, which hides their latency and costs registers
//   WEIGHTS_CONSTANT  1: no kernel writes the weights
//   RELEASE           1: the next kernel may start at once
//   IN_SHARED         1: dynamic shared memory keeps the row, as CHUNKS * THREADS structs Raw for every batch; all
//                     loads of a block are in flight at once, and take no registers
//   MIN_BLOCKS        blocks that must fit on a multiprocessor: a bound on registers
//
// Where the length of rows is an argument, ROW is `length`, a member of the row op, and
//   BATCHED           1: a row may be longer than a batch; 0: no row is
// FULL_BLOCKS is 0 if the number of rows is unknown, and RELEASE may depend on gridDim. No output overlaps an input.
//
// A row op has
//   LOCATES, void locate(row)                   called once before the packs of a row are fetched
//   Raw fetch(row, pack)                        the loads of one pack
//   void copy_async(raw, row, pack)             the same loads, to shared memory: copy_to_shared
//   void convert(raw, row, pack, values, first) conversion to fp32; first: this is the first pass over the row
//   void load_weights(k, row, pack)             loads of operands that depend only on the index in the row
//   Partial reduce_thread(values, exists)       the partial of the packs k for which exists(k)
//   Partial::none, count, merge, merge_lanes, VALUES, load, save    as merge_across and merge_row use them
//   void set_statistics(partial)                takes the partial of the whole row
//   void store_result(row, k, pack, values)     computes and stores; values are as reduce_thread left them if
//                                               IN_REGISTERS
#pragma once
#include "cluster.cuh"

constexpr int LANES = THREADS < 32 ? THREADS : 32;
constexpr int WARPS = THREADS / LANES;
constexpr int STRIDE = THREADS * CLUSTER;
#ifdef BATCHED
constexpr bool IN_REGISTERS = !BATCHED && !IN_SHARED;
constexpr bool FULL = false;
#else
constexpr bool IN_REGISTERS = ROW / WIDTH <= STRIDE * CHUNKS && !IN_SHARED;
constexpr bool FULL = IN_REGISTERS && ROW / WIDTH == STRIDE * CHUNKS;  // every thread has CHUNKS packs
static_assert(ROW % WIDTH == 0, "a vector would cross the end of a row");
#endif
constexpr int PARTIALS = WARPS * CLUSTER;  // partial sums per row, combined in shared memory

static_assert((THREADS & (THREADS - 1)) == 0 && (CLUSTER & (CLUSTER - 1)) == 0, "powers of two");
static_assert(THREADS <= 32 || ROWS_PER_BLOCK == 1, "rows side by side are rows of one warp");

#define ROW_KERNEL extern "C" __global__ void __launch_bounds__(THREADS* ROWS_PER_BLOCK, MIN_BLOCKS) CLUSTER_DIMS

template <class Partial>
__device__ __forceinline__ Partial merge_across(Partial partial, int lanes, bool same_warp) {
    float mine[Partial::VALUES], other[Partial::VALUES];
#pragma unroll
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
        partial.save(mine);
#pragma unroll
        for (int i = 0; i < Partial::VALUES; ++i) other[i] = __shfl_xor_sync(0xffffffffu, mine[i], offset);
        const Partial theirs = Partial::load(other, partial.count());
        partial = same_warp ? partial.merge_lanes(theirs) : partial.merge(theirs);
    }
    return partial;
}

// Returns the row's partial in every thread of the row. Rows alternate between two arrays `partials`, so that one
// barrier per row is enough: before an array is written again, all threads have read it and passed the barrier of the
// row in between.
template <class Partial>
__device__ __forceinline__ Partial merge_row(Partial partial, float (&partials)[PARTIALS][Partial::VALUES]) {
    partial = merge_across(partial, LANES, true);
    if constexpr (PARTIALS > 1) {
        float values[Partial::VALUES];
        partial.save(values);
        const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
        if (lane < CLUSTER) {
#pragma unroll
            for (int i = 0; i < Partial::VALUES; ++i) {
                if constexpr (CLUSTER > 1) store_peer(&partials[cluster_rank() * WARPS + warp][i], lane, values[i]);
                else partials[warp][i] = values[i];
            }
        }
        cluster_arrive();
        cluster_wait();
        constexpr int READERS = PARTIALS < 32 ? PARTIALS : 32;
        constexpr int EACH = PARTIALS / READERS;  // partials that each lane merges, as a tree of equal halves
        Partial read[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) read[i] = Partial::load(partials[i * READERS + lane % READERS], partial.count());
#pragma unroll
        for (int half = EACH / 2; half > 0; half /= 2)
#pragma unroll
            for (int i = 0; i < half; ++i) read[i] = read[i].merge(read[i + half]);
        partial = merge_across(read[0], READERS, false);
    }
    return partial;
}

extern __shared__ uint4 row_memory[];

template <class Op>
struct Rows {
    using Raw = typename Op::Raw;
    using Partial = typename Op::Partial;
    Op& op;
    int thread;       // index among the threads of the row
    long long count;  // number of rows
    int length;       // elements of a row

    __device__ __forceinline__ static int pack_index(int thread, int batch, int k) {
        return thread + (batch * CHUNKS + k) * STRIDE;
    }

    __device__ __forceinline__ int packs() const { return ROW / WIDTH; }
    __device__ __forceinline__ int batches() const { return (packs() + STRIDE * CHUNKS - 1) / (STRIDE * CHUNKS); }

    // Returns an existing row: in the last block, threads without a row compute and store the last row once more.
    __device__ __forceinline__ long long existing(long long row) const {
        return ROWS_PER_BLOCK == 1 || FULL_BLOCKS || row < count ? row : count - 1;
    }

    // Whether the row has pack k of a batch; known at compile time for all but the last packs of a row of known length.
    __device__ __forceinline__ bool exists(int batch, int k) const {
#ifdef BATCHED
        const bool whole = false;
#else
        const bool whole = (batch * CHUNKS + k + 1) * STRIDE <= packs();
#endif
        return whole || pack_index(thread, batch, k) < packs();
    }

    __device__ __forceinline__ void locate(long long row) const {
        if constexpr (Op::LOCATES) op.locate(row);
    }

    __device__ __forceinline__ void fetch(long long row, int batch, Raw (&raw)[CHUNKS]) const {
        locate(row);
#pragma unroll
        for (int k = 0; k < CHUNKS; ++k)
            if (exists(batch, k)) raw[k] = op.fetch(row, pack_index(thread, batch, k));
    }

    // Copies the thread's packs to shared memory, into slots that no other thread reads.
    __device__ __forceinline__ void copy_row(long long row) const {
        Raw* slots = reinterpret_cast<Raw*>(row_memory) + threadIdx.x;
        locate(row);
#pragma unroll 4
        for (int i = 0; i < batches() * CHUNKS; ++i)
            if (exists(0, i)) op.copy_async(slots[i * THREADS], row, pack_index(thread, 0, i));
        wait_for_copies();
    }

    __device__ __forceinline__ void read(long long row, int batch, Raw (&raw)[CHUNKS]) const {
        if constexpr (IN_SHARED) {
            const Raw* slots = reinterpret_cast<const Raw*>(row_memory) + threadIdx.x;
#pragma unroll
            for (int k = 0; k < CHUNKS; ++k) raw[k] = slots[(batch * CHUNKS + k) * THREADS];
        } else {
            fetch(row, batch, raw);
        }
    }

    __device__ __forceinline__ void convert(const Raw (&raw)[CHUNKS], long long row, int batch, bool first,
                                            float (&values)[CHUNKS][WIDTH]) const {
#pragma unroll
        for (int k = 0; k < CHUNKS; ++k)
            if (exists(batch, k)) op.convert(raw[k], row, pack_index(thread, batch, k), values[k], first);
    }

    __device__ __forceinline__ void load_weights(long long row, int batch) const {
#pragma unroll
        for (int k = 0; k < CHUNKS; ++k)
            if (exists(batch, k)) op.load_weights(k, row, pack_index(thread, batch, k));
    }

    __device__ __forceinline__ Partial reduce_thread(int batch, float (&values)[CHUNKS][WIDTH]) const {
        return op.reduce_thread(values, [&](int k) { return exists(batch, k); });
    }

    template <bool WEIGHTS>
    __device__ __forceinline__ void store_result(long long row, int batch, float (&values)[CHUNKS][WIDTH]) const {
        if constexpr (WEIGHTS) load_weights(row, batch);  // all loads are in flight before the first weight is used
#pragma unroll
        for (int k = 0; k < CHUNKS; ++k)
            if (exists(batch, k)) op.store_result(row, k, pack_index(thread, batch, k), values[k]);
    }
};

// A row that is too long for its threads' registers: it is reduced batch by batch, then read again for the result.
template <class Op>
__device__ __forceinline__ void long_row(const Rows<Op>& rows, long long row,
                                         float (&partials)[PARTIALS][Op::Partial::VALUES]) {
    static_assert(IN_REGISTERS || THREADS > 32, "a warp may have several rows, whose lanes must stay together");
    typename Op::Raw raw[CHUNKS];
    float values[CHUNKS][WIDTH];
    typename Op::Partial partial = Op::Partial::none();
    if constexpr (IN_SHARED) rows.copy_row(row);
#pragma unroll 1
    for (int batch = 0; batch < rows.batches(); ++batch) {
        rows.read(row, batch, raw);
        rows.convert(raw, row, batch, true, values);
        partial = partial.merge(rows.reduce_thread(batch, values));
    }
    rows.op.set_statistics(merge_row(partial, partials));
#pragma unroll 1
    for (int batch = 0; batch < rows.batches(); ++batch) {
        rows.read(row, batch, raw);
        rows.convert(raw, row, batch, false, values);
        rows.template store_result<true>(row, batch, values);
    }
}

// Rows that fit in registers: while one is computed, the next one is being loaded.
template <class Op>
__device__ __forceinline__ void rows_in_registers(const Rows<Op>& rows, long long first, long long step,
                                                  float (&partials)[2][PARTIALS][Op::Partial::VALUES]) {
    typename Op::Raw raw[CHUNKS];
    float values[CHUNKS][WIDTH];
    long long row = rows.existing(first + threadIdx.y);
    constexpr bool EARLY_WEIGHTS = PREFETCH_WEIGHTS && WEIGHTS_CONSTANT && !Op::WEIGHTS_VARY;
    if constexpr (EARLY_WEIGHTS) rows.load_weights(row, 0);
    wait_for_predecessor();
    rows.fetch(row, 0, raw);
    if constexpr (PREFETCH_WEIGHTS && !EARLY_WEIGHTS) rows.load_weights(row, 0);
    if constexpr (CLUSTER > 1) cluster_wait();  // now the other blocks have started: their shared memory exists
    int parity = 0;
    while (true) {
        rows.convert(raw, row, 0, true, values);
        first += step;
        const bool more = PERSISTENT && first < rows.count;
        if (more) rows.fetch(rows.existing(row + step), 0, raw);
        rows.op.set_statistics(merge_row(rows.reduce_thread(0, values), partials[parity]));
        rows.template store_result<!PREFETCH_WEIGHTS>(row, 0, values);
        if (!more) break;
        row = rows.existing(row + step);
        parity ^= 1;
        if constexpr (PREFETCH_WEIGHTS && Op::WEIGHTS_VARY) rows.load_weights(row, 0);
    }
}

template <class Op>
__device__ __forceinline__ void each_row(Op op, long long count, int length = 0) {
    __shared__ float partials[2][PARTIALS][Op::Partial::VALUES];
    if (RELEASE) release_successor();
    cluster_arrive();
    const Rows<Op> rows{op, int(threadIdx.x + cluster_rank() * THREADS), count, length};
    const long long first = (long long)(blockIdx.x / CLUSTER) * ROWS_PER_BLOCK;
    const long long step = (long long)(gridDim.x / CLUSTER) * ROWS_PER_BLOCK;
    if constexpr (IN_REGISTERS) {
        rows_in_registers(rows, first, step, partials);
    } else {
        wait_for_predecessor();
        if constexpr (CLUSTER > 1) cluster_wait();
        int parity = 0;
        for (long long row = first; row < count; row += step, parity ^= 1) long_row(rows, row, partials[parity]);
    }
}
