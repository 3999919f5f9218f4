"""Formulas for the contents of integer and boolean tensors, in terms of the indices of the tensor's own elements.

The variables of a formula are the tensor's axes.  Axes are counted from the last, -1, so that broadcasting does not
change a formula.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from onnxfuse.algebra.bounds import SizeBounds, lower_bound, upper_bound
from onnxfuse.algebra.index_maps import Place
from onnxfuse.algebra.indices import NOTHING, Index, replaced, variable_index
from onnxfuse.algebra.sizes import Shape, Size
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.node import Tensor


@dataclass(frozen=True)
class AtMostZero:
    """A boolean tensor that is true where the formula `index` is 0 or less."""

    index: Index


@dataclass(frozen=True)
class GatheredElement:
    """A tensor whose elements are gathered from the tensor `name` at `indices`: one formula per axis of `name`."""

    name: str
    indices: tuple[Index, ...]
    tensor: Tensor = field(compare=False, repr=False)


# A bool, or an Index without terms, stands for a tensor whose elements are all equal.
Value: TypeAlias = bool | Index | AtMostZero | GatheredElement


def axis_index(axis: int, size: Size) -> Index:
    """Return the index along an axis as a formula; 0 for an axis of size 1."""
    return variable_index(str(axis), size)


def place_in(shape: Shape) -> Place:
    """Return, for each axis of a tensor of this shape, the formula of an element's index along the axis."""
    return tuple(axis_index(axis - len(shape), size) for axis, size in enumerate(shape))


def shifted(index: Index, by: int) -> Index:
    """Return the formula with `by` added to every axis number."""
    return replaced(index, {atom.name: axis_index(int(atom.name) + by, atom.extent) for atom, _ in index.terms})


def at_source(value: Value, place: Place) -> Value | None:
    """Return the formula of a view's elements, given `value`, the formula of the elements of the view's source.

    `place` has, for each axis of the source, the index from which an element of the view is read.  Return None where
    the result is not linear in the indices of the view.
    """
    if isinstance(value, bool):
        return value
    axes = {str(axis - len(place)): index for axis, index in enumerate(place)}
    of = value.index if isinstance(value, AtMostZero) else value
    found = tuple(replaced(index, axes) for index in (of.indices if isinstance(of, GatheredElement) else (of,)))
    if any(atom.kind != "variable" for index in found for atom, _ in index.terms):
        return None
    if isinstance(value, GatheredElement):
        return replace(value, indices=found)
    return less_or_equal(found[0], NOTHING) if isinstance(value, AtMostZero) else found[0]


def bounds(index: Index) -> SizeBounds:
    """Return the lower and the upper bound of an index; each is None where it is not known."""
    limits = index.range
    return (None, None) if limits is None else (lower_bound(limits[0]), upper_bound(limits[1]))


def less_or_equal(left: Index, right: Index, margin: Size = 0) -> Value:
    """Return the boolean formula `left + margin <= right`."""
    excess = left + right * -1 + margin
    low, high = bounds(excess)
    if high is not None and high <= 0:
        return True
    return False if low is not None and low > 0 else AtMostZero(excess)


def negated(value: Value) -> Value | None:
    """Return the negation of a boolean formula; None for other values."""
    if isinstance(value, AtMostZero):
        return less_or_equal(Index(1), value.index)
    return not value if isinstance(value, bool) else None


def causal_mask_value(queries: Size, keys: Size) -> Value:
    """Return the formula of a causal mask [..., queries, keys]: true up to the diagonal ending at the last element."""
    return less_or_equal(axis_index(-1, keys), axis_index(-2, queries), queries - keys)


def triangular_mask_value(mask: Array) -> Value | None:
    """Return the formula of a boolean array that is true up to a diagonal of its last two axes; otherwise None.

    All other axes must have size 1.
    """
    rows, columns = (1, 1, *mask.shape)[-2:]
    if mask.size != rows * columns:
        return None
    true_per_row = np.count_nonzero(mask.reshape(rows, columns), axis=1)
    for diagonal in (int(true_per_row[-1]) - rows, int(true_per_row[0]) - 1):
        if np.array_equal(mask.reshape(rows, columns), np.tri(rows, columns, diagonal)):
            return less_or_equal(axis_index(-1, columns), axis_index(-2, rows) + diagonal)
    return None
