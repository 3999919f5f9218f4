"""Write what assignments to slices make of a tensor as a Concat of what is assigned.

`x[:, :, a:b] = y` is exported as a ScatterND whose indices are ranges: along one axis from a to b, and whole along the
others.  Where such nodes write all of a tensor, what it held before does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from onnxfuse.analysis.dims import Size
from onnxfuse.analysis.index_formulas import Index, Value
from onnxfuse.analysis.mask_values import IndexAnalysis
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import str_attribute
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, op_of, producer
from onnxfuse.passes.emit import emit

MAX_ASSIGNMENTS: Final = 8  # to one tensor


class Assignment(NamedTuple):
    """What is assigned to a range of an axis; the axis is None where all of the tensor is written."""

    axis: int | None
    first: int
    updates: Tensor


def spell_assignments(graph: Graph, shapes: ShapeInfo) -> int:
    """Replace every ScatterND at the end of assignments that write all of a tensor.  Returns their number."""
    scatters = [node for node in graph.nodes if op_of(node) == "ScatterND"]
    if not scatters:
        return 0
    indices = IndexAnalysis(graph, shapes)
    count = sum(_rewrite(graph, shapes, indices, node) for node in reversed(scatters))
    if count:
        graph.remove_dead()
        graph.sort()
    return count


def _rewrite(graph: Graph, shapes: ShapeInfo, indices: IndexAnalysis, last: Node) -> bool:
    """Replace what the assignments that end in a node make of a tensor; return whether they write all of it."""
    result, found = last.outputs[0], list[Assignment]()
    node: Node | None = last
    while len(found) < MAX_ASSIGNMENTS and node is not None and op_of(node) == "ScatterND":
        made = _assignment(shapes, indices, node)
        if made is None or (found and made.axis != found[0].axis):
            break
        found.append(made)
        node = producer(node.inputs[0])
    shape = shapes.shape(result)
    if not found or shape is None:
        return False
    axis, parts = found[0].axis, sorted(found, key=lambda each: each.first)
    if axis is None:
        return graph.replace(result, found[0].updates)
    if not _are_adjacent(shapes, parts, axis, shape[axis]):
        return False
    inputs, dtype = [part.updates for part in parts], shapes.dtype(result)
    whole = emit(graph, shapes, "Concat", inputs, f"{result.name}_parts", shape, dtype, {"axis": axis})
    return graph.replace(result, whole)


def _are_adjacent(shapes: ShapeInfo, parts: Sequence[Assignment], axis: int, size: Size) -> bool:
    """Return whether parts follow each other along an axis, from its first element to the last of `size`."""
    end = 0
    for part in parts:
        shape = shapes.shape(part.updates)
        width = None if shape is None else shape[axis]
        if part.first != end or not isinstance(width, int):
            return False
        end += width
    return end == size


def _assignment(shapes: ShapeInfo, indices: IndexAnalysis, node: Node) -> Assignment | None:
    """Return what a ScatterND assigns, if its indices are a range of one axis and whole along the others."""
    data, places, updates = node.inputs
    shape, grid = shapes.shape(data), shapes.shape(places)
    if shape is None or grid is None or str_attribute(node, "reduction", "none") != "none":
        return None
    columns = indices.index_columns.get(places.name, ())
    if grid[-1] == 1:
        columns = (indices.value(places),)
    if len(columns) != len(grid) - 1 or grid[-1] != len(columns):
        return None
    found: list[tuple[int, int]] = []
    for axis, (column, width) in enumerate(zip(columns, grid[:-1], strict=True)):
        first = _first_of_range(column, axis - len(grid), width)
        if first is None:
            return None
        if first or width != shape[axis]:
            found.append((axis, first))
    if len(found) > 1 or shapes.shape(updates) != (*grid[:-1], *shape[len(columns) :]):
        return None
    return Assignment(*found[0], updates) if found else Assignment(None, 0, updates)


def _first_of_range(column: Value | None, axis: int, width: object) -> int | None:
    """Return the first of indices that count up along an axis; None where they do not."""
    if not isinstance(column, Index) or not isinstance(column.offset, int) or column.offset < 0:
        return None
    counts = () if width == 1 else ((axis, width, 1),)
    return column.offset if column.terms == counts else None
