"""Estimates the cost per element of a loop nest without reductions, to choose between vectors and scattered lanes.

Scattered lanes are elements that one thread computes although they are far apart.

An access of a warp takes one cycle of the L1 cache per line of 128 bytes that it touches; an instruction takes a
quarter of a cycle.  For example, if each thread reads eight adjacent 64-bit integers, the warp makes four accesses, and
each access touches 16 lines.  This model predicts the times of such kernels on an H200 within 10 % (a causal mask with
padding: 37 us; the bias of Swin's windows: 13 us).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Final

from onnxfuse.algebra.indices import Atom, Index
from onnxfuse.kernels.region.interleaved import interleaved
from onnxfuse.kernels.region.lanes import Lanes
from onnxfuse.kernels.region.nests import ELEMENTS, Nest, Variable
from onnxfuse.kernels.region.operators import BYTES
from onnxfuse.kernels.region.region import Region
from onnxfuse.kernels.region.shapes import Shapes
from onnxfuse.kernels.region.traffic import ACCUMULATOR_BYTES, Access, accesses, typical
from onnxfuse.kernels.tensors import VECTOR_BYTES

THREAD_COST: Final = 150  # minimum cost of a thread in instructions; all threads that fit on an H200 take 1.36 us
ACCESS_COST: Final = 4  # instructions per load or store
DIVISION_COST: Final = 4  # instructions per division by a compile-time constant
CHOICE_COST: Final = 3  # instructions per lane to select a part of a Concat, or the input or the constant of a Pad
LINE_COST: Final = 4  # instructions that a multiprocessor issues while its L1 cache handles one line
BYTE_COST: Final = 7  # instructions that an H200 issues (30 T/s) while it moves one byte (4.2 TB/s)
LINE_BYTES: Final = 128
SECTOR_BYTES: Final = 32
WHOLE_SECTOR_LINES: Final = 0.5  # lines that the L1 cache could read while a whole sector is stored
# Lines that the L1 cache could read while a part of a sector is stored. The patches of a masked autoencoder (MAE) take
# 21.5 us if sectors are stored in parts, and 13.7 us if they are stored whole.
PART_SECTOR_LINES: Final = 1.5
EXCHANGED: Final = 3  # accesses per vector that threads exchange: to shared memory, from there, and to the output
WARP: Final = 32


def cost(nest: Nest, lanes: Lanes, region: Region, repeated: str = "", repeats: int = 1) -> float:
    """Return the cost of an element: how many instructions could issue while its slowest resource is busy.

    The resources are memory bandwidth, the L1 cache, and the issue of instructions.  A thread takes at least as long as
    THREAD_COST instructions, because it waits for memory.  Each thread has vectors at `repeats` neighbouring values of
    the variable `repeated`; it reads an operand only once if the operand's address does not depend on this variable.
    If this variable is the innermost one of the outputs, the threads of a block exchange their results in shared memory
    before they store them.
    """
    variables, width = nest.lists[ELEMENTS], lanes.width
    short = interleaved(nest) if repeated else None
    is_between = short is not None and short.name == repeated
    variables = tuple(each for each in variables if not (is_between and each.name == repeated))
    instructions = DIVISION_COST * (len(variables) - 1) * (width if lanes.scattered else 1) / repeats
    instructions += width * len(region.program.operations)
    divisions, lines = set[Atom](), 0.0
    stored = [Access(str(key), at, ACCUMULATOR_BYTES, 0) for key, at in nest.stored_read]
    for access in dict.fromkeys([*accesses(nest, region.program), *stored]):
        parts, parts_bytes = _parts(access, lanes, region.shapes)
        times = parts / (1 if repeated in access.address.variables() else repeats)
        times *= 1 if access.operand else len(nest.outputs)
        if is_between and not access.operand:
            vectors = len(nest.outputs) * width * access.item_bytes / VECTOR_BYTES
            instructions += EXCHANGED * vectors * ACCESS_COST
            lines += EXCHANGED * vectors * WARP * VECTOR_BYTES / LINE_BYTES
            continue
        given = (access.address, variables, lanes, parts_bytes, access.item_bytes)
        touched = len(_touched(*given, LINE_BYTES))
        instructions += times * ACCESS_COST
        lines += times * (touched if access.operand else max(touched, _stored_lines(*given)))
        divisions |= {atom for atom in access.address.atoms() if atom.kind in ("div", "mod")}
    instructions += DIVISION_COST * len(divisions) * width
    splits = {each for each in nest.bounds if not lanes.are_on_one_side(*each, region.sizes)}
    instructions += CHOICE_COST * len(splits) * width
    own = max(THREAD_COST / repeats, instructions, LINE_COST * lines) / width
    return max(cost_of_bytes(nest, region), own)


def cost_of_bytes(nest: Nest, region: Region) -> float:
    """Return how many instructions a multiprocessor issues while the bytes of one element move to or from memory.

    All accesses to an operand together count as at most the size of the operand.
    """
    moved: dict[str, int] = {}
    for each in accesses(nest, region.program):
        moved[each.operand] = moved.get(each.operand, 0) + each.moved
    for name in set(moved) - {""}:
        whole = BYTES[region.program.dtypes[name]] * math.prod(map(typical, region.shapes.of[name]))
        moved[name] = min(moved[name], whole)
    return BYTE_COST * sum(moved.values()) / max(1, math.prod(typical(each.extent) for each in nest.lists[ELEMENTS]))


def _parts(access: Access, lanes: Lanes, shapes: Shapes) -> tuple[int, int]:
    """Return the number of loads or stores that an access takes, and the bytes of each."""
    if not lanes.vary(access.address):
        return 1, access.item_bytes
    if not lanes.are_contiguous(access.address, shapes.sizes):
        return lanes.width, access.item_bytes
    whole = lanes.width * access.item_bytes
    return -(-whole // VECTOR_BYTES), min(whole, VECTOR_BYTES)


def _stored_lines(
    address: Index, variables: tuple[Variable, ...], lanes: Lanes, access_bytes: int, item_bytes: int
) -> float:
    """Return the cost of a warp's store, as the number of lines that the L1 cache could read in the same time.

    Storing a part of a sector costs more than storing a whole sector.
    """
    found = _touched(address, variables, lanes, access_bytes, item_bytes, SECTOR_BYTES)
    return sum(WHOLE_SECTOR_LINES if written >= SECTOR_BYTES else PART_SECTOR_LINES for written in found.values())


@functools.lru_cache(maxsize=4096)
def _touched(
    address: Index, variables: tuple[Variable, ...], lanes: Lanes, access_bytes: int, item_bytes: int, unit: int
) -> Mapping[int, int]:
    """Return the bytes that one access of a warp touches, by unit of memory.

    A unit has `unit` bytes.  The warp is the one that computes the elements in the middle of all elements.
    """
    step = 1 if lanes.scattered else lanes.width
    first = math.prod(typical(each.extent) for each in variables) // step // 2 // WARP * WARP
    found = dict[int, int]()
    for at in _evaluated(address, _values(range(first * step, (first + WARP) * step, step), variables)):
        begin, end = item_bytes * at, item_bytes * at + access_bytes
        for each in range(begin // unit, (end - 1) // unit + 1):
            found[each] = found.get(each, 0) + min(end, (each + 1) * unit) - max(begin, each * unit)
    return found


def _values(elements: Sequence[int], variables: tuple[Variable, ...]) -> dict[str, list[int]]:
    """Return the values that each variable has at elements, which are given by their flat indices."""
    found, left = {}, list(elements)
    for each in reversed(variables):
        extent = max(1, typical(each.extent))
        found[each.name] = [at % extent for at in left]
        left = [at // extent for at in left]
    return found


def _evaluated(index: Index, values: Mapping[str, list[int]]) -> list[int]:
    """Return an index's value in each thread of a warp; `values` holds each variable's value in each thread."""
    found = [typical(index.constant)] * WARP
    for atom, factor in index.terms:
        times = typical(factor)
        found = [so_far + times * value for so_far, value in zip(found, _atom(atom, values), strict=True)]
    return found


def _atom(atom: Atom, values: Mapping[str, list[int]]) -> list[int]:
    if atom.kind == "variable":
        return values.get(atom.name, [0] * WARP)
    if atom.of is None:  # a loaded value: an arbitrary number, but always the same one at the same place
        seeds = [0] * WARP
        for i, name in enumerate(atom.varies, 1):
            if name in values:
                seeds = [seed + i * 7919 * value for seed, value in zip(seeds, values[name], strict=True)]
        extent = max(1, typical(atom.extent))
        return [(seed * 2654435761 >> 9) % extent for seed in seeds]
    of, by = _evaluated(atom.of, values), max(1, typical(atom.by))
    if atom.kind == "div":
        return [each // by for each in of]
    return [each % by if atom.kind in ("mod", "wrap") else min(max(each, 0), by - 1) for each in of]
