// The epilogue of epilogue.cuh as a separate kernel. It runs after matrix products by a library, or after a kernel that
// stores several partial sums per element. This kernel adds them in a fixed order.
//
// This is an elementwise kernel (elementwise.cuh): each thread computes vectors of WIDTH elements of y, which can cross
// the end of a row. The products are fp32, so that y is rounded once. If y is fp16, the kernel moves 6 bytes per
// element, 4 more for a second product and 2 more for a residual; the column vectors come from L1.
//
// Macros: COLUMNS, the columns of all matrices; SLICES, the number of matrices of partial sums, one after the other in
// memory (1 with GATED); and the macros of epilogue.cuh and of elementwise.cuh.
#include "types.cuh"
#include "epilogue.cuh"
#include "elementwise.cuh"

constexpr bool WRAPS = COLUMNS % WIDTH != 0;
static_assert(!GATED || SLICES == 1);

struct EpilogueOp {
    template <int W>
    struct Raw {
        Pack<f32, W> products[SLICES], up;
        EpilogueLoads<W, WRAPS> loads;
    };

    const f32 *product, *up;
    Epilogue epilogue;
    INDEX count;  // elements of y

    template <int W>
    __device__ __forceinline__ Raw<W> fetch(INDEX at) const {
        Raw<W> raw;
        const unsigned column = unsigned(at % COLUMNS);
#pragma unroll
        for (int i = 0; i < SLICES; ++i) raw.products[i] = load_once<W>(product + i * count + at);
        if constexpr (GATED) raw.up = load_once<W>(up + at);
        epilogue.load_residual(raw.loads, at);
        epilogue.load_columns(raw.loads, column, COLUMNS);
        return raw;
    }

    template <int W>
    __device__ __forceinline__ void finish(INDEX at, const Raw<W>& raw) const {
        float acc[W], ups[W];
        unpack(raw.products[0], acc);
#pragma unroll
        for (int i = 1; i < SLICES; ++i) {
            float more[W];
            unpack(raw.products[i], more);
#pragma unroll
            for (int j = 0; j < W; ++j) acc[j] += more[j];
        }
        if constexpr (GATED) unpack(raw.up, ups);
        if (STREAMED) epilogue.finish<true>(at, raw.loads, acc, ups);
        else epilogue.finish<false>(at, raw.loads, acc, ups);
    }
};

ELEMENT_KERNEL epilogue(const f32* product, const f32* up, EpilogueOperands epilogue_operands, long long count) {
    each_element(EpilogueOp{product, up, {epilogue_operands}, INDEX(count)}, INDEX(count));
}
