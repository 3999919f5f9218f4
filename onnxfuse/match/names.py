"""Named dimensions against shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnxfuse import layout as layouts
from onnxfuse.dims import Size as DimSize


def unify(spec: str, shape: Sequence[DimSize], known: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """`known` with the names of `spec` bound to the sizes of `shape`; None where they contradict."""
    before, dots, after = spec.partition("...")
    head, tail, dims = before.split(), after.split(), dict(known)
    if not dots:
        return dims if _bind_from_right(head, list(shape), dims) else None
    if len(shape) < len(head) + len(tail):
        return None
    middle = tuple(shape[len(head) : len(shape) - len(tail)])
    fits = _bind_from_right(head, list(shape[: len(head)]), dims) and _bind_from_right(
        tail, list(shape[len(shape) - len(tail) :]), dims
    )
    return dims if fits and dims.setdefault("...", middle) == middle else None


def _bind_from_right(tokens: Sequence[str], sizes: list[DimSize], dims: dict[str, Any]) -> bool:
    for token in reversed(tokens):
        name, may_broadcast = token.rstrip("?"), token.endswith("?")
        if not sizes:
            if not may_broadcast:
                return False
            continue
        found = sizes.pop()
        if name.isdecimal():
            if found != int(name):
                return False
        elif not (may_broadcast and found == 1) and dims.setdefault(name, found) != found:
            return False
    return not sizes


def fitted(pattern: str, source_rank: int, result_rank: int) -> layouts.Arrangement | None:
    """The arrangement with as many axes for "..." as make it fit both ranks; None where none does."""
    for extra in range(max(source_rank, result_rank) + 1) if "..." in pattern else (0,):
        arrangement = layouts.parse_arrangement(pattern, extra)
        if (len(arrangement.source), len(arrangement.result)) == (source_rank, result_rank):
            return arrangement
    return None
