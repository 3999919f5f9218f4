"""Give what means the same one form: no-ops are removed, views are composed, repeated nodes are computed once."""

from __future__ import annotations

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.graph import Graph
from onnxfuse.passes.compose_views import compose_views
from onnxfuse.passes.eliminate_common_subexpressions import eliminate_common_subexpressions
from onnxfuse.passes.remove_no_ops import remove_no_ops

MAX_NORMALIZE_ROUNDS = 10


def normalize(graph: Graph, shapes: ShapeInfo) -> int:
    """Apply the three passes until none of them changes anything; return the number of changes."""
    total = 0
    for _ in range(MAX_NORMALIZE_ROUNDS):
        changes = remove_no_ops(graph, shapes) + compose_views(graph, shapes)
        changes += eliminate_common_subexpressions(graph, shapes)
        total += changes
        if not changes:
            break
    return total
