// Flash attention by wgmma and TMA on Hopper (sm_90a), in fp16, bf16 and TF32, with fp32 scores and sums.
//
//   out = softmax(mask(softcap(scale q k^T) + bias)) v        as kernels/attention/problem.py defines it
//
// A block works on WARPGROUPS x 64 queries of one head: each consumer warpgroup on 64 of them. One more warp is the
// producer.
//   Producer (attention_hopper_copies.cuh)  decides which tiles of BLOCK_N keys matter, the last one first, and copies
//       their keys and values by TMA into two rings of STAGES stages. Each stage has two mbarriers: `full` (the bytes
//       have arrived) and `empty` (all consumers have read it). Under a mask, each stage of keys also has the number of
//       its tile and the masking that it needs, and consumers take tiles until the number is END. Without a mask, no
//       tile is skipped, and consumers count the tiles themselves.
//   Consumers  compute scores by wgmma from shared memory, apply cap, bias, mask and diagonal, run the online softmax
//       (attention_hopper_scores.cuh), and multiply the weights, in registers, by the values. A tile's weights are
//       multiplied by its values right after the product for the next tile's scores, so that the warpgroups' products
//       and softmaxes alternate. With PINGPONG the warpgroups issue their products in turns, so that one's softmax
//       overlaps with the other's products: 651 instead of 514 TFLOP/s on an H200 (two warpgroups, head_dim 128, 8192
//       keys).
// The result overwrites the queries in shared memory, from where TMA stores it.
//
// TF32. wgmma reads operands in shared memory only along k, and the k of weights times values is the keys. So
// attention_values.cu transposes the values before this kernel.
//
// Scores. With SCALE_IN_EXPONENT, scores are in units of q k^T, and the exponent applies the scale: numbers that a mask
// adds are divided by the scale. Otherwise (for example with a cap, or with a bias without slopes) scores are in
// natural units, those of scale q k^T. With LATE_CAP, scores stay bare products of q and k until they become weights.
// With BIAS_FIRST, the bias of a head is its slope times elements that are the same for all rows. The producer then
// writes the bias to shared memory with the keys, and the accumulators of the tensor cores begin with it.
//
// Masks. attention_blocks.cu has found the unmasked part of each tile. If the mask is the same for all queries, the
// producer finds the unmasked parts instead. Fully masked tiles are skipped, and a mask's elements are read only if
// they change scores that count. If masked scores are finite (SECOND_PASS), a row without a score above
// `second_pass_below` can need skipped tiles. A warpgroup with such a row votes for a second pass, and the whole block
// begins again with all tiles; with ADD_MASKED_SCORE, these include the tiles beyond the diagonal.
//
// Macros:
//   T, HEAD_DIM, HEAD_DIM_V   element type; elements of a head of q and k, and of v
//   WARPGROUPS, BLOCK_N, STAGES, PINGPONG   as above    BLOCKS_PER_SM  blocks that must fit on a multiprocessor
//   CAUSAL, SOFTCAP, BIAS     1: the attention has a diagonal, a cap, a bias
//   LENGTHS                   1: each batch element has a length of its own; mask and bias are then absent
//   WINDOW                    1: a query sees only the last keys up to the diagonal
//   SINKS                     1: each row has one more score, its head's sink (SINK_T), for a value vector of zeros
//   ZERO_MASKED_ROWS          1: result rows for which no key counts are 0; 0: they are NaN
//   BIAS 2         the bias of a head is its slope, of type SLOPE_T, times the elements
//   MASK   0 none, 1 boolean (INVERTED: false counts), 2 additive (elements up to NEGLIGIBLE are skipped at first)
//   ADD_MASKED_SCORE, SECOND_PASS, SCALE_IN_EXPONENT, LATE_CAP   as above
//   KEPT, LAZY_RESCALE   when a row's reference (its score of weight 1) is raised: attention_hopper_scores.cuh
//   LATE_MASK   1: a mask's elements are loaded after the products, during which registers have no room for them
//   MASK_T, MASK_KEY, MASK_QUERY, MASK_PAIRS, BIAS_T and so on
//                  arguments of ScoreOperand, in attention_hopper_shape.cuh
//   ROTATED   0, or the elements of a query that are rotated: attention_hopper_rotation.cuh
#include "attention_hopper_copies.cuh"
#include "attention_hopper_rotation.cuh"
#include "attention_hopper_scores.cuh"
#include "program.cuh"

// ---- a consumer warpgroup ----------------------------------------------------------------------------------------

