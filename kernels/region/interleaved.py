"""Nests whose outputs have a short innermost axis: channels that are read as planes, and stored side by side."""

from __future__ import annotations

import math
from typing import Final

from onnxfuse.algebra.indices import NOTHING, flat, variable_index
from onnxfuse.algebra.sizes import number_of
from onnxfuse.kernels.region.lanes import Lanes
from onnxfuse.kernels.region.nests import ELEMENTS, Nest, Variable
from onnxfuse.kernels.region.operators import BYTES
from onnxfuse.kernels.tensors import VECTOR_BYTES

MAX_INTERLEAVED: Final = 32  # the most elements of the short innermost axis, and of a thread's vectors together
MIN_CHUNK_BYTES: Final = 4  # bytes that a thread stores at once


def chunk_of(count: int, dtype: str) -> int:
    """Return how many elements a thread stores at once where each of a block has so many side by side."""
    return math.gcd(count, VECTOR_BYTES // BYTES[dtype])


def interleaved_lanes(short: Variable, lanes: Lanes) -> Lanes:
    """Return lanes along the same variable, as many as a thread can have at all values of the short one."""
    width = lanes.width
    while width > 1 and width * (number_of(short.extent) or 1) > MAX_INTERLEAVED:
        width //= 2
    return Lanes(lanes.variable, width)


def interleaved(nest: Nest) -> Variable | None:
    """Return the innermost variable of the outputs if it is short and not the last one of the nest; None otherwise.

    The outputs are in the order of the nest's other variables, so that vectors along the last one, at all values of
    the short one, lie side by side: those of a thread, and those of a block.
    """
    variables, address = nest.lists[ELEMENTS], flat(nest.place, nest.shape)
    for short in variables[:-1]:
        others = [each for each in variables if each != short]
        before = flat([variable_index(each.name, each.extent) for each in others], [each.extent for each in others])
        own = before * short.extent + variable_index(short.name, short.extent)
        if 1 < (number_of(short.extent) or 0) <= MAX_INTERLEAVED and address + own * -1 == NOTHING:
            return short
    return None
