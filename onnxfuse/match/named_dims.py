"""Match the names that a pattern gives to dimensions with the shapes of tensors."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from onnxfuse.algebra import view_layouts as layouts
from onnxfuse.algebra.bounds import substituted
from onnxfuse.algebra.sizes import Dim, Size, name_of, product
from onnxfuse.match.state import Dims


class Token(NamedTuple):
    """The name of an axis, whether the axis can broadcast, and whether any symbolic size is accepted."""

    name: str
    may_broadcast: bool
    may_be_symbolic: bool


@functools.cache
def _parsed(spec: str) -> tuple[tuple[Token, ...], bool, tuple[Token, ...]]:
    """Return the tokens before "...", whether "..." is present, and the tokens after it."""
    before, dots, after = spec.partition("...")
    head, tail = (tuple(map(_token, part.split())) for part in (before, after))
    return head, bool(dots), tail


def _token(text: str) -> Token:
    return Token(text.rstrip("?"), text.endswith("?"), text.endswith("??"))


@functools.lru_cache(maxsize=4096)  # called for every fusion at every node, with the few shapes of a model
def unify_first(spec: str, shape: tuple[Size, ...]) -> Dims | None:
    """Return the sizes that `shape` gives the names in `spec`; None if `shape` does not fit `spec`."""
    return unify(spec, shape, {})


def unify(
    spec: str, shape: Sequence[Size], known: Dims, is_part: Callable[[Size, Size], bool] = operator.eq
) -> Dims | None:
    """Return `known` and the sizes that `shape` gives the names in `spec`; None if `shape` contradicts one of them.

    `is_part(a, b)` returns whether a size a, of an axis that can broadcast, is 1 or b.
    """
    head, dots, tail = _parsed(spec)
    dims = dict(known)
    if not dots:
        return dims if _bind_from_right(head, shape, dims, is_part) else None
    end = len(shape) - len(tail)
    if end < len(head):
        return None
    middle = tuple(shape[len(head) : end])
    ends = (head, shape[: len(head)]), (tail, shape[end:])
    fits = all(_bind_from_right(tokens, sizes, dims, is_part) for tokens, sizes in ends)
    return dims if fits and dims.setdefault("...", middle) == middle else None


def _bind_from_right(
    tokens: Sequence[Token], sizes: Sequence[Size], dims: dict[str, Any], is_part: Callable[[Size, Size], bool]
) -> bool:
    """Bind names to sizes, beginning with the last axis; return whether they agree with the sizes bound before."""
    left = len(sizes)
    for name, may_broadcast, may_be_symbolic in reversed(tokens):
        if not left:
            if not may_broadcast:
                return False
            continue
        left -= 1
        found = sizes[left]
        if name.isdecimal():
            if found != int(name):
                return False
        elif not (may_broadcast and found == 1) and not (may_be_symbolic and isinstance(found, Dim)):
            known = dims.setdefault(name, found)
            if known is not found and known != found and not (may_broadcast and is_part(found, known)):
                return False
    return not left


def axes_of(side: str) -> list[list[str]]:
    """Return the names of each axis on one side of an arrangement (einops' notation); "..." counts as one axis."""
    return [(inside or single).split() for inside, single in re.findall(r"\(([^)]*)\)|(\S+)", side)]


@functools.cache  # called at every failure to rearrange
def has_axes_of(side: str, rank: int) -> bool:
    """Return whether one side of an arrangement, such as "n (h w) c", can describe a tensor of `rank` axes."""
    axes = axes_of(side)
    return len(axes) - 1 <= rank if ["..."] in axes else len(axes) == rank


def arranged_axes_fit(side: str, shape: Sequence[Size], known: Dims) -> bool:
    """Return whether one side of an arrangement, such as "n (h w) c", can describe a shape.

    Only names whose sizes are known can contradict the shape.
    """
    axes = axes_of(side)
    if not has_axes_of(side, len(shape)):
        return False
    dots = next((i for i, names in enumerate(axes) if names == ["..."]), len(axes))
    tail = axes[dots + 1 :]
    pairs = [*zip(axes[:dots], shape, strict=False), *zip(tail, shape[len(shape) - len(tail) :], strict=True)]
    return all(size is None or size == found for names, found in pairs for size in [size_of(names, known)])


def size_of(names: Sequence[str], known: Dims) -> Size | None:
    """Return the size of an axis composed of names; None if a name is "...", or its size is unknown."""
    if "..." in names:
        return None
    sizes = [int(name) if name.isdecimal() else known.get(name) for name in names]
    return None if None in sizes else product([size for size in sizes if size is not None])


def with_sizes(size: Dim, known: Dims) -> Any:
    """Return an attribute's size with known sizes substituted; a single name can stand for any attribute value."""
    name = name_of(size)
    return substituted(size, known) if name is None else known[name]


def fitted_arrangement(pattern: str, source_rank: int, result_rank: int) -> layouts.Arrangement | None:
    """Return the arrangement with as many axes for "..." as fit both ranks; None if no number fits."""
    for extra in range(max(source_rank, result_rank) + 1) if "..." in pattern else (0,):
        arrangement = layouts.parse_arrangement(pattern, extra)
        if (len(arrangement.source), len(arrangement.result)) == (source_rank, result_rank):
            return arrangement
    return None
