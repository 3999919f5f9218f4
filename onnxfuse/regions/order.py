"""Keep regions free of cycles, by levels of nodes and by the order of the clusters of a level.

A cluster is a group of nodes that will become one region.  All of its nodes have the same level, a number from
`levels`: this avoids cycles through nodes outside of regions.  The clusters of a level have an order, and
`Cluster.place` is the position of a cluster in it.  Each cluster follows the clusters that it reads, also after two
clusters are merged: this avoids cycles through other clusters.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable
from typing import Final, TypeAlias

from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, has_subgraph, producer
from onnxfuse.regions.cluster import Cluster, Clusters

MAX_VISITED: Final = 64  # maximum number of clusters visited in a search between two clusters
Neighbours: TypeAlias = Callable[[Cluster], Iterable[Cluster]]


def levels(graph: Graph, members: Collection[Node]) -> dict[Node, int]:
    """Return the level of each node of a sorted graph; `members` holds the nodes that can be in regions.

    A node's level is at least the level of every node that it depends on.  A nonmember's level is greater than the
    level of each member that it depends on.  So no path between two members of one level passes through a nonmember.
    """
    made_by = {tensor.name: node for node in graph.nodes for tensor in node.outputs}
    found: dict[Node, int] = {}
    for node in graph.nodes:
        before = [p for t in node.inputs if t.name and (p := producer(t)) is not None]
        if has_subgraph(node):
            before += [made_by[name] for name in graph.reads(node) if name in made_by]
        level = max((found[each] for each in before), default=0)
        found[node] = level if node in members else level + 1
    return found


def read_by(clusters: Clusters, own: Cluster) -> Iterable[Cluster]:
    """Yield the clusters of the same level (see `levels`) that a cluster reads; duplicates are possible."""
    at = clusters.level[own.nodes[0]]
    for tensor in own.operands.values():
        maker = producer(tensor)
        found = clusters.of.get(maker) if maker is not None else None
        if found is not None and found is not own and clusters.level[found.nodes[0]] == at:
            yield found


def readers_of(clusters: Clusters, own: Cluster) -> Iterable[Cluster]:
    """Yield the clusters of the same level (see `levels`) that read a cluster; duplicates are possible."""
    at = clusters.level[own.nodes[0]]
    for tensor in own.outputs.values():
        for node in tensor.outputs:
            found = clusters.of.get(node)
            if found is not None and found is not own and clusters.level[node] == at:
                yield found


def place_of_both(clusters: Clusters, a: Cluster, b: Cluster) -> int | None:
    """Return the place that two clusters of a level get when they are merged, and change other places as needed.

    Places order the clusters of a level so that each cluster follows the clusters that it reads.  Returns None, and
    changes nothing, if one of the two depends on the other through a third cluster, because merging would close a
    cycle.  Also returns None if more than MAX_VISITED clusters would have to be visited.
    """
    first, last = (a, b) if a.place < b.place else (b, a)
    before = _between(first, last, last, lambda each: read_by(clusters, each))
    if before is None or any(first in read_by(clusters, each) for each in before):
        return None
    if not before:
        return first.place
    behind = _between(first, last, first, lambda each: readers_of(clusters, each))
    if behind is None:
        return None
    if not behind:
        return last.place
    places = sorted(each.place for each in (first, last, *before, *behind))
    for each, place in zip(before, places, strict=False):
        each.place = place
    for each, place in zip(reversed(behind), reversed(places), strict=False):
        each.place = place
    return places[len(before)]


def merge(clusters: Clusters, a: Cluster, b: Cluster, both: Cluster) -> bool:
    """Replace two clusters of a level by `both`; return False, and change nothing, if that could close a cycle."""
    place = place_of_both(clusters, a, b)
    if place is not None:
        both.place = place
        clusters.split(both)
    return place is not None


def _between(first: Cluster, last: Cluster, start: Cluster, neighbours: Neighbours) -> list[Cluster] | None:
    """Return, in order, the clusters between `first` and `last` that `neighbours` leads to from `start`.

    Returns None if there are more than MAX_VISITED.
    """
    found, work = set[Cluster](), [start]
    while work:
        for each in neighbours(work.pop()):
            if first.place < each.place < last.place and each not in found:
                found.add(each)
                work.append(each)
        if len(found) > MAX_VISITED:
            return None
    return sorted(found, key=lambda each: each.place)


def set_places(clusters: Clusters, of_level: Iterable[Cluster]) -> list[Cluster]:
    """Assign new places to all clusters of a level, and return the clusters in this order.

    Each cluster follows the clusters that it reads.  Otherwise, the order is that of the clusters' first nodes.
    """
    left = {each: len(set(read_by(clusters, each))) for each in of_level}
    # Clusters in the heap are compared by number, not by the position of their first node: copies share a position.
    in_order = sorted(left, key=lambda each: clusters.graph.position[each.nodes[0]])
    number = {each: i for i, each in enumerate(in_order)}
    work = [number[each] for each in in_order if not left[each]]
    found = list[Cluster]()
    while work:
        each = in_order[heapq.heappop(work)]
        each.place = len(found)
        found.append(each)
        for reader in dict.fromkeys(readers_of(clusters, each)):
            left[reader] -= 1
            if not left[reader]:
                heapq.heappush(work, number[reader])
    return found
