"""The order of the clusters of a level: each has a place after those that it reads, also when two become one."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias

from onnxfuse.ir.node import Node, producer
from onnxfuse.regions.cluster import Cluster, Clusters

MAX_VISITED: Final = 64  # clusters, in the search for those between two
Neighbours: TypeAlias = Callable[[Cluster], Iterable[Cluster]]


def read_by(clusters: Clusters, level: Mapping[Node, int], own: Cluster) -> Iterable[Cluster]:
    """Yield the clusters of its level that a cluster reads, some of them more than once."""
    at = level[own.nodes[0]]
    for tensor in own.operands.values():
        maker = producer(tensor)
        found = clusters.of.get(maker) if maker is not None else None
        if found is not None and found is not own and level[found.nodes[0]] == at:
            yield found


def readers_of(clusters: Clusters, level: Mapping[Node, int], own: Cluster) -> Iterable[Cluster]:
    """Yield the clusters of its level that read a cluster, some of them more than once."""
    at = level[own.nodes[0]]
    for tensor in own.outputs.values():
        for node in tensor.outputs:
            found = clusters.of.get(node)
            if found is not None and found is not own and level[node] == at:
                yield found


def place_of_both(clusters: Clusters, level: Mapping[Node, int], a: Cluster, b: Cluster) -> int | None:
    """Return the place of what two clusters of one level become, and make room for it.

    Returns None, and moves nothing, where one of them depends on the other through a third cluster: both would make a
    cycle.  So it does where more than MAX_VISITED clusters would have to be looked at.
    """
    first, last = (a, b) if a.place < b.place else (b, a)
    before = _between(first, last, last, lambda each: read_by(clusters, level, each))
    if before is None or any(first in read_by(clusters, level, each) for each in before):
        return None
    if not before:
        return first.place
    behind = _between(first, last, first, lambda each: readers_of(clusters, level, each))
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


def merge(clusters: Clusters, level: Mapping[Node, int], a: Cluster, b: Cluster, both: Cluster) -> bool:
    """Put one cluster in place of two of one level; return False, and do nothing, where that could make a cycle."""
    place = place_of_both(clusters, level, a, b)
    if place is not None:
        both.place = place
        clusters.split(both)
    return place is not None


def _between(first: Cluster, last: Cluster, start: Cluster, neighbours: Neighbours) -> list[Cluster] | None:
    """Return the clusters between the places of two that one of these leads to, in order; None if they are too many."""
    found, work = set[Cluster](), [start]
    while work:
        for each in neighbours(work.pop()):
            if first.place < each.place < last.place and each not in found:
                found.add(each)
                work.append(each)
        if len(found) > MAX_VISITED:
            return None
    return sorted(found, key=lambda each: each.place)


def set_places(clusters: Clusters, level: Mapping[Node, int], of_level: Iterable[Cluster]) -> list[Cluster]:
    """Give all clusters of a level places anew, close to the order of their first nodes; return them in this order."""
    left = {each: len(set(read_by(clusters, level, each))) for each in of_level}
    in_order = sorted(left, key=lambda each: clusters.graph.position[each.nodes[0]])  # copies have a place in common
    number = {each: i for i, each in enumerate(in_order)}
    work = [number[each] for each in in_order if not left[each]]
    found = list[Cluster]()
    while work:
        each = in_order[heapq.heappop(work)]
        each.place = len(found)
        found.append(each)
        for reader in dict.fromkeys(readers_of(clusters, level, each)):
            left[reader] -= 1
            if not left[reader]:
                heapq.heappush(work, number[reader])
    return found
