"""The views that several rules need: parts of an axis, heads, and images with their channels first or last."""

from __future__ import annotations

from itertools import accumulate

from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import op, rearrange


def parts_of(x: Term, *sizes: int, axis: int = -1) -> list[Term]:
    """Return consecutive slices of `x` along an axis, one of each size."""
    ends = zip(sizes, accumulate(sizes), strict=True)
    return [op.Slice(x, starts=[end - size], ends=[end], axes=[axis], steps=[1]) for size, end in ends]


def split_heads(x: Term, rows: str, size: str = "size", heads: str = "heads") -> Term:
    """Return (batch, rows, heads * size) as (batch, heads, rows, size)."""
    return rearrange(x, f"batch {rows} ({heads} {size}) -> batch {heads} {rows} {size}")


def join_heads(x: Term, rows: str, size: str = "size") -> Term:
    """Return (batch, heads, rows, size) as (batch, rows, heads * size)."""
    return rearrange(x, f"batch heads {rows} {size} -> batch {rows} (heads {size})")


def repeat_heads(x: Term, size: str = "size") -> Term:
    """Return keys or values with each head repeated for the query heads that share it."""
    return rearrange(x, f"batch kv_heads keys {size} -> batch (kv_heads repeats) keys {size}")


def channels_first(image: Term) -> Term:
    """Return an image (n, h, w, channels) as (n, channels, h, w)."""
    return op.Transpose(image, perm=[0, 3, 1, 2])


def channels_last(image: Term) -> Term:
    """Return an image (n, channels, h, w) as (n, h, w, channels)."""
    return op.Transpose(image, perm=[0, 2, 3, 1])
