"""Rotary position embedding of queries or keys."""

from onnxfuse.dsl import attribute, choose, fusion, op, part, rearrange, require, tensor
from onnxfuse.patterns._rotary import turned


@fusion(
    out="batch heads seq size",
    example={"x": (2, 3, 5, 4), "cos": (2, 5, 2), "sin": (2, 5, 2), "interleaved": 1},
)
def rotary_embedding(
    x=tensor(), cos=tensor(), sin=tensor(), interleaved=attribute(), num_heads=attribute(),
    rotary_embedding_dim=attribute(),
):
    """y = x * cos + rotate_half(x) * sin, per head or of the first elements of each (Su et al. 2021, arXiv:2104.09864)

    x may be a part of a packed product of queries, keys and values.
    """
    require(
        "cos has the batch size {batch}, or 1; it has {cos_batch}",
        lambda batch, cos_batch: cos_batch is None or cos_batch in (1, batch),
    )
    heads = choose(
        "layout",
        packed=rearrange(part(x, "x"), "batch seq (heads size) -> batch heads seq size"),
        bshd=rearrange(x, "batch seq heads size -> batch heads seq size"),
        bhsd=rearrange(x, "batch heads seq size -> batch heads seq size"),
    )
    return choose(
        "form",
        **turned(heads, cos, sin),
        operator=op.RotaryEmbedding(
            x, cos, sin, interleaved=interleaved, num_heads=num_heads, rotary_embedding_dim=rotary_embedding_dim
        ),
    )
