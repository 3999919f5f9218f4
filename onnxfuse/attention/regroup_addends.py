"""Add tensors to scores without a Reshape of the scores, where models reshape them to more axes for the sum, and back.

In Swin, each window of a shifted image has a mask.  The scores are reshaped to (batch, windows, heads, rows, columns),
the masks are added, and the sum is reshaped to (batch * windows, heads, rows, columns) again.  In SAM and MViT, biases
of positions along height and width are added to scores with two axes for each of rows and columns.

This pass reshapes the addends instead.  If a Reshape merges several axes and an addend is not constant along one of
them, the addend is first expanded along the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from onnxfuse.algebra.sizes import Shape, Size, product
from onnxfuse.analysis.scores import nodes_before
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, op_of, producer
from onnxfuse.passes.compose_views import View, write_views
from onnxfuse.passes.emit import integers, joined_sizes, sizes_along, write
from onnxfuse.passes.graph_pass import graph_pass
from onnxfuse.passes.sizes_of_operands import origin_of_size


@graph_pass(opset=8)  # the first opset with Expand
def regroup_addends(graph: Graph, shapes: ShapeInfo) -> int:
    """Rewrite every Reshape that is followed by Adds and a Reshape back; return how many were rewritten."""
    return sum(_rewrite(graph, shapes, node) for node in list(graph.nodes) if op_of(node) == "Reshape")


def _rewrite(graph: Graph, shapes: ShapeInfo, last: Node) -> bool:
    """Add tensors to the source of the first Reshape instead of to its result; return whether that was possible."""
    first, addends = _reshaped_sum(graph, last.inputs[0]) or (None, [])
    if first is None or not addends:
        return False
    source, end = first.inputs[0], last.outputs[0]
    shape, split, stem = shapes.shape(source), shapes.shape(first.outputs[0]), f"{end.name}_addends"
    mask = reduce(lambda a, b: write(shapes, "Add", [a, b], stem), addends)
    added = shapes.shape(mask)
    groups = None if shape is None or split is None else _groups(shape, split)
    if added is None or split is None or groups is None or shapes.shape(end) != shape or len(added) > len(split):
        return False
    added = (1,) * (len(split) - len(added)) + added
    # For each axis of `split`: whether the sum of addends has a size other than 1 along any axis of the same group.
    # The axes of a group are merged into one.
    differs = {i: any(added[j] != 1 for j in group) for group in groups for i in group}
    expanded = tuple(size if differs[i] else 1 for i, size in enumerate(split))
    view = View(None, tuple(product(expanded[i] for i in group) for group in groups))
    repeats = [size if size != found else 1 for size, found in zip(expanded, added, strict=True)]
    target = _target(graph, shapes, source, repeats, groups, split)
    if target is not None and expanded != added:
        mask = write(shapes, "Expand", [mask, target], stem)
    regrouped = None if target is None else write_views(shapes, mask, (view,), stem)
    if regrouped is None:
        return False
    return graph.replace(end, write(shapes, "Add", [source, regrouped], f"{end.name}_sum"))


def _reshaped_sum(graph: Graph, tensor: Tensor) -> tuple[Node, list[Tensor]] | None:
    """Return the Reshape of scores whose result plus other tensors is `tensor`, and these other tensors.

    Returns None where there is no such Reshape, or other nodes read the sums.
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
    """Return, for each axis of `shape`, the axes of `split` that it is split into; None if `split` merges axes."""
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


def _target(
    graph: Graph, shapes: ShapeInfo, source: Tensor, repeats: Sequence[Size], groups: list[list[int]], split: Shape
) -> Tensor | None:
    """Return the sizes `repeats`, the target of an Expand, as a tensor.

    One of the sizes can be dynamic.  It is one of the sizes into which an axis of `source` is split.  It is computed at
    run time: the size of this axis is divided by the other sizes.  Returns None if several sizes are dynamic, or if
    one of these other sizes is dynamic.
    """
    open_axes = [i for i, size in enumerate(repeats) if not isinstance(size, int)]
    sizes: list[int | Tensor] = [size if isinstance(size, int) else 1 for size in repeats]
    stem = f"{source.name}_repeats"
    for open_axis in open_axes:
        axis, group = next((i, group) for i, group in enumerate(groups) if open_axis in group)
        others = product(split[i] for i in group if i != open_axis)
        if len(open_axes) > 1 or not isinstance(others, int):
            return None
        origin, axis = origin_of_size(shapes, source, axis)
        size = sizes_along(shapes, origin, [axis], stem)
        sizes[open_axis] = write(shapes, "Div", [size, integers(graph, f"{stem}_parts", [others])], stem)
    return joined_sizes(shapes, sizes, stem)
