"""Index maps: the shape of a view, and the place in its input from which an element of its output is read.

What a view does to the axes of a shape, its inverse does to a place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias, TypeVar

from onnxfuse.algebra.bounds import is_nonnegative
from onnxfuse.algebra.indices import Index, divided, flat
from onnxfuse.algebra.sizes import Shape, Size, product

T = TypeVar("T")
Place: TypeAlias = tuple[Index, ...]  # of an element: an index for each axis


def transposed(items: Sequence[T], perm: Sequence[int]) -> tuple[T, ...]:
    """Return a shape after a Transpose; with `inverse(perm)`, the place from which it reads."""
    return tuple(items[axis] for axis in perm)


def inverse(perm: Sequence[int]) -> tuple[int, ...]:
    """Return the perm of the Transpose that undoes another."""
    return tuple(perm.index(axis) for axis in range(len(perm)))


def squeezed(items: Sequence[T], axes: Collection[int]) -> tuple[T, ...]:
    """Return a shape after a Squeeze, or the place from which an Unsqueeze reads."""
    return tuple(each for axis, each in enumerate(items) if axis not in axes)


def unsqueezed(items: Sequence[T], axes: Collection[int], new: T) -> tuple[T, ...]:
    """Return a shape after an Unsqueeze, where `new` is 1, or the place from which a Squeeze reads."""
    left = iter(items)
    return tuple(new if axis in axes else next(left) for axis in range(len(items) + len(axes)))


def sliced(place: Place, ranges: Mapping[int, tuple[Size, int]]) -> Place:
    """Return the place from which a Slice reads; `ranges` holds the start and the step of each of its axes."""
    found = list(place)
    for axis, (start, step) in ranges.items():
        found[axis] = place[axis] * step + start
    return tuple(found)


def offset(place: Place, axis: int, by: Size) -> Place:
    """Return the place `by` elements further along an axis."""
    return (*place[:axis], place[axis] + by, *place[axis + 1 :])


def reshaped(place: Place, shape: Shape, source: Shape) -> Place:
    """Return the place from which a Reshape of a tensor of the shape `source` reads.

    Dims are taken from the last on until as many elements are on both sides, so that only such blocks are divided.
    """
    found: list[Index] = []
    own, other = list(range(len(shape))), list(range(len(source)))
    while own or other:
        left, right = [own.pop()] if own else [], [other.pop()] if other else []
        a, b = product(shape[i] for i in left), product(source[i] for i in right)
        while a != b and (own or other):
            take_own = bool(own) and (not other or is_nonnegative(b - a))
            if take_own:
                left.insert(0, own.pop())
            else:
                right.insert(0, other.pop())
            a, b = product(shape[i] for i in left), product(source[i] for i in right)
        whole = flat([place[i] for i in left], [shape[i] for i in left])
        for i in reversed(right[1:]):
            whole, rest = divided(whole, source[i])
            found.append(rest)
        if right:
            found.append(whole)
    return tuple(reversed(found))
