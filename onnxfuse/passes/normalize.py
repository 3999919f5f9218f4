"""Give equivalent graphs one form: remove no-ops, compose views, and compute repeated nodes once."""

from __future__ import annotations

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import int_attribute
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import op_of
from onnxfuse.passes.compose_views import compose_views
from onnxfuse.passes.eliminate_common_subexpressions import eliminate_common_subexpressions
from onnxfuse.passes.remove_no_ops import remove_no_ops

MAX_NORMALIZE_ROUNDS = 10
FIRST_FLATTEN_FROM_END = 11  # the first opset in which the axis of Flatten can be negative


def normalize(graph: Graph, shapes: ShapeInfo) -> int:
    """Remove no-ops, compose views and merge equal nodes until nothing changes; return the number of changes."""
    total = _write_usual_attributes(graph, shapes)
    for _ in range(MAX_NORMALIZE_ROUNDS):
        changes = remove_no_ops(graph, shapes) + compose_views(graph, shapes)
        changes += eliminate_common_subexpressions(graph, shapes)
        total += changes
        if not changes:
            break
    return total


def _write_usual_attributes(graph: Graph, shapes: ShapeInfo) -> int:
    """Rewrite attributes that only onnxruntime's kernels accept to valid equivalents; return the number of changes.

    Kernels count a negative axis of Flatten from the end in all opsets, but below opset 11 onnxruntime's shape
    inference refuses it once the rank is known, and other passes can make the rank known.  Kernels read a `keepdims`
    other than 0 and 1 as 0, but onnxruntime's transpose optimizer, which moves the Transposes that a channels-last
    layout adds, reads such a `keepdims` as 1.
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
