"""Sums of indices, and what is told with them of a tensor's elements: its values, where it is true, whose entries.

Axes are counted from the last, -1, so that broadcasting changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from onnxfuse.model.graph import Array, Tensor
from onnxfuse.shapes.bounds import lower_bound, upper_bound
from onnxfuse.shapes.dims import Size


@dataclass(frozen=True)
class Index:
    """A sum of indices times factors: `terms` are (axis, size of the axis, factor), and `offset` is added."""

    terms: tuple[tuple[int, Size, Size], ...] = ()
    offset: Size = 0

    def plus(self, other: Index) -> Index:
        """The sum of two."""
        factors: dict[tuple[int, Size], Size] = {}
        for axis, size, factor in sorted(self.terms + other.terms, key=lambda term: term[0]):
            factors[axis, size] = factors.get((axis, size), 0) + factor
        return Index(tuple((*key, factor) for key, factor in factors.items() if factor != 0),
                     self.offset + other.offset)  # fmt: skip

    def times(self, factor: Size) -> Index:
        """The product with a size."""
        return Index(tuple((axis, size, each * factor) for axis, size, each in self.terms if factor != 0),
                     self.offset * factor)  # fmt: skip

    def moved(self, axes: Mapping[int, int]) -> Index:
        """The same with other names for its axes."""
        return Index(tuple((axes[axis], size, factor) for axis, size, factor in self.terms), self.offset)

    def bounds(self) -> tuple[int | None, int | None]:
        """Numbers that it never falls below and never exceeds, where these are known."""
        low: Size = self.offset
        high: Size = self.offset
        for _, size, factor in self.terms:
            if (least := lower_bound(factor)) is None or (least < 0 and not isinstance(factor, int)):
                return None, None
            low, high = (low, high + (size - 1) * factor) if least >= 0 else (low + (size - 1) * factor, high)
        return lower_bound(low), upper_bound(high)


@dataclass(frozen=True)
class AtMostZero:
    """True where a sum of indices is 0 or less."""

    index: Index


@dataclass(frozen=True)
class Entry:
    """The element of a tensor at these indices, one for each of its axes."""

    name: str
    indices: tuple[Index, ...]
    tensor: Tensor = field(compare=False, repr=False)


Value: TypeAlias = bool | Index | AtMostZero | Entry


def along(axis: int, size: Size) -> Index:
    """The index along an axis; 0 where there is only one."""
    return Index() if size == 1 else Index(((axis, size, 1),))


def ordered(low: Index, high: Index, least: Size = 0) -> Value:
    """Where `low` and `least` are at most `high`."""
    over = low.plus(high.times(-1)).plus(Index(offset=least))
    least_over, most_over = over.bounds()
    if most_over is not None and most_over <= 0:
        return True
    return False if least_over is not None and least_over > 0 else AtMostZero(over)


def up_to_diagonal(rows: Size, columns: Size) -> Value | None:
    """What a tensor holds that is true up to the diagonal at which its last two axes end."""
    return ordered(along(-1, columns), along(-2, rows), rows - columns)


def triangle(value: Array) -> Value | None:
    """What a boolean array holds that is true up to a diagonal of its last two axes; the others have a size of 1."""
    rows, columns = (1, 1, *value.shape)[-2:]
    if value.size != rows * columns:
        return None
    of_row = np.count_nonzero(value.reshape(rows, columns), axis=1)
    for offset in (int(of_row[-1]) - rows, int(of_row[0]) - 1):
        if np.array_equal(value.reshape(rows, columns), np.tri(rows, columns, offset)):
            return ordered(along(-1, columns), along(-2, rows).plus(Index(offset=offset)))
    return None