__device__ __forceinline__ void multiply_keys(float (&s)[SCORES], u32 queries, u32 keys) {
    const u64 a = matrix_descriptor<128>(queries, 0, 1024), b = matrix_descriptor<128>(keys, 0, 1024);
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step)
        wgmma<false>(T(), s, moved(a, step / 4 * QO_PANEL + step % 4 * 32),
                     moved(b, step / 4 * K_PANEL + step % 4 * 32), BIAS_FIRST || step != 0);
    wgmma_commit();
}

// Sets the scores of both rows to the bias of their columns; `bias` points to the thread's first column.
__device__ __forceinline__ void begin_with(float (&s)[SCORES], const float* bias) {
#pragma unroll
    for (int i = 0; i < SCORES; i += 2) load_words(shared_address(bias + i / 4 * 8), s[i], s[i + 1]);
}

__device__ __forceinline__ void multiply_values(float (&o)[RESULTS], const Weights& p, u32 values) {
    const u64 b = matrix_descriptor<128>(values, V_PANEL, 1024);
#pragma unroll
    for (int step = 0; step < BLOCK_N / K_STEP; ++step)
        wgmma<!TF32>(T(), o, p[step], moved(b, TF32 ? step / 4 * V_PANEL + step % 4 * 32 : step * 16 * 128), true);
    wgmma_commit();
}

__device__ __forceinline__ void pack_weights(const float (&s)[SCORES], Weights& p) {
#pragma unroll
    for (int i = 0; i < SCORES / 2; ++i) put(p, i, {s[2 * i], s[2 * i + 1]});
}

__device__ __forceinline__ void rescale(float (&o)[RESULTS], const float (&factor)[2]) {
    if (LAZY_RESCALE && !__any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < RESULTS; ++i) o[i] *= factor[i / 2 % 2];
}

constexpr int PAIRS = VALUE_COLUMNS / 8;  // pairs of columns per row and thread
#ifndef PROGRAM_PAIRS
#define PROGRAM_PAIRS 1
#endif

// Applies the program (the operators fused after the attention) to the results of a row. The program's operands are
// loaded for PROGRAM_PAIRS pairs of columns at once.
struct RowResults {
    const Program& program;
    program::Located to;
    bool inside;
    Program::OfRow of_row;
    Program::OfColumns<2> of_columns[PROGRAM_PAIRS];
    Program::OfElements<2> of_elements[PROGRAM_PAIRS];

    __device__ __forceinline__ RowResults(const Program& program, const WorkTile& at, int query, int queries)
        : program(program), to(program.locate(at.batch, at.head, query)), inside(query < queries) {
        if constexpr (HAS_PROGRAM) program.load(of_row, to.row, inside);
    }
    // Loads the operands of the fused program for several pairs of columns, before the first of these pairs is stored.
    __device__ __forceinline__ void load(int first) {
        if constexpr (HAS_PROGRAM) {
#pragma unroll
            for (int i = 0; i < PROGRAM_PAIRS; ++i) {
                const int j = first + i;
                if (j >= PAIRS) break;
                program.template load<true>(of_columns[i], to.column + column(j), left(j));
                program.template load<true>(of_elements[i], to.row, to.column + column(j), to.at + column(j), left(j));
            }
        }
    }
    __device__ __forceinline__ static int column(int j) { return j * 8 + threadIdx.x % 4 * 2; }
    __device__ __forceinline__ int left(int j) const { return inside && column(j) < HEAD_DIM_V ? 2 : 0; }

    __device__ __forceinline__ void apply(int j, float (&both)[2]) const {
        const float residual[2] = {};
        const int i = j % PROGRAM_PAIRS;
        if constexpr (HAS_PROGRAM)
            program.template apply<true>(both, residual, of_row, of_columns[i], of_elements[i], to.at + column(j),
                                         left(j));
    }
};

// Exchanges numbers among the four lanes that hold a row: a lane gives its pair of columns of each of four groups of
// eight, and gets all columns of the group that has its index.
__device__ __forceinline__ void gather_group(float (&pairs)[8]) {
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
        const bool is_upper = threadIdx.x & distance;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i / 2 & distance) continue;
            float &lower = pairs[i], &upper = pairs[i + 2 * distance];
            const float other = __shfl_xor_sync(0xffffffffu, is_upper ? lower : upper, distance);
            lower = is_upper ? other : lower;
            upper = is_upper ? upper : other;
        }
    }
}

