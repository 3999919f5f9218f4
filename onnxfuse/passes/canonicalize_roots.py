"""Write the reductions in front of roots as patterns know them.

A reduction that drops its last axis, which a view puts back, keeps it instead.  The last axis gets one name, -1, so
that two means of one tensor are computed once, and an Expand vanishes where the operator that reads it repeats the
values itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import attribute_or_input, flag_attribute
from onnxfuse.ir.dtypes import FUSIBLE_FLOATS
from onnxfuse.ir.graph import Graph, constant_number
from onnxfuse.ir.node import Node, Tensor, op_of, producer
from onnxfuse.passes.emit import emit
from onnxfuse.passes.graph_pass import graph_pass

AXES_ARE_INPUTS: Final = 18  # from this opset on, in all reductions but ReduceSum
REDUCTIONS: Final = ("ReduceMean", "ReduceL2")
PUTS_AXIS_BACK: Final = ("Reshape", "Unsqueeze")
BROADCASTS: Final = ("Add", "Sub", "Mul", "Div")


@graph_pass(opset=7)  # with broadcasting as it is today
def canonicalize_roots(graph: Graph, shapes: ShapeInfo) -> int:
    """Apply the rule of each node's operator; return the number of changes."""
    return sum(RULES[op](graph, shapes, node) for node in list(graph.nodes) if (op := op_of(node)) in RULES)


def with_epsilon(graph: Graph, tensor: Tensor) -> tuple[Tensor, float] | None:
    """Return what a sum adds a number above 0 to, and the number; None for what is no such sum."""
    total = producer(tensor)
    if total is None or op_of(total) != "Add":
        return None
    for other, number in (total.inputs, total.inputs[::-1]):
        epsilon = constant_number(graph, number)
        if epsilon is not None and 0 < epsilon < math.inf:
            return other, epsilon
    return None


def is_mean_of_squares(graph: Graph, tensor: Tensor) -> bool:
    """Return whether a tensor is the mean of the squares of another one."""
    reduction = producer(tensor)
    return reduction is not None and op_of(reduction) == "ReduceMean" and _is_square(graph, reduction.inputs[0])


def _is_square(graph: Graph, tensor: Tensor) -> bool:
    node = producer(tensor)
    if node is None:
        return False
    if op_of(node) == "Mul":
        return node.inputs[0] is node.inputs[1]
    return op_of(node) == "Pow" and constant_number(graph, node.inputs[1]) == 2


def _canonicalize_reduction(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Call the last axis -1, and keep it where a view puts it back."""
    rank, axes = shapes.rank(node.inputs[0]), attribute_or_input(graph, node, "axes")
    if not rank or not isinstance(axes, list) or axes not in ([-1], [rank - 1]):  # a tensor is known in a run only
        return False
    renamed = axes != [-1] and _name_last_axis(graph, node)
    return _keep_axis(graph, shapes, node) or renamed


def _name_last_axis(graph: Graph, node: Node) -> bool:
    if graph.opset < AXES_ARE_INPUTS:
        graph.set_attribute(node, "axes", [-1])
    else:
        node.inputs[1] = graph.constant(f"{node.outputs[0].name}_axes", np.array([-1], np.int64))
    return True


def _keep_axis(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Let a reduction keep the axis that a view, its only reader, puts back."""
    dropped, shape = node.outputs[0], shapes.shape(node.inputs[0])
    view = graph.sole_consumer(dropped)
    if view is None or op_of(view) not in PUTS_AXIS_BACK or flag_attribute(node, "keepdims", True) or shape is None:
        return False
    kept, end = (*shape[:-1], 1), view.outputs[0]
    if shapes.shape(end) != kept or shapes.dtype(dropped) not in FUSIBLE_FLOATS:
        return False
    attributes = {**node.attrs, "keepdims": 1}
    made = emit(graph, shapes, op_of(node), node.inputs, f"{end.name}_kept", kept, shapes.dtype(dropped), attributes)
    return graph.replace(end, made)


def _broadcast_instead(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Let an elementwise operator read what an Expand repeats to the shape of its other operand."""
    result = shapes.shape(node.outputs[0])
    changed = False
    for index, operand in enumerate(node.inputs):
        expand, other = producer(operand), shapes.shape(node.inputs[1 - index])
        if expand is None or op_of(expand) != "Expand" or shapes.shape(operand) != other or other != result:
            continue
        if other is not None and shapes.rank(expand.inputs[0]) == len(other):
            node.inputs[index] = expand.inputs[0]
            changed = True
    return changed


RULES: Final[dict[str, Callable[[Graph, ShapeInfo, Node], bool]]] = {
    **dict.fromkeys(REDUCTIONS, _canonicalize_reduction),
    **dict.fromkeys(BROADCASTS, _broadcast_instead),
}
