"""Levels of nodes: merging nodes of one level cannot close a cycle through a node that is in no region."""

from __future__ import annotations

from collections.abc import Collection

from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, has_subgraph, producer


def levels(graph: Graph, members: Collection[Node]) -> dict[Node, int]:
    """Return the level of each node of a sorted graph; `members` holds the nodes that may be in regions.

    A node's level is at least the level of every node that it depends on.  A nonmember's level is greater than the
    level of each member that it depends on.  So no path between two members of one level passes through a nonmember.
    """
    made_by = _producers(graph)
    found: dict[Node, int] = {}
    for node in graph.nodes:
        before = [p for t in node.inputs if t.name and (p := producer(t)) is not None]
        if has_subgraph(node):
            before += [made_by[name] for name in graph.reads(node) if name in made_by]
        level = max((found[each] for each in before), default=0)
        found[node] = level if node in members else level + 1
    return found


def _producers(graph: Graph) -> dict[str, Node]:
    return {t.name: node for node in graph.nodes for t in node.outputs}
