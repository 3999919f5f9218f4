// sum = table[ids] + addends; y = layer_norm(sum), see layer_norm.cu. The sum is written only if another node reads it.
//
// The kernel moves 4 bytes an element in fp16 (6 with the sum): a row of the table for each id, y and sum once each.
// Many rows share the addends, which come from a cache. Rows are added and normalized in fp32.
#include "types.cuh"
#include "rows.cuh"
#include "embedding.cuh"

ROW_KERNEL embedding_layer_norm(Tokens tokens, Second second, Third third, const SCALE_T* scale, const BIAS_T* bias,
                                Y_T* y, SUM_T* sum, float epsilon, long long seq, long long rows) {
    each_row(EmbeddingNorm<Moments>{{nullptr, nullptr, scale, bias, y, sum, epsilon, STREAMED}, tokens, second, third,
                                    1.0f, seq}, rows);
}
