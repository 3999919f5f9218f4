// The scores of relative positions that disentangled attention adds: products of queries and keys with vectors that
// stand for their distance. A warp has one tile of sixteen rows and all keys of a tile; BLOCK_M is BLOCK_N.
//
// A table has a vector for each position of each head, and an index picks the vector of a query and a key. It depends
// on their distance (query - key) alone. A block's queries and a tile's keys have ROWS - 1 distances, whose vectors are
// two windows in shared memory, one of each table. For a tile, after its keys have arrived:
//   1. The threads start to read the positions of the next tile.
//   2. Each warp multiplies its sixteen of the keys by their part of the second window, and stores the products of all
//      queries of the block to `sums`.
//   3. Each warp multiplies its sixteen queries by their part of the first window. When all warps have stored, it adds
//      these products to its rows of `sums`, and starts the copies of the next tile's windows.
//   4. The warp adds its rows of `sums` to its scores (attention_mma_scores.cuh).
// Row u of a window belongs to query r and key c of the tile if u = r - c + BLOCK_N - 1, so that the products of
// sixteen rows or keys need BLOCK_N + 15 rows of it.
#pragma once

#include "attention_mma_warp.cuh"

struct RelativeScores {
    static constexpr int ROWS = BLOCK_M + BLOCK_N, COLUMNS = (BLOCK_N + 16) / 8;  // of a window; of products, by eights
    static constexpr int PITCH = BLOCK_N + 4;        // elements of a row of `sums`; diagonals have no bank conflicts
    static constexpr int OUTSIDE = int(0x80000000);  // the position of a distance that no query and key have
    static_assert(M_TILES == 1 && WARPS_N == 1 && STAGES == 2 && BLOCK_M == BLOCK_N && GQA_GROUP == 1 && !IS_QUANTIZED);
    static_assert(ROWS == THREADS, "each thread reads the positions of one row");
    const Problem& p;
    const WorkTile& at;
    int fetched[2];  // positions in both tables
    u32 windows = shared_base() + Q_BYTES + STAGES * STAGE;
    u32 places = windows + 2 * ROWS * K_ROW, sums = places + 8 * ROWS;

    __device__ __forceinline__ RelativeScores(const Problem& problem, const WorkTile& work) : p(problem), at(work) {
        if constexpr (HEAD_DIM < QK_SIZE) clear_columns<K_ROW>(windows, 2 * ROWS, HEAD_DIM, QK_SIZE);
    }

    // Starts to read the positions of a tile's distances: each thread those of one row of both windows. The first query
    // and the first key have all distances.
    __device__ __forceinline__ void fetch(int tile) {
        const int distance = at.row - tile * BLOCK_N - (BLOCK_N - 1) + int(threadIdx.x);
        const int query = max(distance, 0), key = max(-distance, 0);
        const bool inside = query < p.queries && key < p.keys;
        fetched[0] = inside ? int(p.key_positions.indices[i64(query) * p.keys + key]) : OUTSIDE;
        fetched[1] = inside ? int(p.query_positions.indices[i64(key) * p.queries + query]) : OUTSIDE;
    }

    // Stores the positions that were fetched to shared memory; a barrier must follow before `load`.
    __device__ __forceinline__ void share() const {
        const int counts[2] = {int(p.key_positions.positions), int(p.query_positions.positions)};
#pragma unroll
        for (int table = 0; table < 2; ++table) {
            const int place = fetched[table] < 0 ? fetched[table] + counts[table] : fetched[table];
            const u32 limited = fetched[table] == OUTSIDE ? OUTSIDE : max(0, min(place, counts[table] - 1));
            store_shared<4>(places + (table * ROWS + threadIdx.x) * 4, &limited);
        }
    }

    // Starts the copies of the windows whose positions were shared.
    __device__ __forceinline__ void load() const {
        load(windows, p.key_positions, places);
        load(windows + ROWS * K_ROW, p.query_positions, places + ROWS * 4);
        commit();
    }

