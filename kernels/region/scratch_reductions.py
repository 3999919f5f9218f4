"""Reductions whose accumulators are in scratch memory: a launch computes them, and launches after it read them.

A reduction is stored where the threads that read it would compute it too slowly: where rows are so few that their
blocks leave most of the GPU idle, or where it is read at places that no row shares, so that each thread would reduce
all elements by itself.
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
    """A reduction at all places along the axes that it keeps.

    Each place is a row of elements, which `shares` blocks reduced.  The accumulators of a row lie side by side, for a
    warp or a block to merge, or, if `is_across`, those of a share of all rows, for threads that have a row each.
    """

    pointer: str
    instance: Instance  # the reduction at the places o0, o1, ...
    shape: Shape  # the shape of all places
    shares: Size = 1
    is_across: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether there is one place only, so that a block can merge the shares for all its threads."""
        return product(self.shape) == 1 and self.shares != 1

    @property
    def count(self) -> Size:
        """The number of accumulators."""
        return product(self.shape) * self.shares


StoredByKey: TypeAlias = Mapping[Key, Stored]


def stored(instance: Instance, pointer: str, shapes: Shapes) -> Stored:
    """Return the reduction at all places, given its instance at one place."""
    dims = [dim for dim, index in zip(shapes.of[instance.value], instance.kept, strict=True) if index is not None]
    places = iter(variable_index(f"o{axis}", dim) for axis, dim in enumerate(dims))
    kept = tuple(None if index is None else next(places) for index in instance.kept)
    return Stored(pointer, Instance(instance.kind, instance.terms, instance.value, kept), tuple(dims))


def place_in(instance: Instance) -> Place:
    """Return the place of an instance in the stored reduction."""
    return tuple(index for index in instance.kept if index is not None)
