"""Which axis of a tensor lies where in the tensor it was made from: the algebra of Reshape, Transpose and Expand.

A layout gives, for each axis of a result, the atoms that it is made of: runs of a source axis, outermost first.
"b s (h d) -> b h s d" is the layout [[b], [h], [s], [d]] whose h has source axis 2 and stride d, and whose d has source
axis 2 and stride 1.  Two chains of view operators do the same exactly when their layouts, with neighbouring runs
merged, are equal.  Sizes may be symbolic.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from onnxfuse.shapes.dims import Size, divide, product


@dataclass(frozen=True)
class Atom:
    """`size` elements of source axis `axis`, `stride` apart; axis None repeats one element."""

    axis: int | None
    stride: Size
    size: Size


Axis: TypeAlias = tuple[Atom, ...]
Layout: TypeAlias = tuple[Axis, ...]


def identity(shape: Sequence[Size]) -> Layout:
    """The layout of a tensor of that shape in itself."""
    return tuple(() if size == 1 else (Atom(i, 1, size),) for i, size in enumerate(shape))


def transpose(layout: Layout, perm: Sequence[int]) -> Layout:
    """The layout after a Transpose."""
    return tuple(layout[i] for i in perm)


def reshape(layout: Layout, shape: Sequence[Size]) -> Layout | None:
    """The layout after a Reshape to `shape`; None where the sizes do not tell how axes split."""
    rest = [atom for axis in reversed(layout) for atom in reversed(axis)]
    result: list[Axis] = []
    for size in shape:
        taken: list[Atom] = []
        while size != 1:
            if not rest:
                return None
            atom = rest.pop()
            left = divide(size, atom.size)
            if left is not None:
                taken.append(atom)
                size = left
                continue
            inner = divide(atom.size, size)
            if inner is None:
                return None
            taken.append(Atom(atom.axis, atom.stride * inner, size))
            rest.append(Atom(atom.axis, atom.stride, inner))
            size = 1
        result.append(tuple(taken))
    return tuple(result) if not rest else None


def expand(layout: Layout, shape: Sequence[Size]) -> Layout:
    """The layout after an Expand to `shape` (the result's shape)."""
    padded = ((),) * (len(shape) - len(layout)) + layout
    return tuple(
        (Atom(None, 0, size),) if not axis and size != 1 else axis for axis, size in zip(padded, shape, strict=True)
    )


def select(layout: Layout, axis: int, start: int, size: int) -> tuple[Layout, dict[int, int]] | None:
    """The layout of `size` elements of an axis from `start` on, and by how much they begin later on each source axis.

    None where they are no part of a single run, or the run's size is symbolic.
    """
    if not layout[axis]:
        return (layout, {}) if (start, size) == (0, 1) else None
    outer, *inner = _merge(layout[axis])
    block = product([atom.size for atom in inner])
    if outer.axis is None or not isinstance(block, int) or not isinstance(outer.stride, int):
        return None
    if start % block or size % block:
        return None
    kept = (Atom(outer.axis, outer.stride, size // block),) if size != block else ()
    return (*layout[:axis], (*kept, *inner), *layout[axis + 1 :]), {outer.axis: start // block * outer.stride}


def merged(layout: Layout) -> Layout:
    """The same layout with neighbouring runs joined: the normal form that layouts are compared in."""
    return tuple(_merge(axis) for axis in layout)


def _merge(axis: Axis) -> Axis:
    joined: list[Atom] = []
    for atom in axis:
        if joined and joined[-1].axis == atom.axis and joined[-1].stride == atom.stride * atom.size:
            joined[-1] = Atom(atom.axis, atom.stride, joined[-1].size * atom.size)
        else:
            joined.append(atom)
    return tuple(joined)


@dataclass(frozen=True)
class Arrangement:
    """An einops pattern, read: for each axis the names it is made of; "1" is an axis of size one."""

    source: tuple[tuple[str, ...], ...]
    result: tuple[tuple[str, ...], ...]


@functools.cache
def parse_arrangement(pattern: str, extra: int = 0) -> Arrangement:
    """Read "b s (h d) -> b h s d"; "..." stands for `extra` axes."""
    text = pattern.replace("...", " ".join(f"...{i}" for i in range(extra)))
    source, _, result = text.partition("->")
    return Arrangement(_axes(source), _axes(result))


def _axes(text: str) -> tuple[tuple[str, ...], ...]:
    groups = re.findall(r"\(([^)]*)\)|(\S+)", text)
    return tuple(tuple(n for n in (inside or single).split() if n != "1") for inside, single in groups)


def solve(
    arrangement: Arrangement, source: Sequence[Size], result: Sequence[Size], known: Mapping[str, Size]
) -> dict[str, Size] | None:
    """The sizes of the names, given both shapes; None where they contradict each other or leave a name open."""
    sizes = dict(known)
    waiting = []
    for names, size in (*zip(arrangement.source, source, strict=True), *zip(arrangement.result, result, strict=True)):
        if len(names) != 1:
            waiting.append((names, size))
        elif sizes.setdefault(names[0], size) != size:
            return None
    while waiting:
        again = []
        for names, size in waiting:
            open_names = [n for n in names if n not in sizes]
            rest = divide(size, product([sizes[n] for n in names if n in sizes]))
            if rest is None or (not open_names and rest != 1):
                return None
            if len(open_names) == 1:
                sizes[open_names[0]] = rest
            elif open_names:
                again.append((names, size))
        if len(again) == len(waiting):
            return None
        waiting = again
    return sizes


def arranged(arrangement: Arrangement, sizes: Mapping[str, Size], pitch: Size | None = None) -> Layout:
    """The layout that an arrangement describes, in normal form.

    `pitch` is how far apart the runs of the last source axis's last name lie; side by side where it is None.
    """
    places: dict[str, Atom] = {}
    for i, names in enumerate(arrangement.source):
        stride: Size = 1
        for name in reversed(names):
            places[name] = Atom(i, stride, sizes[name])
            apart = pitch is not None and name == arrangement.source[-1][-1]
            stride = pitch if apart and pitch is not None else stride * sizes[name]
    return merged(
        tuple(
            tuple(places.get(n, Atom(None, 0, sizes[n])) for n in names if sizes[n] != 1)
            for names in arrangement.result
        )
    )
