"""The spellings of rotary embedding, shared by the fusions that begin with one."""

from typing import Any

from onnxfuse.dsl import Term, choose, op, rearrange, require, size

END = 2**63 - 1


def turned(heads: Term, cos: Term, sin: Term, seq: str = "seq") -> dict[str, Term]:
    """x * cos + rotate_half(x) * sin of (batch heads seq size): of all elements of a head, or of the first ones."""
    require("{rotated} of {size} elements are turned: a part", lambda rotated, size: rotated is None or rotated != size)
    first = op.Slice(heads, starts=[0], ends=[size("rotated")], axes=[-1], steps=[1])
    rest = op.Slice(heads, starts=[size("rotated")], ends=[END], axes=[-1], steps=[1])
    return {
        "rotate_half": _by_table(heads, cos, sin, seq, "size"),
        "rotate_part": op.Concat(_by_table(first, cos, sin, seq, "rotated"), rest, axis=-1),
    }


def _by_table(x: Term, cos: Any, sin: Any, seq: str, count: str) -> Term:
    half = size(count) // 2
    first = op.Slice(x, starts=[0], ends=[half], axes=[-1], steps=[1])
    second = op.Slice(x, starts=[half], ends=[END], axes=[-1], steps=[1])
    return x * _per_head(cos, seq, count) + op.Concat(-second, first, axis=-1) * _per_head(sin, seq, count)


def _per_head(table: Any, seq: str, count: str) -> Term:
    result = f"cos_batch 1 {seq} {count}"
    return choose(
        "table",
        bsd=rearrange(table, f"cos_batch {seq} {count} -> {result}"),
        b1sd=rearrange(table, f"cos_batch 1 {seq} {count} -> {result}"),
    )
