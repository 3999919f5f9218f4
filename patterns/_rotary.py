"""The spellings of rotary embedding, which rotary_embedding and attention_with_rotary_embedding share."""

from typing import Final

from onnxfuse.dsl import Term, choose, op, rearrange, require, size

END: Final = 2**63 - 1  # of a Slice: the end of the axis


def require_cos_batch() -> None:
    """Require that the tables have the batch size of what they rotate, or 1."""
    require(
        "cos has the batch size {batch}, or 1; it has {cos_batch}",
        lambda batch, cos_batch: cos_batch is None or cos_batch in (1, batch),
    )


def rotated(heads: Term, cos: Term, sin: Term, rows: str = "seq") -> dict[str, Term]:
    """Return x * cos + rotate_half(x) * sin of (batch heads rows size), by its label.

    rotate_half rotates all elements of a head; rotate_part rotates the first `rotated` ones.
    """
    require(
        "{rotated} of {size} elements are rotated: a part", lambda rotated, size: rotated is None or rotated != size
    )
    first = op.Slice(heads, starts=[0], ends=[size("rotated")], axes=[-1], steps=[1])
    rest = op.Slice(heads, starts=[size("rotated")], ends=[END], axes=[-1], steps=[1])
    return {
        "rotate_half": _by_table(heads, cos, sin, rows, "size"),
        "rotate_part": op.Concat(_by_table(first, cos, sin, rows, "rotated"), rest, axis=-1),
    }


def _by_table(x: Term, cos: Term, sin: Term, rows: str, count: str) -> Term:
    """Return x rotated, whose last axis has `count` elements, as has that of the tables."""
    half = size(count) // 2
    first = op.Slice(x, starts=[0], ends=[half], axes=[-1], steps=[1])
    second = op.Slice(x, starts=[half], ends=[END], axes=[-1], steps=[1])
    return x * _per_head(cos, rows, count) + op.Concat(-second, first, axis=-1) * _per_head(sin, rows, count)


def _per_head(table: Term, rows: str, count: str) -> Term:
    """Return a table with an axis for heads, which it may have already."""
    result = f"cos_batch 1 {rows} {count}"
    return choose(
        "table",
        bsd=rearrange(table, f"cos_batch {rows} {count} -> {result}"),
        b1sd=rearrange(table, f"cos_batch 1 {rows} {count} -> {result}"),
    )
