"""Give what means the same one form: no-ops are removed, views are composed, repeated nodes are computed once."""

from __future__ import annotations

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import int_attribute
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import op_of
from onnxfuse.passes.compose_views import compose_views
from onnxfuse.passes.eliminate_common_subexpressions import eliminate_common_subexpressions
from onnxfuse.passes.remove_no_ops import remove_no_ops

MAX_NORMALIZE_ROUNDS = 10
FIRST_FLATTEN_FROM_END = 11  # the opset in which its axis may be negative


def normalize(graph: Graph, shapes: ShapeInfo) -> int:
    """Apply the three passes until none of them changes anything; return the number of changes."""
    total = _count_flattened_axes_from_front(graph, shapes)
    for _ in range(MAX_NORMALIZE_ROUNDS):
        changes = remove_no_ops(graph, shapes) + compose_views(graph, shapes)
        changes += eliminate_common_subexpressions(graph, shapes)
        total += changes
        if not changes:
            break
    return total


def _count_flattened_axes_from_front(graph: Graph, shapes: ShapeInfo) -> int:
    """Make the axis of Flatten positive in opsets that have no negative one; return the number of nodes changed.

    onnxruntime's kernel takes a negative axis there, but its shape inference refuses it once the rank is known, which
    other passes may make it.
    """
    if graph.opset >= FIRST_FLATTEN_FROM_END:
        return 0
    count = 0
    for node in graph.nodes:
        axis, rank = int_attribute(node, "axis", 1) if op_of(node) == "Flatten" else 1, shapes.rank(node.inputs[0])
        if axis < 0 and rank is not None:
            graph.set_attribute(node, "axis", axis + rank)
            count += 1
    return count
