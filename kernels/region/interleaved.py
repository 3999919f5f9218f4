"""Nests whose outputs have a short innermost axis, such as channels that are read as planes and stored interleaved."""

from __future__ import annotations

import math
from typing import Final

from onnxfuse.algebra.indices import NOTHING, flat, variable_index
from onnxfuse.algebra.sizes import number_of
from onnxfuse.kernels.region.lanes import Lanes
from onnxfuse.kernels.region.nests import ELEMENTS, Nest, Variable
from onnxfuse.kernels.region.operators import BYTES
from onnxfuse.kernels.tensors import VECTOR_BYTES

MAX_INTERLEAVED: Final = 32  # maximum number of elements along the short axis, and per thread
MIN_CHUNK_BYTES: Final = 4  # minimum size of a thread's store


def chunk_of(count: int, dtype: str) -> int:
    """Return the elements per store, for threads that each have `count` contiguous elements."""
    return math.gcd(count, VECTOR_BYTES // BYTES[dtype])


def interleaved_lanes(short: Variable, lanes: Lanes) -> Lanes:
    """Return `lanes`, narrowed until a thread can compute the elements of all lanes at all values of `short`.

    The limit is MAX_INTERLEAVED elements.
    """
    width = lanes.width
    while width > 1 and width * (number_of(short.extent) or 1) > MAX_INTERLEAVED:
        width //= 2
    return Lanes(lanes.variable, width)


def interleaved(nest: Nest) -> Variable | None:
    """Return a short variable that is innermost in the outputs, but not last in the loop nest; None without one.

    All other variables have the same order in the outputs and in the nest, and vectors lie along the nest's last
    variable.  So the elements of one vector, taken at all values of the short variable, are contiguous in the outputs,
    and so are the elements of a block.
    """
    variables, address = nest.lists[ELEMENTS], flat(nest.place, nest.shape)
    for short in variables[:-1]:
        others = [each for each in variables if each != short]
        before = flat([variable_index(each.name, each.extent) for each in others], [each.extent for each in others])
        own = before * short.extent + variable_index(short.name, short.extent)
        if 1 < (number_of(short.extent) or 0) <= MAX_INTERLEAVED and address + own * -1 == NOTHING:
            return short
    return None
