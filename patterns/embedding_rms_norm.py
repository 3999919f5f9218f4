"""RMSNorm of embeddings; the second output is the embeddings, which the next residual connection reads."""

from onnxfuse.dsl import Term, choose, fusion, op, scalar, tensor, weight
from onnxfuse.patterns._norms import require_epsilon, rms_normalized


@fusion(out=("... d", "... d"), casts=True)
def embedding_rms_norm(
    ids: Term = tensor("..."),
    table: Term = weight("v d"),
    scale: Term = weight("d"),
    factor: Term = scalar(optional=True),
    epsilon: Term = scalar(if_absent=1e-5),
) -> tuple[Term, Term]:
    """embedding = table[ids] * factor; y = rms_norm(embedding)"""
    rows = op.Gather(table, ids)
    embedding = choose("form", rows=rows, scaled_rows=rows * factor)
    require_epsilon()
    return rms_normalized(embedding, scale, epsilon), embedding
