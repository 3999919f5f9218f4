"""Rotary position embedding of queries or keys."""

from onnxfuse.dsl import Term, attribute, choose, fusion, op, packed_slice, rearrange, tensor
from onnxfuse.patterns._rotary import require_cos_batch, rotated


@fusion(
    out="batch heads seq size",
    example={"x": (2, 3, 5, 4), "cos": (2, 5, 2), "sin": (2, 5, 2), "interleaved": 1},
)
def rotary_embedding(
    x: Term = tensor(),
    cos: Term = tensor(),
    sin: Term = tensor(),
    interleaved: Term = attribute(),
    num_heads: Term = attribute(),
    rotary_embedding_dim: Term = attribute(),
) -> Term:
    """y = x * cos + rotate_half(x) * sin, of each head or of its first elements (Su et al. 2021, arXiv:2104.09864)

    x may be a slice of a packed product of queries, keys and values.
    """
    require_cos_batch()
    heads = choose(
        "layout",
        packed=rearrange(packed_slice(x, "x"), "batch seq (heads size) -> batch heads seq size"),
        bshd=rearrange(x, "batch seq heads size -> batch heads seq size"),
        bhsd=rearrange(x, "batch heads seq size -> batch heads seq size"),
    )
    return choose(
        "form",
        **rotated(heads, cos, sin),
        operator=op.RotaryEmbedding(
            x, cos, sin, interleaved=interleaved, num_heads=num_heads, rotary_embedding_dim=rotary_embedding_dim
        ),
    )
