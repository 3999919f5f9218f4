"""RMSNorm of embeddings; the embeddings, which the next residual connection reads, are a second output."""

from onnxfuse.dsl import choose, fusion, op, scalar, tensor, weight
from onnxfuse.patterns._norms import rms_normalized


@fusion(out=("... d", "... d"), casts=True)
def embedding_rms_norm(
    ids=tensor("..."),
    table=weight("v d"),
    scale=weight("d"),
    factor=scalar(optional=True),
    epsilon=scalar(default=1e-5),
):
    """embedding = table[ids] * factor; y = rms_norm(embedding)"""
    rows = op.Gather(table, ids)
    embedding = choose("form", rows=rows, scaled_rows=rows * factor)
    return rms_normalized(embedding, scale, epsilon), embedding
