"""Rotary position embedding of queries or keys."""

from onnxfuse.dsl import (
    Term,
    attribute,
    choose,
    fusion,
    op,
    packed_slice,
    rearrange,
    require,
    size,
    stored,
    tensor,
)
from onnxfuse.dsl.terms import AttributeValue
from onnxfuse.patterns._attention_standard import rotated_by_operator
from onnxfuse.patterns._rotary import is_sum, require_cos_batch, rotated, rotated_rows


@fusion(
    out="batch (heads seq) size",
    casts=True,
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
    """y = x * cos + turned(x) * sin, of each head or of its first elements (Su et al. 2021, arXiv:2104.09864)

    turned(x) replaces each pair (a, b) by (-b, a).  A pair consists of an element of the first half of a head and one
    of the second half or, in the form rotate_pairs, of two neighbours.  In the forms complex_…, the tables have half as
    many columns, and each pair is multiplied by cos + i sin; complex_pairs_to_halves reads pairs of neighbours and
    writes them as halves.  If `table` is hsd or bhsd, each head has tables of its own, as with learnt frequencies (Heo
    et al. 2024, arXiv:2403.13298).  If `first_rows` is "kept", the first `kept` rows, such as class tokens, are not
    rotated, and the tables have no rows for them.  y is (batch, heads, seq, size) or, if `order` is rows_first, (batch,
    seq, heads, size).  x may be a slice of a packed product of queries, keys and values.  `--emit standard` writes
    ONNX's RotaryEmbedding if all heads share the tables, and the columns of cos and sin are known to repeat.
    """
    require_cos_batch()
    require(
        "there are {seq} rows; required {kept} that stay and {patches} more",
        lambda seq, kept, patches: is_sum(seq, kept, patches),
    )

    def heads(axes: str) -> Term:
        return choose(
            "layout",
            packed=rearrange(packed_slice(x, "x"), f"batch seq (heads size) -> {axes}"),
            bshd=rearrange(x, f"batch seq heads size -> {axes}"),
            bhsd=rearrange(x, f"batch heads seq size -> {axes}"),
        )

    def split(rows: Term) -> Term:
        return rearrange(rows, "batch seq (heads size) -> batch seq heads size")

    def by_table(axes: str) -> dict[str, Term]:
        return rotated_rows(heads(axes), axes, lambda x, own: rotated(x, cos, sin, own, of_heads=True))

    heads_first, rows_first = by_table("batch heads seq size"), by_table("batch seq heads size")
    written = {
        form: choose("order", heads_first=heads_first[form], rows_first=rows_first[form]) for form in heads_first
    }
    operator = op.RotaryEmbedding(
        x, cos, sin, interleaved=interleaved, num_heads=num_heads, rotary_embedding_dim=rotary_embedding_dim
    )

    def by_operator(x: Term, axes: str, **heads: AttributeValue) -> dict[str, Term]:
        at = axes.split().index("seq")
        return rotated_rows(x, axes, lambda x, own: rotated_by_operator(x, cos, sin, own.split()[at], **heads))

    by_heads = by_operator(heads("batch heads seq size"), "batch heads seq size")
    side_by_side = rearrange(heads("batch seq heads size"), "batch seq heads size -> batch seq (heads size)")
    by_rows = by_operator(side_by_side, "batch seq (heads size)", num_heads=size("heads"))
    forms = {
        form: stored(spelled, standard=choose("order", heads_first=by_heads[form], rows_first=split(by_rows[form])))
        for form, spelled in written.items()
    }
    return choose("form", **forms, operator=operator)
