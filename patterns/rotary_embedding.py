"""Rotary position embedding of queries or keys."""

from onnxfuse.dsl import attribute, choose, fusion, op, rearrange, require, size, tensor

END = 2**63 - 1



def _per_head(table):
    return choose(
        "table",
        bsd=rearrange(table, "cos_batch seq size -> cos_batch 1 seq size"),
        b1sd=rearrange(table, "cos_batch 1 seq size -> cos_batch 1 seq size"),
    )


@fusion(
    out="batch heads seq size",
    example={"x": (2, 3, 5, 4), "cos": (2, 5, 2), "sin": (2, 5, 2), "interleaved": 1},
)
def rotary_embedding(
    x=tensor(), cos=tensor(), sin=tensor(), interleaved=attribute(), num_heads=attribute(),
    rotary_embedding_dim=attribute(),
):
    """y = x * cos + rotate_half(x) * sin, per head (Su et al. 2021, arXiv:2104.09864)"""
    require(
        "cos has the batch size {batch}, or 1; it has {cos_batch}",
        lambda batch, cos_batch: cos_batch is None or cos_batch in (1, batch),
    )
    heads = choose(
        "layout",
        packed=rearrange(x, "batch seq (heads size) -> batch heads seq size"),
        bshd=rearrange(x, "batch seq heads size -> batch heads seq size"),
        bhsd=rearrange(x, "batch heads seq size -> batch heads seq size"),
    )
    half = size("size") // 2
    first = op.Slice(heads, starts=[0], ends=[half], axes=[-1], steps=[1])
    second = op.Slice(heads, starts=[half], ends=[END], axes=[-1], steps=[1])
    rotated = op.Concat(-second, first, axis=-1)
    return choose(
        "form",
        rotate_half=heads * _per_head(cos) + rotated * _per_head(sin),
        operator=op.RotaryEmbedding(
            x, cos, sin, interleaved=interleaved, num_heads=num_heads, rotary_embedding_dim=rotary_embedding_dim
        ),
    )