// Applies a program that stores all outputs to the results of a row, eight neighbouring columns per lane: a lane then
// stores 8 bytes of integers, and the four lanes of a row a sector of L2.
__device__ __forceinline__ void apply_to_groups(const Program& program, const program::Located& to, bool inside,
                                                const float (&o)[RESULTS], int r, float factor) {
#pragma unroll
    for (int first = 0; first < PAIRS; first += 4) {
        float columns[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int j = first + i / 2;
            columns[i] = j < PAIRS ? o[j < PAIRS ? 4 * j + 2 * r + i % 2 : 0] * factor : 0.0f;
        }
        gather_group(columns);
        const int column = 8 * (first + threadIdx.x % 4);
        if (inside && column < HEAD_DIM_V) apply_program(program, to, column, columns);
    }
}

// Divides the rows by their sums and stores them through shared memory; TMA leaves out elements beyond the last row and
// column.
__device__ __forceinline__ void write(const TensorMap& out, const WorkTile& at, u32 qo, int group, int queries,
                                      const float (&o)[RESULTS], Softmax& softmax, float sink, const Program& program) {
    const int lane = threadIdx.x % 32, line = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float sum = softmax.total(r, sink);
        const float factor = sum == 0.0f ? (ZERO_MASKED_ROWS ? 0.0f : __int_as_float(0x7fc00000)) : __frcp_rn(sum);
        RowResults row(program, at, at.first + group * 64 + line + 8 * r, queries);
        if constexpr (!STORES_Y) {
            apply_to_groups(program, row.to, row.inside, o, r, factor);
            continue;
        }
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
            if (j % PROGRAM_PAIRS == 0) row.load(j);
            float both[2] = {o[4 * j + 2 * r] * factor, o[4 * j + 2 * r + 1] * factor};
            row.apply(j, both);
            const u32 byte = RowResults::column(j) * sizeof(T);  // in a row without panels and swizzle
            const u32 to = qo + byte / 128 * QO_PANEL + (line + 8 * r) * 128 + (byte % 128 / 16 ^ line % 8) * 16;
            store_word(to + byte % 16, narrow(T(), both));
            if constexpr (TF32) store_word(to + byte % 16 + 4, narrow(T(), both + 1));
        }
    }
    if constexpr (!STORES_Y) return;
    store_fence();
    named_barrier(8 + group, 128);
    if (threadIdx.x % 128 == 0 && at.first + group * 64 < queries) {
        for (int panel = 0; panel < O_PANELS; ++panel)
            store(out, qo + panel * QO_PANEL, panel * COLUMNS, at.first + group * 64, at.head, at.batch);
        store_commit();
        store_wait_read<0>();
    }
}

