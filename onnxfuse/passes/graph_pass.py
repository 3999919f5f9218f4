"""A decorator for passes, which checks the opset and leaves the graph sorted and without unread nodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeAlias, TypeVar, get_type_hints

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.graph import Graph
from onnxfuse.passes.folded import Folded

Changes = TypeVar("Changes", int, list[Folded])
Change: TypeAlias = Callable[[Graph, ShapeInfo], Changes]


def graph_pass(opset: int = 1) -> Callable[[Change[Changes]], Change[Changes]]:
    """Make a pass of a function that changes a sorted graph in place and returns its changes.

    In graphs below `opset` the pass changes nothing.  If the function changed the graph, or added nodes and then did
    not use them, unread nodes are removed and the graph is sorted.
    """

    def declare(change: Change[Changes]) -> Change[Changes]:
        returned: type[Changes] = get_type_hints(change)["return"]

        @wraps(change)
        def apply(graph: Graph, shapes: ShapeInfo) -> Changes:
            if graph.opset < opset:
                return returned()  # no changes: 0, or an empty list
            count = len(graph.nodes)
            changes = change(graph, shapes)
            if changes or len(graph.nodes) != count:
                graph.remove_dead()
                graph.sort()
            return changes

        return apply

    return declare
