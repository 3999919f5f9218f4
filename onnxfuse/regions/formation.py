"""Form regions: merge the nodes that the patterns leave, level by level, where that saves bytes or launches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.analysis.tensor_bytes import FREE_OPS
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, consumers, op_of, producer
from onnxfuse.passes.folded import node_label
from onnxfuse.regions.cluster import Cluster, Clusters
from onnxfuse.regions.host import host_nodes
from onnxfuse.regions.levels import levels
from onnxfuse.regions.normal_form import MIN_OPSET, normal_form
from onnxfuse.regions.steps import Step

MAX_VISITED = 256  # clusters, in the search for a cycle


@dataclass(frozen=True)
class Formed:
    """The regions of a graph, and why nodes are in none; `others` are too small for a region, but may join a node."""

    regions: tuple[Cluster, ...] = ()
    others: tuple[Cluster, ...] = ()
    forms: dict[Node, tuple[Step, ...]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)  # by the label of a node


@dataclass
class Merging:
    """Merges clusters of one level."""

    graph: Graph
    clusters: Clusters
    level: dict[Node, int]
    reasons: dict[str, str]  # why nodes stay apart, by their labels

    def with_neighbours(self, node: Node, neighbours: Callable[[Cluster], Sequence[Cluster]]) -> bool:
        """Merge the cluster of a node with neighbours of its level, the largest gain first; return whether one was."""
        own, tried, merged = self.clusters.of[node], set[int](), False
        while True:
            tried.add(id(own))
            found = [gain for other in neighbours(own) if (gain := self._gain(own, other, node, tried)) is not None]
            if not found:
                return merged
            _, other, both = max(found, key=lambda one: one[0])
            tried.add(id(other))
            if not _is_acyclic(self.clusters, (other, own), self.level):
                self.reasons[node_label(node)] = f"with '{node_label(other.nodes[0])}' it would make a cycle"
                continue
            for each in both.nodes:
                self.clusters.of[each] = both
            own, merged = both, True

    def _gain(self, own: Cluster, other: Cluster, node: Node, tried: set[int]) -> tuple[float, Cluster, Cluster] | None:
        """Return what merging two clusters saves, the other one and both; None where it cannot be or does not pay."""
        if id(other) in tried or self.level[other.nodes[0]] != self.level[own.nodes[0]]:
            return None
        both = self.clusters.merged(other, own)
        if isinstance(both, str):
            tried.add(id(other))
            self.reasons[node_label(node)] = f"it is not merged with '{node_label(other.nodes[0])}': {both}"
            return None
        return other.cost + own.cost - both.cost, other, both

    def latest(self, cluster: Cluster) -> int:
        """Return the latest level at which a cluster can be computed; its own where that is not known."""
        readers = [node for tensor in cluster.outputs.values() for node in consumers(tensor)]
        if not readers or any(self.graph.is_fixed(name) for name in cluster.outputs):
            return self.level[cluster.nodes[0]]
        return min(self.level[node] - (node not in self.clusters.of) for node in readers)

    def move(self, cluster: Cluster, level: int) -> None:
        """Let the nodes of a cluster be of another level."""
        for node in cluster.nodes:
            self.level[node] = level


def form_regions(graph: Graph, shapes: ShapeInfo, keep: Set[str] = frozenset()) -> Formed:
    """Return the regions of a sorted graph, in execution order of their first nodes.

    `keep` holds the labels of nodes that are in none.
    """
    if graph.opset < MIN_OPSET:
        return Formed()
    host = host_nodes(graph, shapes)
    reasons, forms = dict[str, str](), dict[Node, tuple[Step, ...]]()
    for node in graph.nodes:
        if node.domain and node.domain != "ai.onnx":
            continue
        found = "it is shape arithmetic, which runs on the host" if node in host else normal_form(graph, shapes, node)
        if node_label(node) in keep:
            found = "it belongs to a match that is switched off"
        if isinstance(found, str):
            reasons[node_label(node)] = found
        else:
            forms[node] = found
    clusters = Clusters(graph, shapes, forms)
    _merge_all(Merging(graph, clusters, levels(graph, forms), reasons))
    distinct = {id(one): one for one in (clusters.of[node] for node in forms)}
    regions = [one for one in distinct.values() if is_worth_it(one)]
    inside = {node for one in regions for node in one.nodes}
    for node in forms:
        if node not in inside:
            reasons.setdefault(node_label(node), "nothing beside it can be merged with it")
    outside = {node_label(node) for node in graph.nodes if node not in inside}
    others = tuple(one for one in distinct.values() if not is_worth_it(one))
    return Formed(tuple(regions), others, forms, {label: why for label, why in reasons.items() if label in outside})


def is_worth_it(cluster: Cluster) -> bool:
    """Return whether a cluster has two operators that take time at run time."""
    return sum(op_of(node) not in FREE_OPS for node in cluster.nodes) > 1


def _merge_all(merging: Merging) -> None:
    """Merge the nodes in execution order, and then clusters with later ones that read them."""
    clusters = merging.clusters
    for node in merging.graph.nodes:
        if node in clusters.forms:
            clusters.add(node)
            merging.with_neighbours(node, lambda own, node=node: _read_by(clusters, own, [node]))  # type: ignore[misc]
    for node in reversed(merging.graph.nodes):
        cluster = clusters.of.get(node)
        if cluster is None or cluster.nodes[-1] is not node:
            continue
        early, latest = merging.level[node], merging.latest(cluster)
        if latest > early:
            merging.move(cluster, latest)
            if not merging.with_neighbours(node, partial(_readers_of, clusters)):
                merging.move(cluster, early)


def _read_by(clusters: Clusters, own: Cluster, nodes: Sequence[Node]) -> list[Cluster]:
    """Return the clusters that nodes read, besides their own."""
    makers = [producer(tensor) for node in nodes for tensor in node.inputs]
    found = {id(one): one for maker in makers if maker is not None and (one := clusters.of.get(maker)) is not None}
    return [one for one in found.values() if one is not own]


def _readers_of(clusters: Clusters, own: Cluster) -> list[Cluster]:
    """Return the clusters that read what a cluster computes."""
    readers = [node for tensor in own.outputs.values() for node in consumers(tensor)]
    found = {id(one): one for node in readers if (one := clusters.of.get(node)) is not None}
    return [one for one in found.values() if one is not own]


def _is_acyclic(clusters: Clusters, merged: Collection[Cluster], level: Mapping[Node, int]) -> bool:
    """Return whether clusters of one level, which are merged, depend on themselves through no other cluster."""
    at, ends = next(level[one.nodes[0]] for one in merged), {id(one) for one in merged}
    work, seen = list(merged), set(ends)
    while work:
        cluster = work.pop()
        for tensor in cluster.operands.values():
            maker = producer(tensor)
            if maker is None or maker not in clusters.of or level[maker] != at:
                continue
            before = clusters.of[maker]
            if id(before) in ends:
                if id(cluster) not in ends:
                    return False
            elif id(before) not in seen:
                seen.add(id(before))
                work.append(before)
                if len(seen) > MAX_VISITED:
                    return False
    return True
