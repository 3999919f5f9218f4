// Reductions along rows: every row is read once, kept in registers, reduced, and written once.
//
// A row belongs to THREADS threads (a power of two: part of a warp, a warp, or a block of several) in each of CLUSTER
// blocks. Each thread holds CHUNKS packs of WIDTH elements. What a row op computes per thread (a Partial of a few
// floats) is merged over the lanes by shuffles, then over warps and blocks through shared memory with one barrier.
// A row too long for the registers of its threads is processed in batches of what fits; it is held in shared memory in
// between (HELD), or read a second time.
//
//   ROW             elements of a row                      WIDTH    elements of a vector access; divides ROW
//   THREADS         per row and block                      CHUNKS   vectors per thread and batch
//   ROWS_PER_BLOCK  rows side by side; 1 if THREADS > 32   CLUSTER  blocks that share a row (sm_90 and later)
//   FULL_BLOCKS     1: the rows are a multiple of those side by side
//   LOOP            1: blocks take further rows, the next one being loaded while this one is computed
//   STREAMED        1: outputs leave the L2 cache first
//   EARLY           1: weights are loaded along with the row, which hides their latency and costs registers
//   WEIGHTS_CONSTANT  1: no kernel writes them
//   RELEASE         1: the next kernel may start before this one stores
//   HELD            1: dynamic shared memory of BATCHES * CHUNKS * THREADS of Raw keeps the row, of which all of a
//                   block is on its way at once, without registers
//   MIN_BLOCKS      blocks that must fit on a multiprocessor: a bound on registers
//
// A row op has
//   SEEKS, void seek(row)                    what it does once before it fetches or copies packs of a row
//   Raw fetch(row, pack)                     the loads of one pack
//   void copy(raw, row, pack)                the same, to shared memory: copy_later
//   void open(raw, row, pack, values, first) conversion to fp32; first: not the second reading of a long row
//   void weights(k, row, pack)               loads of what depends on the place in the row only
//   Partial local(values, has)               of the packs k for which has(k)
//   Partial::merge, merge_lanes, VALUES, load, save
//   void finish(partial)                     of the whole row
//   void close(row, k, pack, values)         the result; the values are as local left them if KEPT
#pragma once

constexpr int LANES = THREADS < 32 ? THREADS : 32;
constexpr int WARPS = THREADS / LANES;
constexpr int PACKS = ROW / WIDTH;
constexpr int STRIDE = THREADS * CLUSTER;
constexpr int BATCHES = (PACKS + STRIDE * CHUNKS - 1) / (STRIDE * CHUNKS);
constexpr bool KEPT = BATCHES == 1 && !HELD;
constexpr bool FULL = KEPT && PACKS == STRIDE * CHUNKS;  // every thread has CHUNKS packs
constexpr int SHARES = WARPS * CLUSTER;                  // partials of a row that meet in shared memory

static_assert(ROW % WIDTH == 0, "a vector would cross the end of a row");
static_assert((THREADS & (THREADS - 1)) == 0 && (CLUSTER & (CLUSTER - 1)) == 0, "powers of two");
static_assert(THREADS <= 32 || ROWS_PER_BLOCK == 1, "rows side by side are rows of one warp");

#if CLUSTER > 1
#define ROW_KERNEL \
    extern "C" __global__ void __launch_bounds__(THREADS* ROWS_PER_BLOCK, MIN_BLOCKS) __cluster_dims__(CLUSTER, 1, 1)
#else
#define ROW_KERNEL extern "C" __global__ void __launch_bounds__(THREADS* ROWS_PER_BLOCK, MIN_BLOCKS)
#endif

