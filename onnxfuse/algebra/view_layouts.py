"""View layouts: the source elements that make up a view.  They model Reshape, Transpose, Expand and Slice.

A layout lists, for each axis of a view, its sub-axes, outermost first.  A sub-axis is a part of a source axis with a
size and a stride, like h and d in einops' (h d).  The view "b s (h d) -> b h s d" has the layout [[b], [h], [s], [d]].
In this layout, h lies on source axis 2 with d's size as its stride, and d lies on source axis 2 with stride 1.  Two
chains of views are equivalent exactly if their layouts are equal after `coalesce`.  Sizes may be symbolic.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from onnxfuse.algebra.sizes import Size, divide, product


@dataclass(frozen=True)
class SubAxis:
    """`size` elements of source axis `axis`, spaced `stride` elements apart; with `axis` None, one element repeated."""

    axis: int | None
    stride: Size
    size: Size


Axis: TypeAlias = tuple[SubAxis, ...]  # an axis of size 1 has no sub-axis
ViewLayout: TypeAlias = tuple[Axis, ...]


def identity(shape: Sequence[Size]) -> ViewLayout:
    """Return the layout of a tensor of this shape as a view of itself."""
    return tuple(() if size == 1 else (SubAxis(i, 1, size),) for i, size in enumerate(shape))


def reshape(layout: ViewLayout, shape: Sequence[Size]) -> ViewLayout | None:
    """Return the layout after a Reshape to `shape`; None if symbolic sizes do not show how axes are split."""
    rest = [sub_axis for axis in reversed(layout) for sub_axis in reversed(axis)]
    result: list[Axis] = []
    for size in shape:
        taken: list[SubAxis] = []
        while size != 1:
            if not rest:
                return None
            outer = rest.pop()
            remaining = divide(size, outer.size)
            if remaining is not None:
                taken.append(outer)
                size = remaining
                continue
            inner = divide(outer.size, size)
            if inner is None:
                return None
            taken.append(SubAxis(outer.axis, outer.stride * inner, size))
            rest.append(SubAxis(outer.axis, outer.stride, inner))
            size = 1
        result.append(tuple(taken))
    return tuple(result) if not rest else None


def expand(layout: ViewLayout, shape: Sequence[Size]) -> ViewLayout:
    """Return the layout after an Expand to `shape`."""
    padded = ((),) * (len(shape) - len(layout)) + layout
    return tuple(
        (SubAxis(None, 0, size),) if not axis and size != 1 else axis for axis, size in zip(padded, shape, strict=True)
    )


def tile(layout: ViewLayout, shape: Sequence[Size]) -> ViewLayout | None:
    """Return the layout after a Tile to `shape`; None if sizes do not show how often it repeats an axis."""
    sizes = [product([sub_axis.size for sub_axis in axis]) for axis in layout]
    repeats = [divide(after, before) for before, after in zip(sizes, shape, strict=True)]
    if None in repeats:
        return None
    return tuple(
        axis if count == 1 else (SubAxis(None, 0, count), *axis)
        for axis, count in zip(layout, repeats, strict=True)
        if count is not None
    )


def select(layout: ViewLayout, axis: int, start: int, size: int) -> tuple[ViewLayout, dict[int, int]] | None:
    """Return the layout of `size` elements of an axis from `start` on, and their offset on each source axis.

    None unless the sizes prove that the elements are a contiguous range of the axis's outermost sub-axis.
    """
    if not layout[axis]:
        return (layout, {}) if (start, size) == (0, 1) else None
    outer, *inner = _coalesce_axis(layout[axis])
    block = product([sub_axis.size for sub_axis in inner])
    if outer.axis is None or not isinstance(block, int) or not isinstance(outer.stride, int):
        return None
    if start % block or size % block:
        return None
    kept = (SubAxis(outer.axis, outer.stride, size // block),) if size != block else ()
    return (*layout[:axis], (*kept, *inner), *layout[axis + 1 :]), {outer.axis: start // block * outer.stride}


def coalesce(layout: ViewLayout) -> ViewLayout:
    """Return the layout in normal form, with adjacent sub-axes joined; layouts are compared in this form."""
    return tuple(_coalesce_axis(axis) for axis in layout)


def _coalesce_axis(axis: Axis) -> Axis:
    joined: list[SubAxis] = []
    for sub_axis in axis:
        outer = joined[-1] if joined else None
        if outer and outer.axis == sub_axis.axis and outer.stride == sub_axis.stride * sub_axis.size:
            joined[-1] = SubAxis(sub_axis.axis, sub_axis.stride, outer.size * sub_axis.size)
        else:
            joined.append(sub_axis)
    return tuple(joined)


@dataclass(frozen=True)
class Arrangement:
    """A parsed einops pattern: for each axis, the names of its parts; an axis of size 1 has none."""

    source: tuple[tuple[str, ...], ...]
    result: tuple[tuple[str, ...], ...]


@functools.cache
def parse_arrangement(pattern: str, ellipsis_rank: int = 0) -> Arrangement:
    """Return the parsed form of a pattern such as "b s (h d) -> b h s d"; "..." stands for `ellipsis_rank` axes."""
    text = pattern.replace("...", " ".join(f"...{i}" for i in range(ellipsis_rank)))
    source, _, result = text.partition("->")
    return Arrangement(_parse_axes(source), _parse_axes(result))


def _parse_axes(text: str) -> tuple[tuple[str, ...], ...]:
    groups = re.findall(r"\(([^)]*)\)|(\S+)", text)
    return tuple(tuple(n for n in (inside or single).split() if n != "1") for inside, single in groups)


def solve_sizes(
    arrangement: Arrangement, source: Sequence[Size], result: Sequence[Size], known: Mapping[str, Size]
) -> dict[str, Size] | None:
    """Return the size of each name, given both shapes; None if the shapes are contradictory or leave a size unknown."""
    sizes = dict(known)
    composed = []
    for names, size in (*zip(arrangement.source, source, strict=True), *zip(arrangement.result, result, strict=True)):
        if len(names) != 1:
            composed.append((names, size))
        elif sizes.setdefault(names[0], size) != size:
            return None
    while composed:
        unsolved = []
        for names, size in composed:
            open_names = [n for n in names if n not in sizes]
            rest = divide(size, product([sizes[n] for n in names if n in sizes]))
            if rest is None or (not open_names and rest != 1):
                return None
            if len(open_names) == 1:
                sizes[open_names[0]] = rest
            elif open_names:
                unsolved.append((names, size))
        if len(unsolved) == len(composed):
            return None
        composed = unsolved
    return sizes


def arrangement_layout(arrangement: Arrangement, sizes: Mapping[str, Size], pitch: Size | None = None) -> ViewLayout:
    """Return the layout of an arrangement's result, coalesced.

    With `pitch`, the last source axis is wider than the arrangement says: if it is "(h d)", its h runs of d elements
    start `pitch` elements apart, with gaps between them.  Without `pitch`, the runs are adjacent.
    """
    sub_axes: dict[str, SubAxis] = {}
    for i, names in enumerate(arrangement.source):
        stride: Size = 1
        for name in reversed(names):
            sub_axes[name] = SubAxis(i, stride, sizes[name])
            has_pitch = pitch is not None and name == arrangement.source[-1][-1]
            stride = pitch if has_pitch and pitch is not None else stride * sizes[name]
    return coalesce(
        tuple(
            tuple(sub_axes.get(n, SubAxis(None, 0, sizes[n])) for n in names if sizes[n] != 1)
            for names in arrangement.result
        )
    )
