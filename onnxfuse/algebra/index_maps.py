"""Index maps of views: the shape of a view's output, and the place in its input that an output element is read from.

Most functions serve both purposes.  Applied to a shape, `transposed` returns the shape after a Transpose; applied to
the place of an output element, the inverse Transpose returns the place of the input element.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias, TypeVar

from onnxfuse.algebra.bounds import is_nonnegative
from onnxfuse.algebra.indices import Index, divided, flat
from onnxfuse.algebra.sizes import Shape, Size, product

T = TypeVar("T")
Place: TypeAlias = tuple[Index, ...]  # the place of an element: one index per axis


def transposed(items: Sequence[T], perm: Sequence[int]) -> tuple[T, ...]:
    """Return a shape after a Transpose with this perm.

    The function also converts places: if `items` is the place of an element in the output of a Transpose with perm p,
    and `perm` is inverse(p), the result is the place in the input from which the element is read.
    """
    return tuple(items[axis] for axis in perm)


def inverse(perm: Sequence[int]) -> tuple[int, ...]:
    """Return the perm of the Transpose that undoes the Transpose with this perm."""
    return tuple(perm.index(axis) for axis in range(len(perm)))


def squeezed(items: Sequence[T], axes: Collection[int]) -> tuple[T, ...]:
    """Return the items without those at `axes`.

    If the items are a shape, the result is the shape after a Squeeze.  If the items are the place of an element in the
    output of an Unsqueeze, the result is the element's place in the input.
    """
    return tuple(each for axis, each in enumerate(items) if axis not in axes)


def unsqueezed(items: Sequence[T], axes: Collection[int], new: T) -> tuple[T, ...]:
    """Return the items with `new` inserted at `axes`.

    If the items are a shape and `new` is 1, the result is the shape after an Unsqueeze.  If the items are the place of
    an element in the output of a Squeeze and `new` is 0, the result is the element's place in the input.
    """
    left = iter(items)
    return tuple(new if axis in axes else next(left) for axis in range(len(items) + len(axes)))


def sliced(place: Place, ranges: Mapping[int, tuple[Size, int]]) -> Place:
    """Return the input place that a Slice reads for `place` in its output; `ranges` maps an axis to (start, step)."""
    found = list(place)
    for axis, (start, step) in ranges.items():
        found[axis] = place[axis] * step + start
    return tuple(found)


def offset(place: Place, axis: int, by: Size) -> Place:
    """Return the place that lies `by` elements further along an axis."""
    return (*place[:axis], place[axis] + by, *place[axis + 1 :])


def reshaped(place: Place, shape: Shape, source: Shape) -> Place:
    """Return the input place that a Reshape from the shape `source` to `shape` reads for `place` in its output.

    Axes are grouped, from the last one on, into the smallest blocks that have equally many elements in both shapes.
    Indices are divided only within a block.
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
