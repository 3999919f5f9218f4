"""Reductions whose accumulators are in scratch memory: one launch computes them, and later launches read them.

A reduction is stored if the threads that read it would compute it too slowly.  There are two cases: rows are so few
that their blocks leave most of the GPU idle; or each thread reads the reduction at a different place and would reduce
all elements alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from onnxfuse.algebra.index_maps import Place
from onnxfuse.algebra.indices import variable_index
from onnxfuse.algebra.sizes import Shape, Size, product
from onnxfuse.kernels.region.reductions import Instance, Key
from onnxfuse.kernels.region.shapes import Shapes


@dataclass(frozen=True)
class Stored:
    """All results of a reduction, one per element of the kept axes, with accumulators in scratch memory.

    The elements that are reduced to one result are a row.  Each of `shares` blocks reduces a part of the row and stores
    an accumulator.  The accumulators of one row are contiguous, so that a warp or a block merges them.  If `is_across`,
    the accumulators of the same part of all rows are contiguous instead, so that each thread merges one row.
    """

    pointer: str
    instance: Instance  # the reduction for the result whose indices are the variables o0, o1, ...
    shape: Shape  # the extents of the kept axes
    shares: Size = 1
    is_across: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether several blocks accumulate the only result; each block that reads it merges their accumulators."""
        return product(self.shape) == 1 and self.shares != 1

    @property
    def count(self) -> Size:
        """The number of accumulators."""
        return product(self.shape) * self.shares


StoredByKey: TypeAlias = Mapping[Key, Stored]


def stored(instance: Instance, pointer: str, shapes: Shapes) -> Stored:
    """Return all results of a reduction, given the instance of one result."""
    dims = [dim for dim, index in zip(shapes.of[instance.value], instance.kept, strict=True) if index is not None]
    places = iter(variable_index(f"o{axis}", dim) for axis, dim in enumerate(dims))
    kept = tuple(None if index is None else next(places) for index in instance.kept)
    return Stored(pointer, Instance(instance.kind, instance.terms, instance.value, kept), tuple(dims))


def place_in(instance: Instance) -> Place:
    """Return the indices, along the kept axes, of an instance's result."""
    return tuple(index for index in instance.kept if index is not None)