// The main loop: without a mask over the first `tiles` tiles, under a mask over the tiles that the producer sends.
// Registers of products in flight stay untouched until wgmma_wait.
//
// wgmma_wait ensures that the product has read a stage's keys; then k_taken releases the stage. Each warp also reads
// the mask bits or the bias stored with the keys, and arrives at the stage's barrier k_empty. The last warp of the
// warpgroup arrives in k_taken. The other warps arrive earlier, in `read`, after reading the bits or the bias. The last
// thread of a warp (with BIAS_FIRST, the last four threads) arrives, because compute-sanitizer's racecheck records only
// the last thread that read a word, and does not count __syncwarp as ordering.
__device__ __forceinline__ void consume(ScoreMod& score_mod, Softmax& softmax, float (&o)[RESULTS], float exponent,
                                        int tiles, u32 qo, u32 k_buffers, u32 v_buffers, Barriers& barriers,
                                        Ring& k_ring, Ring& v_ring) {
    const Cap& cap = score_mod.cap;
    const auto read = [&] {  // releases the mask bits or the bias stored with the keys
        __syncwarp();
        const bool tells = threadIdx.x % 32 >= (BIAS_FIRST ? 28 : 31) && threadIdx.x % 128 < 127;
        if (tells) barrier_arrive(shared_address(barriers.k_empty + k_ring.stage));
    };
    const auto next_tile = [&]() -> u32 {
        barrier_wait(shared_address(barriers.k_full + k_ring.stage), k_ring.phase);
        if (!MASK) return --tiles < score_mod.first_tile ? END : tiles;
        const u32 info = reread(barriers.tile[k_ring.stage]);
        score_mod.read_row(barriers.bits[k_ring.stage]);
        if (!BIAS_FIRST) read();
        return info;
    };
    const auto k_taken = [&] {
        if (threadIdx.x % 128 == 127) barrier_arrive(shared_address(barriers.k_empty + k_ring.stage));
        k_ring.advance();
    };
    const auto add_values = [&](const Weights& p) {
        barrier_wait(shared_address(barriers.v_full + v_ring.stage), v_ring.phase);
        multiply_values(o, p, v_buffers + v_ring.stage * V_STAGE);
    };
    const auto v_taken = [&] {
        if (threadIdx.x % 128 == 127) barrier_arrive(shared_address(barriers.v_empty + v_ring.stage));
        v_ring.advance();
    };

    float s[SCORES], factor[2];
    const auto begin = [&] {
        if constexpr (!BIAS_FIRST) return;
        begin_with(s, barriers.bias[k_ring.stage] + score_mod.column);
        read();
    };
    const auto end = [&] {
        if (BIAS_FIRST) read();
        k_taken();
    };

    u32 info = next_tile();
    if (info == END) return end();
    Weights p;
    const auto raise_and_weigh = [&](bool in_units) {
        if constexpr (LATE_CAP) {
            const Scores scores = softmax.raise(s, cap, in_units, factor);
            softmax.weigh(s, cap, scores, factor);
        } else {
            softmax.raise(s, exponent, factor);
            softmax.weigh(s, exponent, factor);
        }
        softmax.decide(exponent, cap);
        pack_weights(s, p);
    };
    begin();
    wgmma_fence();
    multiply_keys(s, qo, k_buffers + k_ring.stage * K_STAGE);
    score_mod.prepare(info);
    wgmma_wait<0>();
    settle(s);
    k_taken();
    raise_and_weigh(score_mod.apply(s, info));
    if (PINGPONG && score_mod.group == WARPGROUPS - 1) named_barrier_arrive(1, 256);
    info = next_tile();
    while (info != END) {
        begin();
        if (PINGPONG) named_barrier(1 + score_mod.group, 256);
        settle(o);
        wgmma_fence();
        multiply_keys(s, qo, k_buffers + k_ring.stage * K_STAGE);
        add_values(p);
        if (PINGPONG) named_barrier_arrive(1 + (score_mod.group + 1) % WARPGROUPS, 256);
        score_mod.prepare(info);
        wgmma_wait<1>();
        settle(s);
        k_taken();
        const bool in_units = score_mod.apply(s, info);
        info = next_tile();
        wgmma_wait<0>();
        settle(o);
        v_taken();
        const bool may_keep = softmax.keeps && !(LATE_CAP && in_units);
        if (!may_keep || !softmax.keep(s, p, exponent, cap)) {
            raise_and_weigh(in_units);
            rescale(o, factor);
        }
    }
    end();
    if (PINGPONG && score_mod.group == 0) named_barrier(1, 256);
    settle(o);
    wgmma_fence();
    add_values(p);
    wgmma_wait<0>();
    settle(o);
    v_taken();
}

// ---- the kernel --------------------------------------------------------------------------------------------------

__device__ __forceinline__ void init(Barriers& barriers) {
    barrier_init(shared_address(&barriers.queries), 1);
    barrier_init(shared_address(&barriers.vote), WARPGROUPS * 4);
    for (int stage = 0; stage < STAGES; ++stage) {
        barrier_init(shared_address(barriers.k_full + stage), BIAS_FIRST ? 32 : 1);
        barrier_init(shared_address(barriers.v_full + stage), 1);
        barrier_init(shared_address(barriers.k_empty + stage), WARPGROUPS * (BIAS_FIRST ? 16 : MASK ? 4 : 1));
        barrier_init(shared_address(barriers.v_empty + stage), WARPGROUPS);
    }
    barriers.second_pass = 0;
    barrier_init_fence();
}

