// embedding = table[ids] * factor; y = rms_norm(embedding), see rms_norm.cu. The embedding is written only if another
// node reads it.
//
// In fp16 the kernel moves 4 bytes per element: it reads a table row for each id, and writes y. It moves 6 bytes if it
// also writes the embedding.
#include "types.cuh"
#include "rows.cuh"
#include "embedding.cuh"

ROW_KERNEL embedding_rms_norm(Tokens tokens, const SCALE_T* scale, Y_T* y, SUM_T* sum, float factor, float epsilon,
                              long long rows) {
    each_row(
        EmbeddingNorm<Squares>{
            {nullptr, nullptr, scale, nullptr, y, sum, epsilon, STREAMED}, tokens, {}, {}, factor, 1},
        rows);
}
