"""Finds the part of a Concat along the innermost axis that holds most elements, so that one code path computes them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

from onnxfuse.algebra.bounds import is_nonnegative
from onnxfuse.algebra.indices import Index, variable_index
from onnxfuse.algebra.sizes import number_of, product
from onnxfuse.kernels.region.nests import ELEMENTS, Nest, draft
from onnxfuse.kernels.region.program import Program
from onnxfuse.kernels.region.references import Within
from onnxfuse.kernels.region.shapes import Shapes

MIN_SHARE: Final = 0.75  # minimum share of the elements that the part holds
MIN_PERIOD: Final = 32  # minimum number of elements along the axis


@dataclass(frozen=True)
class DominantPart:
    """One code path computes the elements from `begin` to before `end` of each row of `period` contiguous elements."""

    index: Index  # the position of an element in its row
    begin: int
    end: int
    period: int

    @property
    def within(self) -> Within:
        """The bounds on the index that hold for the part's elements."""
        return Within(self.index, self.begin, self.end)

    @property
    def others(self) -> int:
        """The number of elements of a row outside the part."""
        return self.period - (self.end - self.begin)

    def count(self, elements: int) -> int:
        """Return the maximum number of elements outside the part in the rows that `elements` neighbours lie in."""
        return (-(-elements // self.period) + 1) * self.others


def dominant_part(nest: Nest, program: Program, shapes: Shapes) -> DominantPart | None:
    """Return the dominant part of a loop nest with one variable; None if no part has nearly all elements.

    Vectors contain elements inside and outside of this part.  So the part's code must be able to read its operands at
    the elements outside, too.
    """
    indices = {index for index, _ in nest.bounds}
    if len(indices) != 1 or len(nest.lists[ELEMENTS]) != 1 or nest.stores or nest.levels or nest.inner or nest.reads:
        return None
    (index,), (variable,) = indices, nest.lists[ELEMENTS]
    atom = index.terms[0][0] if len(index.terms) == 1 and index.constant == 0 else None
    if atom is None or atom.kind != "mod" or atom.of is None or index.terms[0][1] != 1:
        return None
    period, ends = number_of(atom.by), [number_of(end) for _, end in nest.bounds]
    if not period or period < MIN_PERIOD or atom.of != variable_index(variable.name, variable.extent) or None in ends:
        return None
    cuts = sorted({0, period, *(end for end in ends if end is not None and 0 < end < period)})
    begin, end = max(itertools.pairwise(cuts), key=lambda each: each[1] - each[0])
    found = DominantPart(index, begin, end, period)
    return found if end - begin >= MIN_SHARE * period and _is_readable(nest, found, program, shapes) else None


def _is_readable(nest: Nest, found: DominantPart, program: Program, shapes: Shapes) -> bool:
    """Return whether the part's code could run for all elements: its loads are in bounds, and it needs no branch."""
    writer = draft(program, shapes, {})
    writer.within = found.within
    for name in nest.outputs:
        writer.value(name, nest.place_of(name, shapes))
    limits = [(each.range, product(shapes.of[name])) for name, each in writer.accesses]
    is_inside = all(r and is_nonnegative(r[0]) and is_nonnegative(size - 1 - r[1]) for r, size in limits)
    return is_inside and not writer.bounds