__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank = 0;
    if constexpr (CLUSTER > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Two halves of a barrier over the row's blocks; of one block, all in `wait`.
__device__ __forceinline__ void row_arrive() {
    if constexpr (CLUSTER > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void row_wait() {
    if constexpr (CLUSTER > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    else __syncthreads();
}

// Writes to the same place in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ void store_peer(float* place, unsigned rank, float value) {
    const unsigned own = static_cast<unsigned>(__cvta_generic_to_shared(place));
    asm volatile("{ .reg .b32 peer; mapa.shared::cluster.u32 peer, %0, %1; st.shared::cluster.f32 [peer], %2; }"
                 ::"r"(own), "r"(rank), "f"(value) : "memory");
}

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

// The row's partial, in every thread of the row. `shares` is used by every other row, so that one barrier is enough:
// whoever writes to it again has passed the barrier of the row between, where all have read it.
template <class Partial>
__device__ __forceinline__ Partial merge_row(Partial partial, float (&shares)[SHARES][Partial::VALUES]) {
    partial = merge_across(partial, LANES, true);
    if constexpr (SHARES > 1) {
        float values[Partial::VALUES];
        partial.save(values);
        const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
        if (lane < CLUSTER) {
#pragma unroll
            for (int i = 0; i < Partial::VALUES; ++i) {
                if constexpr (CLUSTER > 1) store_peer(&shares[cluster_rank() * WARPS + warp][i], lane, values[i]);
                else shares[warp][i] = values[i];
            }
        }
        row_arrive();
        row_wait();
        constexpr int READERS = SHARES < 32 ? SHARES : 32;
        constexpr int EACH = SHARES / READERS;  // merged as a tree: partners count the same number of elements
        Partial read[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) read[i] = Partial::load(shares[i * READERS + lane % READERS], partial.count());
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
    int thread;  // among the threads of the row
    long long count;

    __device__ __forceinline__ static int place(int thread, int batch, int k) {
        return thread + (batch * CHUNKS + k) * STRIDE;
    }

    // Known to be true at compile time for all but the last packs of a row; a block's last rows may not exist.
    __device__ __forceinline__ bool has(long long row, int batch, int k) const {
        return (ROWS_PER_BLOCK == 1 || FULL_BLOCKS || row < count) &&
               ((batch * CHUNKS + k + 1) * STRIDE <= PACKS || place(thread, batch, k) < PACKS);
    }

    __device__ __forceinline__ void seek(long long row) const {
        if constexpr (Op::SEEKS)
            if (ROWS_PER_BLOCK == 1 || FULL_BLOCKS || row < count) op.seek(row);
    }

    __device__ __forceinline__ void fetch(long long row, int batch, Raw (&raw)[CHUNKS]) const {
        seek(row);
#pragma unroll
        for (int k = 0; k < CHUNKS; ++k)
            if (has(row, batch, k)) raw[k] = op.fetch(row, place(thread, batch, k));
    }

    // The thread's packs to its own places in shared memory, which no other thread reads.
    __device__ __forceinline__ void hold(long long row) const {
        Raw* held = reinterpret_cast<Raw*>(row_memory) + threadIdx.x;
        seek(row);
#pragma unroll 4
        for (int i = 0; i < BATCHES * CHUNKS; ++i)
            if (has(row, 0, i)) op.copy(held[i * THREADS], row, place(thread, 0, i));
        arrived();
    }

    __device__ __forceinline__ void read(long long row, int batch, Raw (&raw)[CHUNKS]) const {
        if constexpr (HELD) {
            const Raw* held = reinterpret_cast<const Raw*>(row_memory) + threadIdx.x;
#pragma unroll
            for (int k = 0; k < CHUNKS; ++k) raw[k] = held[(batch * CHUNKS + k) * THREADS];
        } else {
            fetch(row, batch, raw);
        }
    }

    __device__ __forceinline__ void open(const Raw (&raw)[CHUNKS], long long row, int batch, bool first,
                                         float (&values)[CHUNKS][WIDTH]) const {
#pragma unroll
        for (int k = 0; k < CHUNKS; ++k)
            if (has(row, batch, k)) op.open(raw[k], row, place(thread, batch, k), values[k], first);
    }

    __device__ __forceinline__ void weights(long long row, int batch) const {
#pragma unroll
        for (int k = 0; k < CHUNKS; ++k)
            if (has(row, batch, k)) op.weights(k, row, place(thread, batch, k));
    }

    __device__ __forceinline__ Partial local(long long row, int batch, float (&values)[CHUNKS][WIDTH]) const {
        return op.local(values, [&](int k) { return has(row, batch, k); });
    }

    template <bool WEIGHTS>
    __device__ __forceinline__ void close(long long row, int batch, float (&values)[CHUNKS][WIDTH]) const {
        if constexpr (WEIGHTS) weights(row, batch);  // all on their way before the first is used
#pragma unroll
        for (int k = 0; k < CHUNKS; ++k)
            if (has(row, batch, k)) op.close(row, k, place(thread, batch, k), values[k]);
    }
};

// A row that is longer than its threads' registers: batch by batch, and again for the result.
template <class Op>
__device__ __forceinline__ void long_row(const Rows<Op>& rows, long long row,
                                         float (&shares)[SHARES][Op::Partial::VALUES]) {
    static_assert(KEPT || THREADS > 32, "a warp may hold several rows, which must not part");
    typename Op::Raw raw[CHUNKS];
    float values[CHUNKS][WIDTH];
    typename Op::Partial partial = Op::Partial::none();
    if constexpr (HELD) rows.hold(row);
#pragma unroll 1
    for (int batch = 0; batch < BATCHES; ++batch) {
        rows.read(row, batch, raw);
        rows.open(raw, row, batch, true, values);
        partial = partial.merge(rows.local(row, batch, values));
    }
    rows.op.finish(merge_row(partial, shares));
    if constexpr (RELEASE) release_successor();
#pragma unroll 1
    for (int batch = 0; batch < BATCHES; ++batch) {
        rows.read(row, batch, raw);
        rows.open(raw, row, batch, false, values);
        rows.template close<true>(row, batch, values);
    }
}

// Rows that fit: while one is computed, the next one is on its way.
template <class Op>
__device__ __forceinline__ void kept_rows(const Rows<Op>& rows, long long first, long long step,
                                          float (&shares)[2][SHARES][Op::Partial::VALUES]) {
    typename Op::Raw raw[CHUNKS];
    float values[CHUNKS][WIDTH];
    long long row = first + threadIdx.y;
    wait_for_predecessor();
    rows.fetch(row, 0, raw);
    if constexpr (EARLY) rows.weights(row, 0);
    if constexpr (CLUSTER > 1) row_wait();  // the peers have started: their shared memory is there
    int parity = 0;
    while (true) {
        rows.open(raw, row, 0, true, values);
        first += step;
        const bool more = LOOP && first < rows.count;
        if (more) rows.fetch(row + step, 0, raw);
        rows.op.finish(merge_row(rows.local(row, 0, values), shares[parity]));
        if (RELEASE && !more) release_successor();
        rows.template close<!EARLY>(row, 0, values);
        if (!more) break;
        row += step;
        parity ^= 1;
        if constexpr (EARLY && Op::WEIGHTS_VARY) rows.weights(row, 0);
    }
}

template <class Op>
__device__ __forceinline__ void each_row(Op op, long long count) {
    __shared__ float shares[2][SHARES][Op::Partial::VALUES];
    row_arrive();
    const Rows<Op> rows{op, int(threadIdx.x + cluster_rank() * THREADS), count};
    const long long first = (long long)(blockIdx.x / CLUSTER) * ROWS_PER_BLOCK;
    const long long step = (long long)(gridDim.x / CLUSTER) * ROWS_PER_BLOCK;
    if constexpr (KEPT) {
        kept_rows(rows, first, step, shares);
    } else {
        wait_for_predecessor();
        if constexpr (CLUSTER > 1) row_wait();
        int parity = 0;
        for (long long row = first; row < count; row += step, parity ^= 1) long_row(rows, row, shares[parity]);
    }
}
