"""The names that a pattern gives to dimensions, against the shapes of tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from onnxfuse.analysis import layout as layouts
from onnxfuse.analysis.dims import Size, is_known
from onnxfuse.match.state import Dims


class Token(NamedTuple):
    """A name, whether the axis may broadcast, and whether its size may be one that is not known."""

    name: str
    may_broadcast: bool
    may_be_unknown: bool


@functools.cache
def _parsed(spec: str) -> tuple[tuple[Token, ...], bool, tuple[Token, ...]]:
    """Return the tokens before "...", whether that is present, and the tokens after it."""
    before, dots, after = spec.partition("...")
    head, tail = (tuple(map(_token, part.split())) for part in (before, after))
    return head, bool(dots), tail


def _token(text: str) -> Token:
    return Token(text.rstrip("?"), text.endswith("?"), text.endswith("??"))


@functools.lru_cache(maxsize=4096)  # asked for every fusion at every node, of the few shapes that a model has
def unify_first(spec: str, shape: tuple[Size, ...]) -> Dims:
    """Return the sizes of the names in `spec`, which describes `shape`; none where they contradict."""
    return unify(spec, shape, {}) or {}


def unify(spec: str, shape: Sequence[Size], known: Dims) -> Dims | None:
    """Return `known` and the sizes of the names in `spec`, which describes `shape`; None where they contradict."""
    head, dots, tail = _parsed(spec)
    dims = dict(known)
    if not dots:
        return dims if _bind_from_right(head, shape, dims) else None
    end = len(shape) - len(tail)
    if end < len(head):
        return None
    middle = tuple(shape[len(head) : end])
    fits = _bind_from_right(head, shape[: len(head)], dims) and _bind_from_right(tail, shape[end:], dims)
    return dims if fits and dims.setdefault("...", middle) == middle else None


def _bind_from_right(tokens: Sequence[Token], sizes: Sequence[Size], dims: dict[str, Any]) -> bool:
    """Bind names to sizes, beginning with the last axis; return whether they agree with what is bound already."""
    left = len(sizes)
    for name, may_broadcast, may_be_unknown in reversed(tokens):
        if not left:
            if not may_broadcast:
                return False
            continue
        left -= 1
        found = sizes[left]
        if name.isdecimal():
            if found != int(name):
                return False
        elif not (may_broadcast and found == 1) and not (may_be_unknown and not is_known(found)):
            known = dims.setdefault(name, found)
            if known is not found and known != found:
                return False
    return not left


def fitted_arrangement(pattern: str, source_rank: int, result_rank: int) -> layouts.Arrangement | None:
    """Return the arrangement whose "..." stands for as many axes as fit both ranks; None where none does."""
    for extra in range(max(source_rank, result_rank) + 1) if "..." in pattern else (0,):
        arrangement = layouts.parse_arrangement(pattern, extra)
        if (len(arrangement.source), len(arrangement.result)) == (source_rank, result_rank):
            return arrangement
    return None
