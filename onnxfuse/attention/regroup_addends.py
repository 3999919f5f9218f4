"""Add tensors to scores as they are, where a model reshapes the scores to more axes to add them, and back.

Windows of an image that was shifted have a mask each (Swin), which is added to scores of (batch, windows, heads, rows,
columns) and then (batch * windows, heads, rows, columns) again.  Positions along height and width (SAM, MViT) are added
to scores with two axes for each of rows and columns.  What is added is reshaped instead, and expanded along the axes
that are joined with another one along which it differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnx import TensorProto

from onnxfuse.algebra.sizes import Size, product
from onnxfuse.analysis.scores import nodes_before
from onnxfuse.analysis.shape_info import Shape, ShapeInfo
from onnxfuse.analysis.shape_rules.elementwise import broadcast
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, op_of, producer
from onnxfuse.passes.compose_views import View, can_write_views, write_views
from onnxfuse.passes.emit import emit, integers, joined_sizes, sizes_along
from onnxfuse.passes.graph_pass import graph_pass
from onnxfuse.passes.sizes_of_operands import origin_of_size


@graph_pass(opset=8)  # with Expand
def regroup_addends(graph: Graph, shapes: ShapeInfo) -> int:
    """Rewrite every Reshape, Adds and Reshape back to the first shape.  Returns their number."""
    return sum(_rewrite(graph, shapes, node) for node in list(graph.nodes) if op_of(node) == "Reshape")


def _rewrite(graph: Graph, shapes: ShapeInfo, last: Node) -> bool:
    """Add what is added before a Reshape after it instead; return whether that was possible."""
    first, addends = _reshaped_sum(graph, last.inputs[0]) or (None, [])
    if first is None or not addends:
        return False
    source, end = first.inputs[0], last.outputs[0]
    shape, split = shapes.shape(source), shapes.shape(first.outputs[0])
    added = [each for tensor in addends if (each := shapes.shape(tensor)) is not None]
    if shape is None or split is None or shapes.shape(end) != shape or len(added) < len(addends):
        return False
    groups, total = _groups(shape, split), broadcast(shapes, *added)
    if groups is None or len(total) > len(split):
        return False
    total = (1,) * (len(split) - len(total)) + total
    expanded = tuple(size for group in groups for size in _expanded(group, split, total))
    view = View(None, tuple(product(expanded[i] for i in group) for group in groups))
    repeats = [size if size != found else 1 for size, found in zip(expanded, total, strict=True)]
    target = _target(graph, shapes, source, repeats, groups, split) if can_write_views(expanded, (view,)) else None
    if target is None:
        return False
    stem, dtype = end.name, shapes.dtype(source)
    mask = _sum(graph, shapes, addends, f"{stem}_addends")
    if expanded != total:
        mask = emit(graph, shapes, "Expand", [mask, target], f"{stem}_expanded", expanded, dtype)
    regrouped = write_views(graph, shapes, mask, (view,), f"{stem}_added")
    assert regrouped is not None  # as was asked before
    return graph.replace(end, emit(graph, shapes, "Add", [source, regrouped], f"{stem}_sum", shape, dtype))


def _reshaped_sum(graph: Graph, tensor: Tensor) -> tuple[Node, list[Tensor]] | None:
    """Return the Reshape of a product that a tensor is the sum of, and the tensors that Adds add to it.

    None where there is none, or other nodes read the sums.
    """
    node = producer(tensor)
    if node is None or graph.sole_consumer(tensor) is None:
        return None
    if op_of(node) == "Reshape":
        sources = nodes_before(node.inputs[0], ("Add", "Mul", "Div"))
        return (node, []) if any(op_of(each) == "MatMul" for each in sources) else None
    for side, addend in (node.inputs, node.inputs[::-1]) if op_of(node) == "Add" else ():
        if (found := _reshaped_sum(graph, side)) is not None:
            return found[0], [*found[1], addend]
    return None


def _groups(shape: Shape, split: Shape) -> list[list[int]] | None:
    """Return the axes of `split` that each axis of `shape` is split into; None where axes are joined."""
    groups: list[list[int]] = []
    axis = 0
    for size in shape:
        group: list[int] = []
        while axis < len(split) and (not group or product(split[i] for i in group) != size):
            group.append(axis)
            axis += 1
        if product(split[i] for i in group) != size:
            return None
        groups.append(group)
    return groups if axis == len(split) else None


def _expanded(group: Sequence[int], split: Shape, added: Shape) -> Iterator[Size]:
    """Yield the sizes along joined axes: ones, or all sizes where what is added differs along one of the axes."""
    differs = any(added[i] != 1 for i in group)
    yield from (split[i] if differs else 1 for i in group)


def _sum(graph: Graph, shapes: ShapeInfo, addends: Sequence[Tensor], stem: str) -> Tensor:
    total = addends[0]
    for other in addends[1:]:
        left, right = shapes.shape(total), shapes.shape(other)
        assert left is not None and right is not None
        shape = broadcast(shapes, left, right)
        total = emit(graph, shapes, "Add", [total, other], stem, shape, shapes.dtype(total))
    return total


def _target(
    graph: Graph, shapes: ShapeInfo, source: Tensor, repeats: Sequence[Size], groups: list[list[int]], split: Shape
) -> Tensor | None:
    """Return the target of an Expand; one that is no number is a size of `source`, divided by those joined with it.

    None where there are several, or the others are no numbers.
    """
    open_axes = [i for i, size in enumerate(repeats) if not isinstance(size, int)]
    sizes: list[int | Tensor] = [size if isinstance(size, int) else 1 for size in repeats]
    stem, write = f"{source.name}_repeats", (graph, shapes)
    for open_axis in open_axes:
        axis, group = next((i, group) for i, group in enumerate(groups) if open_axis in group)
        others = product(split[i] for i in group if i != open_axis)
        if len(open_axes) > 1 or not isinstance(others, int):
            return None
        origin, axis = origin_of_size(shapes, source, axis)
        inputs = [sizes_along(*write, origin, [axis], stem), integers(graph, f"{stem}_parts", [others])]
        sizes[open_axis] = emit(*write, "Div", inputs, f"{stem}_count", (1,), TensorProto.INT64)
    return joined_sizes(*write, sizes, stem)
