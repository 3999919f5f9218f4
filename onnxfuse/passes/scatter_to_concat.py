"""Replace assignments to slices that write all of a tensor by a Concat of the assigned values.

`x[:, :, a:b] = y` is exported as a ScatterND whose indices are ranges: from a to b along one axis, and over the whole
length of the others.  Where such nodes write all of a tensor, the values that it had before do not matter.  For
`x[..., ::2] = y` and `x[..., 1::2] = z`, y and z get a new axis, along which they are joined, so that their elements
alternate.  `x[:, t] = y`, in a loop that an exporter unrolled, is such a ScatterND or a ScatterElements.

If a Transpose reads the last scatter, the parts are first transposed by its perm, but with the assigned axis last,
and the joined parts are transposed back.  This last Transpose and the one that read the scatter then cancel, or
become one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from onnxfuse.algebra.index_maps import inverse, transposed
from onnxfuse.algebra.indices import Index
from onnxfuse.algebra.sizes import Size
from onnxfuse.analysis.index_formulas import Value
from onnxfuse.analysis.mask_values import IndexAnalysis
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import int_attribute, ints_attribute, str_attribute
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, consumers, op_of, producer
from onnxfuse.passes.compose_views import View, write_views
from onnxfuse.passes.emit import unsqueezed, write
from onnxfuse.passes.graph_pass import graph_pass

SCATTERS: Final = ("ScatterND", "ScatterElements")


class Assignment(NamedTuple):
    """Values assigned to every `step`th element of an axis from `first` on; the axis is None for the whole tensor."""

    axis: int | None
    first: int
    updates: Tensor
    step: int = 1


@graph_pass()
def scatter_to_concat(graph: Graph, shapes: ShapeInfo) -> int:
    """Replace every scatter that ends a chain of assignments to all of a tensor; return how many were replaced."""
    scatters = [node for node in graph.nodes if op_of(node) in SCATTERS]
    if not scatters:
        return 0
    indices = IndexAnalysis(graph, shapes)
    assigned = {node: _assignment(shapes, indices, node) for node in scatters}
    count, done = 0, set[Node]()
    for node in reversed(scatters):
        chain = _chain(node, assigned) if node not in done else {}
        if _rewrite(graph, shapes, node.outputs[0], [*chain.values()]):
            done.update(chain)
            count += 1
    return count


def _chain(last: Node, assigned: Mapping[Node, Assignment | None]) -> dict[Node, Assignment]:
    """Return the scatters of a chain that ends with `last` and writes to one axis, in steps of one size."""
    found = dict[Node, Assignment]()
    node: Node | None = last
    while node is not None and (made := assigned.get(node)) is not None:
        first = found.get(last, made)
        if (made.axis, made.step) != (first.axis, first.step):
            break
        found[node] = made
        node = producer(node.inputs[0])
    return found


def _rewrite(graph: Graph, shapes: ShapeInfo, result: Tensor, found: Sequence[Assignment]) -> bool:
    """Replace the result of a chain of assignments, if they write all elements; return whether they do."""
    shape = shapes.shape(result)
    if not found or shape is None:
        return False
    axis, parts = found[0].axis, sorted(found, key=lambda each: each.first)
    if axis is None:
        return graph.replace(result, found[0].updates)
    if found[0].step > 1:
        return _stack(graph, shapes, result, parts, axis)
    if not _are_adjacent(shapes, parts, axis, shape[axis]):
        return False
    order = _order_with_axis_last(result, len(shape), axis)
    updates, stem = [_transposed(shapes, part.updates, order) for part in parts], f"{result.name}_parts"
    joined = write(shapes, "Concat", updates, stem, {"axis": order.index(axis)})
    return graph.replace(result, _transposed(shapes, joined, inverse(order)))


def _stack(graph: Graph, shapes: ShapeInfo, result: Tensor, parts: Sequence[Assignment], axis: int) -> bool:
    """Interleave the parts along an axis if together they write every element; return whether they do."""
    shape, step, stem = shapes.shape(result), parts[0].step, f"{result.name}_stacked"
    assert shape is not None
    if [part.first for part in parts] != list(range(step)):
        return False
    order = _order_with_axis_last(result, len(shape), axis)
    moved = transposed(shape, order)
    at, width = order.index(axis), (shapes.shape(parts[0].updates) or shape)[axis]
    if any((shapes.shape(part.updates) or shape)[axis] != width for part in parts) or width * step != shape[axis]:
        return False
    turned = [_transposed(shapes, part.updates, order) for part in parts]
    columns = [unsqueezed(shapes, each, [at + 1], f"{stem}_column") for each in turned]
    joined = write(shapes, "Concat", columns, stem, {"axis": at + 1})
    stacked = write_views(shapes, joined, (View(None, moved),), f"{stem}_rows")
    return stacked is not None and graph.replace(result, _transposed(shapes, stacked, inverse(order)))


def _order_with_axis_last(tensor: Tensor, rank: int, axis: int) -> list[int]:
    """Return the perm of a Transpose that reads the tensor, with `axis` moved last; the identity if there is none."""
    perms = [ints_attribute(reader, "perm") for reader in consumers(tensor) if op_of(reader) == "Transpose"]
    orders = sorted((perm for perm in perms if perm is not None), key=lambda perm: perm[-1] != axis)
    return [*(each for each in orders[0] if each != axis), axis] if orders else list(range(rank))


def _transposed(shapes: ShapeInfo, tensor: Tensor, order: Sequence[int]) -> Tensor:
    if [*order] == [*range(len(order))]:
        return tensor
    return write(shapes, "Transpose", [tensor], f"{tensor.name}_turned", {"perm": [*order]})


def _are_adjacent(shapes: ShapeInfo, parts: Sequence[Assignment], axis: int, size: Size) -> bool:
    """Return whether the parts follow each other along an axis and cover its `size` elements."""
    end = 0
    for part in parts:
        shape = shapes.shape(part.updates)
        width = None if shape is None else shape[axis]
        if part.first != end or not isinstance(width, int):
            return False
        end += width
    return end == size


def _assignment(shapes: ShapeInfo, indices: IndexAnalysis, node: Node) -> Assignment | None:
    """Return the assignment of a scatter that writes to a range of one axis, and to every index of the other axes.

    Returns None for any other scatter, and for a ScatterElements of more than one index.
    """
    data, places, updates = node.inputs
    shape, grid = shapes.shape(data), shapes.shape(places)
    if shape is None or grid is None or str_attribute(node, "reduction", "none") != "none":
        return None
    if op_of(node) == "ScatterElements":
        along = int_attribute(node, "axis", 0) % len(shape)
        is_slice = grid == shapes.shape(updates) == (*shape[:along], 1, *shape[along + 1 :])
        place = _range_of(indices.value(places), along - len(grid), 1)
        return Assignment(along, place[0], updates) if is_slice and place is not None else None
    columns = indices.columns(places)
    if grid[-1] == 1:
        columns = (indices.value(places),)
    if len(columns) != len(grid) - 1 or grid[-1] != len(columns):
        return None
    found: list[tuple[int, int, int]] = []
    for axis, (column, width) in enumerate(zip(columns, grid[:-1], strict=True)):
        places_of_axis = _range_of(column, axis - len(grid), width)
        if places_of_axis is None:
            return None
        if places_of_axis != (0, 1) or width != shape[axis]:
            found.append((axis, *places_of_axis))
    if len(found) > 1 or shapes.shape(updates) != (*grid[:-1], *shape[len(columns) :]):
        return None
    if not found:
        return Assignment(None, 0, updates)
    axis, first, step = found[0]
    return Assignment(axis, first, updates, step)


def _range_of(column: Value | None, axis: int, width: object) -> tuple[int, int] | None:
    """Return the first index and the step of indices that count up along an axis; None if they do not count up."""
    if not isinstance(column, Index) or not isinstance(column.constant, int) or column.constant < 0:
        return None
    if width == 1:
        return None if column.terms else (column.constant, 1)
    for atom, step in column.terms if len(column.terms) == 1 else ():
        if (atom.name, atom.extent) == (str(axis), width) and isinstance(step, int) and step > 0:
            return column.constant, step
    return None
