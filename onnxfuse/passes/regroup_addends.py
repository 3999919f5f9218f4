"""Add tensors to scores as they are, where a model reshapes the scores to more axes to add them, and back.

Windows of an image that was shifted have a mask each (Swin), which is added to scores of (batch, windows, heads, rows,
columns) and then (batch * windows, heads, rows, columns) again.  Positions along height and width (SAM, MViT) are added
to scores with two axes for each of rows and columns.  What is added is reshaped instead, and expanded along the axes
that are joined with another one along which it differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from onnx import TensorProto

from onnxfuse.algebra.sizes import Size, product
from onnxfuse.analysis.shape_info import Shape, ShapeInfo
from onnxfuse.analysis.shape_rules.elementwise import broadcast
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, op_of, producer
from onnxfuse.passes.emit import emit
from onnxfuse.passes.fold_shapes import reshape_target
from onnxfuse.passes.graph_pass import graph_pass


@graph_pass(opset=8)  # with Expand
def regroup_addends(graph: Graph, shapes: ShapeInfo) -> int:
    """Rewrite every Reshape, Adds and Reshape back to the shape in front of them.  Returns their number."""
    return sum(_rewrite(graph, shapes, node) for node in list(graph.nodes) if op_of(node) == "Reshape")


def _rewrite(graph: Graph, shapes: ShapeInfo, last: Node) -> bool:
    """Add what is added in front of a Reshape to what is behind it; return whether that was possible."""
    found = _reshaped_sum(graph, last)
    if found is None:
        return False
    source, first, addends = found
    shape, split = shapes.shape(source), shapes.shape(first.outputs[0])
    added = [each for tensor in addends if (each := shapes.shape(tensor)) is not None]
    if shape is None or split is None or shapes.shape(last.outputs[0]) != shape or len(added) < len(addends):
        return False
    groups, total = _groups(shape, split), broadcast(shapes, *added)
    if groups is None or len(total) > len(split):
        return False
    total = (1,) * (len(split) - len(total)) + total
    expanded = tuple(size for group in groups for size in _expanded(group, split, total))
    joined = tuple(product(expanded[i] for i in group) for group in groups)
    target, change = reshape_target(expanded, joined), [a != b for a, b in zip(expanded, total, strict=True)]
    open_axes = [i for i, size in enumerate(expanded) if change[i] and not isinstance(size, int)]
    parts = [_other_parts(groups, split, axis) for axis in open_axes]
    if target is None or len(parts) > 1 or None in parts:
        return False
    stem, dtype = last.outputs[0].name, shapes.dtype(source)
    mask = _sum(graph, shapes, addends, f"{stem}_addends")
    if any(change):
        sizes = [size if changed else 1 for size, changed in zip(expanded, change, strict=True)]
        wanted = _expand_target(graph, shapes, source, sizes, groups, parts, f"{stem}_target")
        mask = emit(graph, shapes, "Expand", [mask, wanted], f"{stem}_expanded", expanded, dtype)
    mask = emit(graph, shapes, "Reshape", [mask, _integers(graph, stem, target)], f"{stem}_added", joined, dtype)
    return graph.replace(last.outputs[0], emit(graph, shapes, "Add", [source, mask], f"{stem}_sum", shape, dtype))


def _other_parts(groups: Sequence[Sequence[int]], split: Shape, axis: int) -> int | None:
    """Return the product of the sizes of the axes that are joined with an axis; None if that is no number."""
    group = next(group for group in groups if axis in group)
    rest = product(split[i] for i in group if i != axis)
    return rest if isinstance(rest, int) else None


def _reshaped_sum(graph: Graph, last: Node) -> tuple[Tensor, Node, list[Tensor]] | None:
    """Return what the first Reshape reads, that node, and the tensors that Adds add before the last Reshape."""
    addends: list[Tensor] = []
    tensor = last.inputs[0]
    while (node := producer(tensor)) is not None and graph.sole_consumer(tensor) is not None:
        if op_of(node) == "Reshape" and addends:
            return node.inputs[0], node, addends
        if op_of(node) != "Add":
            return None
        sides = [(node.inputs[i], node.inputs[1 - i]) for i in (0, 1)]
        side = next((each for each in sides if _leads_to_reshape(graph, each[0])), None)
        if side is None:
            return None
        tensor, addend = side
        addends.insert(0, addend)
    return None


def _leads_to_reshape(graph: Graph, tensor: Tensor) -> bool:
    """Return whether a tensor is a Reshape of a product, or Adds to one."""
    node = producer(tensor)
    if node is None or graph.sole_consumer(tensor) is None:
        return False
    if op_of(node) == "Add":
        return any(_leads_to_reshape(graph, each) for each in node.inputs)
    source = producer(node.inputs[0]) if op_of(node) == "Reshape" else None
    while source is not None and op_of(source) in ("Add", "Mul", "Div"):
        source = next((found for each in source.inputs if (found := producer(each)) is not None), None)
    return source is not None and op_of(source) == "MatMul"


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


def _expand_target(
    graph: Graph,
    shapes: ShapeInfo,
    source: Tensor,
    sizes: Sequence[Size],
    groups: Sequence[Sequence[int]],
    parts: Sequence[int | None],
    stem: str,
) -> Tensor:
    """Return the target of an Expand to `sizes`; one that is no number is an axis of `source`, divided by `parts`."""
    open_axis = next((i for i, size in enumerate(sizes) if not isinstance(size, int)), None)
    if open_axis is None:
        return _integers(graph, stem, [size for size in sizes if isinstance(size, int)])
    axis, write = next(i for i, group in enumerate(groups) if open_axis in group), (graph, shapes)
    measured = _in_front(shapes, source, axis)
    found = emit(*write, "Shape", [measured], f"{stem}_sizes", (len(groups),), TensorProto.INT64)
    index, divisor = _integers(graph, f"{stem}_axis", [axis]), _integers(graph, f"{stem}_parts", [parts[0] or 1])
    size = emit(*write, "Gather", [found, index], f"{stem}_size", (1,), TensorProto.INT64, {"axis": 0})
    count = emit(*write, "Div", [size, divisor], f"{stem}_count", (1,), TensorProto.INT64)
    numbers = [size if isinstance(size, int) else 1 for size in sizes]
    before, behind = numbers[:open_axis], numbers[open_axis + 1 :]
    pieces = [_integers(graph, f"{stem}_before", before)] if before else []
    pieces += [count, *([_integers(graph, f"{stem}_behind", behind)] if behind else [])]
    return emit(*write, "Concat", pieces, stem, (len(sizes),), TensorProto.INT64, {"axis": 0})


def _in_front(shapes: ShapeInfo, source: Tensor, axis: int) -> Tensor:
    """Return a tensor in front of the scores that has as many axes and the same size along one of them."""
    shape, tensor = shapes.shape(source), source
    while (
        shape is not None and (node := producer(tensor)) is not None and op_of(node) in ("Add", "Mul", "Div", "MatMul")
    ):
        same = (each for each in node.inputs if _has_size(shapes.shape(each), shape, axis))
        operand = next(same, None)
        if operand is None:
            return tensor
        tensor = operand
        if op_of(node) == "MatMul":
            return tensor
    return tensor


def _has_size(found: Shape | None, shape: Shape, axis: int) -> bool:
    return found is not None and len(found) == len(shape) and found[axis] == shape[axis]


def _integers(graph: Graph, stem: str, numbers: Sequence[int]) -> Tensor:
    return graph.constant(stem, np.array(numbers, np.int64))
