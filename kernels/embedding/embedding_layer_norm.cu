// sum = table[ids] + addends; y = layer_norm(sum), see layer_norm.cu. The sum is written only if another node reads it.
//
// In fp16 the kernel moves 4 bytes per element: it reads a table row for each id, and writes y. It moves 6 bytes if it
// also writes the sum.
// Many rows share the addends, which come from a cache. Rows are added and normalized in fp32.
#include "types.cuh"
#include "rows.cuh"
#include "embedding.cuh"

ROW_KERNEL embedding_layer_norm(Tokens tokens, Second second, Third third, const SCALE_T* scale, const BIAS_T* bias,
                                Y_T* y, SUM_T* sum, float epsilon, long long seq, long long rows) {
    each_row(
        EmbeddingNorm<Moments>{
            {nullptr, nullptr, scale, bias, y, sum, epsilon, STREAMED}, tokens, second, third, 1.0f, seq},
        rows);
}
