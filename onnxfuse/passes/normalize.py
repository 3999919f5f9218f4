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
    total = _write_usual_attributes(graph, shapes)
    for _ in range(MAX_NORMALIZE_ROUNDS):
        changes = remove_no_ops(graph, shapes) + compose_views(graph, shapes)
        changes += eliminate_common_subexpressions(graph, shapes)
        total += changes
        if not changes:
            break
    return total


def _write_usual_attributes(graph: Graph, shapes: ShapeInfo) -> int:
    """Write attributes that only onnxruntime's kernels read as they are read there; return the number of changes.

    A negative axis of Flatten is counted from the end in all opsets, but below 11 onnxruntime's inference refuses it
    once the rank is known, which other passes may make it.  A `keepdims` that is neither 0 nor 1 is 0, but 1 to
    onnxruntime's transpose optimizer, which comes upon the Transposes of layouts.
    """
    changes = 0
    for node in graph.nodes:
        axis = int_attribute(node, "axis", 1) if op_of(node) == "Flatten" else 1
        rank = shapes.rank(node.inputs[0]) if axis < 0 and graph.opset < FIRST_FLATTEN_FROM_END else None
        if rank is not None:
            graph.set_attribute(node, "axis", axis + rank)
            changes += 1
        if node.attrs.get("keepdims", 1) not in (0, 1):
            graph.set_attribute(node, "keepdims", 0)
            changes += 1
    return changes