    __device__ __forceinline__ void load(u32 window, const Positions& from, u32 places) const {
        constexpr int EACH = ACCESS_BYTES / sizeof(T), PER_ROW = HEAD_DIM / EACH;
        const T* table = from.vectors + at.kv * from.positions * HEAD_DIM;
#pragma unroll(PER_ROW <= 8 ? PER_ROW : 4)
        for (int round = 0; round < PER_ROW; ++round) {
            const int i = round * THREADS + threadIdx.x, row = i / PER_ROW, access = i % PER_ROW;
            u32 place;
            load_shared<4>(places + row * 4, &place);
            const bool inside = int(place) != OUTSIDE;
            const T* vector = table + (inside ? i64(place) * HEAD_DIM + access * EACH : 0);
            copy(window + row * K_ROW + access * EACH * SHARED_ITEM, vector, inside);
        }
    }

    // Multiplies the warp's sixteen of `rows` by the rows of a window, from `window` on.
    __device__ __forceinline__ void multiply(float (&d)[COLUMNS][4], const WarpState& warp, u32 rows,
                                             u32 window) const {
#pragma unroll
        for (int t = 0; t < COLUMNS; ++t) d[t][0] = d[t][1] = d[t][2] = d[t][3] = 0.0f;
        if constexpr (MATH_KIND == FP32) {
#pragma unroll 1
            for (int step = 0; step < QK_STEPS; ++step) {
                const u32 row = rows + warp.row(0, 0) * K_ROW + step * 16;
                const float4 a[2] = {shared_float4(row), shared_float4(row + 8 * K_ROW)};
#pragma unroll
                for (int t = 0; t < COLUMNS; ++t)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float4 b = shared_float4(window + (8 * t + 2 * warp.quad + i % 2) * K_ROW + step * 16);
                        d[t][i] = fmaf(a[i / 2].x, b.x, d[t][i]), d[t][i] = fmaf(a[i / 2].y, b.y, d[t][i]);
                        d[t][i] = fmaf(a[i / 2].z, b.z, d[t][i]), d[t][i] = fmaf(a[i / 2].w, b.w, d[t][i]);
                    }
            }
        } else {
            const u32 from = window + (warp.lane / 16 * 8 + warp.lane % 8) * K_ROW + warp.lane / 8 % 2 * 16;
#pragma unroll
            for (int step = 0; step < QK_STEPS; ++step) {
                u32 a[4], b[4];
                warp.load_queries(a, rows, 0, step);
#pragma unroll
                for (int t = 0; t < COLUMNS; t += 2) {
                    load_matrices<false>(b, from + t * 8 * K_ROW + step * 32);
                    round_operand(b);
                    mma(T(), d[t], a, b[0], b[1]);
                    mma(T(), d[t + 1], a, b[2], b[3]);
                }
            }
        }
    }

    // Starts the copies of the first tile's windows.
    __device__ __forceinline__ void begin(int tile) {
        fetch(tile);
        share();
        __syncthreads();
        load();
    }

    // Computes the warp's rows of `sums` for a tile whose keys and windows have arrived; all warps of the block call it.
    __device__ __forceinline__ void compute(int tile, const WarpState& warp, u32 q_tile, u32 k_tile) {
        float d[COLUMNS][4];
        fetch(tile + 1);
        multiply(d, warp, k_tile, windows + (ROWS + BLOCK_N - 16 - 16 * warp.m) * K_ROW);
#pragma unroll
        for (int t = 0; t < COLUMNS; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = warp.group + i / 2 * 8, query = 8 * t + 2 * warp.quad + i % 2 + key - 15;
                if (query < 0 || query >= BLOCK_M) continue;
                store_shared(sums + (query * PITCH + 16 * warp.m + key) * 4, d[t][i] * p.query_positions_scale);
            }
        multiply(d, warp, q_tile, windows + 16 * warp.m * K_ROW);
        share();
        __syncthreads();  // afterwards all warps have stored, and have read the windows
        if ((tile + 1) * BLOCK_N < at.end) load();
#pragma unroll
        for (int t = 0; t < COLUMNS; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int query = warp.group + i / 2 * 8, key = query + BLOCK_N - 1 - (8 * t + 2 * warp.quad + i % 2);
                if (key < 0 || key >= BLOCK_N) continue;
                const u32 to = sums + ((16 * warp.m + query) * PITCH + key) * 4;
                store_shared(to, fmaf(d[t][i], p.key_positions_scale, shared_float(to)));
            }
        __syncwarp();
    }

    // Returns where the lane's two sums of the first eight keys are in shared memory, for a row of its warp.
    __device__ __forceinline__ u32 row_of(const WarpState& warp, int half) const {
        return sums + (warp.row(0, half) * PITCH + 2 * warp.quad) * 4;
    }
};
