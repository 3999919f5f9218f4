"""Finds the values that a tile keeps in shared memory, because it loads and stores along different variables."""

from __future__ import annotations

from collections.abc import Iterator

from onnxfuse.algebra.index_maps import Place
from onnxfuse.kernels.region import maps
from onnxfuse.kernels.region.branches import VIEWS
from onnxfuse.kernels.region.nests import ELEMENTS, Nest, Variable, draft
from onnxfuse.kernels.region.program import Program
from onnxfuse.kernels.region.shapes import Shapes
from onnxfuse.kernels.region.traffic import is_side_by_side
from onnxfuse.region_operators import ELEMENTWISE


def staged_values(nest: Nest, across: Variable, program: Program, shapes: Shapes) -> list[tuple[str, Place]]:
    """Return the values, with indices, that a tile computes along `across` and keeps in shared memory.

    Among all values whose computation loads no operand along the last variable, the returned ones are nearest to the
    outputs.
    """
    found: dict[tuple[str, Place], None] = {}
    for name in nest.outputs:
        found |= dict.fromkeys(_staged(name, nest.place_of(name, shapes), nest, across, program, shapes))
    return list(found)


def _staged(
    name: str, place: Place, nest: Nest, across: Variable, program: Program, shapes: Shapes
) -> Iterator[tuple[str, Place]]:
    operation, last = program.producers.get(name), nest.lists[ELEMENTS][-1]
    writer = draft(program, shapes, {})
    writer.value(name, place)
    along = [each for _, each in writer.accesses if last.name in each.variables()]
    direct = [each for each in along if is_side_by_side(each, last)]
    if not any(is_side_by_side(each, across) for each in along if each not in direct):
        return
    if direct and operation and operation.name in ELEMENTWISE:
        for each in operation.inputs:
            inner = maps.broadcast(place, shapes.of[name], shapes.of[each], shapes)
            yield from _staged(each, inner, nest, across, program, shapes)
    elif direct and operation and operation.name in VIEWS:
        inner = maps.source(operation, name, place, shapes)
        yield from _staged(operation.inputs[0], inner, nest, across, program, shapes)
    else:
        yield name, place