extern "C" __global__ void __launch_bounds__(BLOCK.all, BLOCKS_PER_SM)
    attention_hopper(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                     const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap out,
                     const __grid_constant__ Shape shapes, const __grid_constant__ ScoreUnits units,
                     const __grid_constant__ Cap cap, const __grid_constant__ Mask mask,
                     const __grid_constant__ Bias bias, const SLOPE_T* slopes,
                     const __grid_constant__ MaskTiles mask_tiles, const __grid_constant__ RotationTables tables,
                     const int* lengths, const SINK_T* sinks PROGRAM_PARAMETERS) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 qo = shared_address(shared);
    const u32 k_buffers = qo + WARPGROUPS * QO_BYTES, v_buffers = k_buffers + STAGES * K_STAGE;
    Barriers& barriers = *reinterpret_cast<Barriers*>(shared + WARPGROUPS * QO_BYTES + STAGES * (K_STAGE + V_STAGE));
    if (threadIdx.x == 0) init(barriers);
    __syncthreads();
    wait_for_predecessor();
    release_successor();

    const WorkTile at = work_tile(blockIdx.x, shapes);
    const Shape shape = shapes.of_batch(lengths, at.batch);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int key_tiles = (shape.keys + BLOCK_N - 1) / BLOCK_N, row_tiles = (shape.queries + 63) / 64;
    const int tiles = tiles_of(shape, at.first), all = ADD_MASKED_SCORE ? key_tiles : tiles;
    const int plane = (at.batch * mask_tiles.batch + at.head * mask_tiles.head) * row_tiles;
    const Mask::Element* const mask_plane = mask.plane(at.batch, at.head);

    const auto head_slope = [&] {  // the slope of the block's head, in the scores' units
        float slope[1];
        unpack(load_cached<1>(slopes + at.head), slope);
        return slope[0] * units.unit;
    };

    if (warp >= BLOCK.consumers / 32) {
        if constexpr (BLOCK.reallocate) give_registers<BLOCK.producer_registers>();
        if (warp > BLOCK.consumers / 32 || (lane && !MASK && !BIAS_FIRST)) return;
        if (lane == 0) {
            const u32 barrier = shared_address(&barriers.queries);
            barrier_arrive_expect(barrier, WARPGROUPS * K_PANELS * QO_PANEL);
            for (int i = 0; i < WARPGROUPS * K_PANELS; ++i)
                load(q, qo + i / K_PANELS * QO_BYTES + i % K_PANELS * QO_PANEL, barrier, i % K_PANELS * COLUMNS,
                     at.first + i / K_PANELS * 64, at.head, at.batch);
        }
        const ColumnBias column_bias = {bias.plane(at.batch, at.head), BIAS_FIRST ? head_slope() : 0.0f, shape.keys,
                                        lane};
        Producer producer = {k, v, at, k_buffers, barriers, column_bias, shape.first_tile(at.first)};
        if constexpr (ROW_MASK) {
            RowMask rows = {mask_plane, shape.keys, lane};
            produce(producer, rows, tiles, all, lane == 0);
        } else {
            const int row_tile = at.first / 64;
            const unsigned char* const from = mask_tiles.flags + (long long)(plane + row_tile) * key_tiles;
            Flags found = {from, key_tiles, min(WARPGROUPS, row_tiles - row_tile), lane};
            produce(producer, found, tiles, all, lane == 0);
        }
        return;
    }

    if constexpr (BLOCK.reallocate) take_registers<BLOCK.consumer_registers>();
    const int group = warp / 4, first = at.first + group * 64, row = first + warp % 4 * 16 + lane / 4;
    const u32 qo_group = qo + group * QO_BYTES;
    ScoreMod score_mod(shape, units, cap, mask_tiles.bits, Rows<Mask>(mask, mask_plane, row, shape),
                       Rows<Bias>(bias, bias.plane(at.batch, at.head), row, shape), group, first, row);
    if constexpr (BIAS == 2 && !BIAS_FIRST) score_mod.slope = head_slope();
    score_mod.own_tiles = (plane + min(first / 64, row_tiles - 1)) * key_tiles;

    Ring k_ring, v_ring;
    Softmax softmax;
    float o[RESULTS];
    const float exponent = SCALE_IN_EXPONENT ? units.scale * LOG2_E : 1.0f;
    QueryRotation rotation(tables, first, shape, at.batch);
    barrier_wait(shared_address(&barriers.queries), 0);
    rotation.apply(reinterpret_cast<char*>(shared) + group * QO_BYTES, 8 + group);
#pragma unroll 1
    for (int pass = 0; pass < 1 + SECOND_PASS; ++pass) {
        softmax = Softmax();
#pragma unroll
        for (int i = 0; i < RESULTS; ++i) o[i] = 0.0f;
        consume(score_mod, softmax, o, exponent, pass == 0 ? tiles : all, qo_group, k_buffers, v_buffers, barriers,
                k_ring, v_ring);
        if (!SECOND_PASS || pass == 1) break;
        bool found = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) found |= row + 8 * r < shape.queries && softmax.top[r] <= units.second_pass_below;
        if (__any_sync(0xffffffffu, found) && lane == 0) *const_cast<volatile u32*>(&barriers.second_pass) = 1;
        if (lane == 0) barrier_arrive(shared_address(&barriers.vote));
        barrier_wait(shared_address(&barriers.vote), 0);
        if (!reread(barriers.second_pass)) break;
        score_mod.masked = units.masked;
    }
    float sink[1] = {0.0f};
    if (SINKS && sinks) unpack(load_cached<1>(sinks + at.head), sink);
    write(out, at, qo_group, group, shape.queries, o, softmax, sink[0], Program{PROGRAM_ARGUMENTS});
}
