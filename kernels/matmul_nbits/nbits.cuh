// Weights of BITS bits in blocks of BLOCK_SIZE along k, as MatMulNBits and DequantizeLinear by blocks store them.
//
//   weight(n, k) = (q(n, k) - zero(n, k / BLOCK_SIZE)) * scale(n, k / BLOCK_SIZE)
//
// A byte holds its first element in its lowest bits. Column n of y belongs to row n of w, which has W_ROW_BYTES bytes
// and BLOCKS_K scales; a row of packed zero points has ZERO_BITS bits. Signed elements and zero points are read as
// unsigned ones that are MIDDLE larger. Without blocks, one block holds a whole column, or all columns share one scale.
//
// Macros:
//   GEMM_N, GEMM_K   n and k; GEMM_N_2 and GEMM_N_3 are n of further weights
//   BITS             2, 4 or 8
//   BLOCK_SIZE       a power of two from 16 on
//   W_ROW_BYTES      bytes of a row of w
//   ZERO_BITS        bits of a row of packed zero points
//   SIGNED           1: elements and packed zero points are signed
//   FLOAT8           1: elements are float8 numbers, e4m3fn, without zero points
//   ONE_SCALE        1: all blocks have one scale
//   ZEROS            0: no zero points, each counts as ZERO; 1: packed like the weights; 2: zero points of type T
//   PRODUCTS         products of one x in this launch, 1 to 3; 1 if GATED, where the second weight is `up`
//   WEIGHTS_CONSTANT 1: no kernel writes weights, scales and zero points, so they are read before the previous kernel
//                    ends
//   and those of epilogue.cuh
#pragma once
#include "epilogue.cuh"
#include "float8.cuh"

constexpr int N = GEMM_N, K = GEMM_K;
constexpr int BLOCKS_K = (K + BLOCK_SIZE - 1) / BLOCK_SIZE;
constexpr int MIDDLE = 1 << (BITS - 1), QUANT_MASK = (1 << BITS) - 1;
constexpr int SIGN = SIGNED ? MIDDLE : 0;
constexpr unsigned SIGNS = 0xffffffffu / QUANT_MASK * SIGN;  // SIGN in every element of a word
constexpr int WEIGHTS = GATED ? 2 : 1;                       // weights per product
static_assert(!GATED || PRODUCTS == 1, "a gate has two products of its own");

// The largest power of two up to `limit`, a power of two, that divides `number`.
constexpr int power_of_two(int limit, int number) { return number % limit ? power_of_two(limit / 2, number) : limit; }

// Loads a part of a weight, through the read-only path if no kernel writes the weight.
template <class V>
__device__ __forceinline__ V load_part(const V* from) {
    if constexpr (WEIGHTS_CONSTANT) return __ldg(from);
    else return *from;
}

// Returns BYTES bytes of elements; signed elements become unsigned ones that are MIDDLE larger.
template <int BYTES>
__device__ __forceinline__ unsigned load_elements(const unsigned char* from) {
    if constexpr (BYTES == 1) return load_part(from) ^ (SIGNS & 255u);
    else return load_part(reinterpret_cast<const unsigned*>(from)) ^ SIGNS;
}

// Returns the value of an element. For a signed integer, the returned value is MIDDLE larger.
__device__ __forceinline__ float number(unsigned element) {
    if constexpr (FLOAT8) return float8_number(element);
    else return static_cast<float>(element);
}

struct Quantized {
    const unsigned char* w;
    const T* scales;
    const void* zeros;

    __device__ __forceinline__ const unsigned char* row(int n) const { return w + (long long)n * W_ROW_BYTES; }

    // Returns the address of scale number `index`, or of the only scale.
    __device__ __forceinline__ const T* scale_at(long long index) const { return ONE_SCALE ? scales : scales + index; }

    __device__ __forceinline__ float scale(int n, int block) const {
        float value[1];
        unpack(load_cached<1, WEIGHTS_CONSTANT>(scale_at((long long)n * BLOCKS_K + block)), value);
        return value[0];
    }

    // Returns a packed zero point; ZERO if there is none.
    __device__ __forceinline__ int zero(int n, int block) const {
        if constexpr (ZEROS == 0) return ZERO;
        const long long bit = (long long)n * ZERO_BITS + block * BITS;
        return (load_part(static_cast<const unsigned char*>(zeros) + bit / 8) >> bit % 8 & QUANT_MASK) ^ SIGN;
    }

    __device__ __forceinline__ float zero_value(int n, int block) const {
        if constexpr (ZEROS < 2) return static_cast<float>(zero(n, block));
        float value[1];
        unpack(load_cached<1, WEIGHTS_CONSTANT>(static_cast<const T*>(zeros) + (long long)n * BLOCKS_K + block), value);
        return value[0];
    }
};

// ---- the weights of a launch ---------------------------------------------------------------------------------------

// Returns the number of columns of y in the product with weight `weight` of the launch.
__device__ __forceinline__ constexpr int columns_of(int weight) {
#if PRODUCTS == 3
    constexpr int all[] = {GEMM_N, GEMM_N_2, GEMM_N_3};
#elif PRODUCTS == 2
    constexpr int all[] = {GEMM_N, GEMM_N_2};
#else
    constexpr int all[] = {GEMM_N};
#endif
    return all[weight];
}

// A weight, the bias of its product, and the result y. Both weights of a gated product have the same y.
struct ProductOperands {
    Quantized quantized;
    const T* bias;
    T* y;
};

// The weights of a launch, as an argument of kernels; problem.py writes the fields in this order.
struct Products { ProductOperands of[PRODUCTS * WEIGHTS]; };

// A tile of TILE columns of y. `own` has the first weight of the tile's product number `product`, and `first` is the
// tile's first column in this product. Tiles are numbered product by product.
template <int TILE>
struct Tile {
    ProductOperands own;
    int product = 0, first, columns = GEMM_N;  // columns: all columns of the product

    __device__ __forceinline__ Tile(const Products& products, int tile) : own(products.of[0]) {
#pragma unroll
        for (int i = 0; i + 1 < PRODUCTS; ++i) {  // comparisons, because no index selects a register
            const int before = (columns + TILE - 1) / TILE;
            if (tile < before) break;
            tile -= before, product = i + 1, own = products.of[i + 1], columns = columns_of(i + 1);
        }
        first = tile * TILE;
    }
};
