"""Formulas over the indices of a tensor's own elements, for what integer and boolean tensors hold.

Axes are counted from the last, -1, so that broadcasting leaves a formula as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from onnxfuse.algebra.bounds import lower_bound, upper_bound
from onnxfuse.algebra.sizes import Size
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.node import Tensor


@dataclass(frozen=True)
class Index:
    """A linear expression in the indices of an element: the sum of `index[axis] * factor`, plus `offset`.

    Each of `terms` is (axis, size of the axis, factor).
    """

    terms: tuple[tuple[int, Size, Size], ...] = ()
    offset: Size = 0

    def plus(self, other: Index) -> Index:
        """Return the sum of both expressions."""
        factors: dict[tuple[int, Size], Size] = {}
        for axis, size, factor in sorted(self.terms + other.terms, key=lambda term: term[0]):
            factors[axis, size] = factors.get((axis, size), 0) + factor
        return Index(tuple((*key, factor) for key, factor in factors.items() if factor != 0),
                     self.offset + other.offset)  # fmt: skip

    def times(self, factor: Size) -> Index:
        """Return the expression multiplied by a size."""
        return Index(tuple((axis, size, each * factor) for axis, size, each in self.terms if factor != 0),
                     self.offset * factor)  # fmt: skip

    def renumbered(self, axes: Mapping[int, int]) -> Index:
        """Return the expression with each axis replaced by the one that `axes` maps it to."""
        return Index(tuple((axes[axis], size, factor) for axis, size, factor in self.terms), self.offset)

    def bounds(self) -> tuple[int | None, int | None]:
        """Return a lower and an upper bound of the expression; None for one that is not known."""
        low: Size = self.offset
        high: Size = self.offset
        for _, size, factor in self.terms:
            if (least := lower_bound(factor)) is None or (least < 0 and not isinstance(factor, int)):
                return None, None
            low, high = (low, high + (size - 1) * factor) if least >= 0 else (low + (size - 1) * factor, high)
        return lower_bound(low), upper_bound(high)


@dataclass(frozen=True)
class AtMostZero:
    """A boolean that is true where the expression is 0 or less."""

    index: Index


@dataclass(frozen=True)
class Element:
    """The element of another tensor at these indices, one expression for each of its axes."""

    name: str
    indices: tuple[Index, ...]
    tensor: Tensor = field(compare=False, repr=False)


Value: TypeAlias = bool | Index | AtMostZero | Element  # a bool or an Index without terms: all elements are equal


def axis_index(axis: int, size: Size) -> Index:
    """Return the index along an axis, which is 0 for an axis of size 1."""
    return Index() if size == 1 else Index(((axis, size, 1),))


def less_or_equal(left: Index, right: Index, margin: Size = 0) -> Value:
    """Return the boolean `left + margin <= right`."""
    excess = left.plus(right.times(-1)).plus(Index(offset=margin))
    low, high = excess.bounds()
    if high is not None and high <= 0:
        return True
    return False if low is not None and low > 0 else AtMostZero(excess)


def negated(value: Value) -> Value | None:
    """Return the boolean that is true where another one is false; None for what is no boolean formula."""
    if isinstance(value, AtMostZero):
        return less_or_equal(Index(offset=1), value.index)
    return not value if isinstance(value, bool) else None


def causal_mask_value(queries: Size, keys: Size) -> Value:
    """Return what a causal mask [..., queries, keys] holds: true up to the diagonal that ends in its last corner."""
    return less_or_equal(axis_index(-1, keys), axis_index(-2, queries), queries - keys)


def triangular_mask_value(mask: Array) -> Value | None:
    """Return what a boolean array holds that is true up to a diagonal of its last two axes; None for any other array.

    Its other axes have size 1.
    """
    rows, columns = (1, 1, *mask.shape)[-2:]
    if mask.size != rows * columns:
        return None
    true_per_row = np.count_nonzero(mask.reshape(rows, columns), axis=1)
    for diagonal in (int(true_per_row[-1]) - rows, int(true_per_row[0]) - 1):
        if np.array_equal(mask.reshape(rows, columns), np.tri(rows, columns, diagonal)):
            return less_or_equal(axis_index(-1, columns), axis_index(-2, rows).plus(Index(offset=diagonal)))
    return None
