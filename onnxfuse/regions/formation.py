"""Form regions: merge the nodes that patterns left over, level by level, where that saves bytes or launches.

A level, a number that `levels.py` gives to each node, keeps merged nodes from closing a cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from functools import partial

from onnxfuse.algebra.operators import FREE
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, consumers, op_of, producer
from onnxfuse.passes.folded import node_label
from onnxfuse.regions.borders import settle_borders
from onnxfuse.regions.cluster import NOTHING_BESIDE, Cluster, Clusters
from onnxfuse.regions.host import host_nodes
from onnxfuse.regions.levels import levels
from onnxfuse.regions.normal_form import MIN_OPSET, normal_form
from onnxfuse.regions.order import merge
from onnxfuse.regions.siblings import is_of_fused, merge_siblings
from onnxfuse.regions.steps import Step


@dataclass(frozen=True)
class Formed:
    """The regions of a graph; `others` are clusters too small for a region, which may still join a fused node."""

    merging: Merging  # the object that merged the clusters, for further merging
    regions: tuple[Cluster, ...] = ()
    others: tuple[Cluster, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)  # node label -> why the node is in no region

    @property
    def forms(self) -> dict[Node, tuple[Step, ...]]:
        """The steps of each node that may be in a region."""
        return self.merging.clusters.forms


@dataclass
class Merging:
    """Merges clusters of the same level: `level` holds the level of each node, as `levels` returns it."""

    graph: Graph
    clusters: Clusters
    level: dict[Node, int]
    reasons: dict[str, str]  # node label -> why the node stays separate
    _front: int = 0  # the lowest place so far: `move` decreases it to place a cluster before all other clusters

    def with_neighbours(self, node: Node, neighbours: Callable[[Cluster], Iterable[Cluster]]) -> bool:
        """Merge a node's cluster with neighbours of its level, largest gain first; return whether any was merged."""
        own, tried, is_merged = self.clusters.of[node], set[Cluster](), False
        while others := [one for one in dict.fromkeys(neighbours(own)) if one is not own and one not in tried]:
            tried.update(others)
            begun = own
            for other, both in self._by_gain(node, own, others):
                again = both if own is begun else self._both(node, own, other)
                if again is None:
                    continue
                if merge(self.clusters, self.level, own, other, again):
                    own, is_merged = again, True
                else:
                    self.reasons[node_label(node)] = f"with '{node_label(other.nodes[0])}' it would make a cycle"
        return is_merged

    def _by_gain(self, node: Node, own: Cluster, others: Iterable[Cluster]) -> list[tuple[Cluster, Cluster]]:
        """Return (cluster, merged cluster) for each cluster that can be merged with `own`, largest gain first."""
        same = [one for one in others if self.level[one.nodes[0]] == self.level[own.nodes[0]]]
        found = [(other, both) for other in same if (both := self._both(node, own, other)) is not None]
        return sorted(found, key=lambda each: each[1].cost - each[0].cost)

    def _both(self, node: Node, own: Cluster, other: Cluster) -> Cluster | None:
        """Return two clusters merged into one; None, with the reason stored, if that is impossible or does not pay."""
        both = self.clusters.merged(other, own)
        if isinstance(both, Cluster):
            return both
        self.reasons[node_label(node)] = f"it is not merged with '{node_label(other.nodes[0])}': {both}"
        return None

    def latest(self, cluster: Cluster) -> int:
        """Return the latest level at which a cluster can be computed; its present level if some reader is unknown."""
        readers = [node for tensor in cluster.outputs.values() for node in consumers(tensor)]
        if not readers or any(self.graph.is_fixed(name) for name in cluster.outputs):
            return self.level[cluster.nodes[0]]
        return min(self.level[node] - (node not in self.clusters.of) for node in readers)

    def move(self, cluster: Cluster, level: int, place: int | None = None) -> None:
        """Move a cluster's nodes to another level, at `place` if given, else before all other clusters there."""
        for node in cluster.nodes:
            self.level[node] = level
        self._front -= 1
        cluster.place = self._front if place is None else place


def form_regions(graph: Graph, shapes: ShapeInfo, keep: Set[str] = frozenset()) -> Formed:
    """Return the regions of a sorted graph, in execution order of their first nodes.

    `keep` holds the labels of nodes that must be in no region.
    """
    if graph.opset < MIN_OPSET:
        return Formed(Merging(graph, Clusters(graph, shapes, {}), {}, {}))
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
    merging = Merging(graph, clusters, levels(graph, forms), reasons)
    _merge_all(merging)
    settle_borders(clusters, merging.level, reasons)
    merge_siblings(clusters, merging.level, reasons, dict.fromkeys(clusters.of.values()), is_of_fused)
    in_order = sorted(forms, key=graph.position.__getitem__)
    distinct = list(dict.fromkeys(clusters.of[node] for node in in_order))
    regions = [one for one in distinct if is_worth_it(one)]
    inside = {node for one in regions for node in one.nodes}
    for node in forms:
        if node not in inside:
            reasons.setdefault(node_label(node), NOTHING_BESIDE)
    outside = {node_label(node) for node in graph.nodes if node not in inside}
    others = tuple(one for one in distinct if not is_worth_it(one))
    left = {label: why for label, why in reasons.items() if label in outside}
    return Formed(merging, tuple(regions), others, left)


def is_worth_it(cluster: Cluster) -> bool:
    """Return whether a cluster has at least two operators that take time at run time."""
    return sum(op_of(node) not in FREE for node in cluster.nodes) > 1


def _merge_all(merging: Merging) -> None:
    """Merge the nodes in execution order, and then the resulting clusters with later clusters that read them.

    Before a cluster is merged with its readers, it moves to the latest level at which it can be computed, and back to
    its own level if no reader can be merged with it.
    """
    clusters = merging.clusters
    for node in merging.graph.nodes:
        if node in clusters.forms:
            clusters.add(node)
            merging.with_neighbours(node, lambda own, node=node: _read_by(clusters, node))  # type: ignore[misc]
    for node in reversed(merging.graph.nodes):
        cluster = clusters.of.get(node)
        if cluster is None or cluster.nodes[-1] is not node:
            continue
        early, latest, place = merging.level[node], merging.latest(cluster), cluster.place
        if latest > early:
            merging.move(cluster, latest)
            if not merging.with_neighbours(node, partial(_readers_of, clusters)):
                merging.move(cluster, early, place)


def _read_by(clusters: Clusters, node: Node) -> list[Cluster]:
    """Return the clusters that a node reads; duplicates are possible."""
    makers = [producer(tensor) for tensor in node.inputs]
    return [clusters.of[maker] for maker in makers if maker is not None and maker in clusters.of]


def _readers_of(clusters: Clusters, own: Cluster) -> list[Cluster]:
    """Return the clusters that read results of a cluster; duplicates are possible."""
    readers = [node for tensor in own.outputs.values() for node in tensor.outputs]
    return [clusters.of[node] for node in readers if node in clusters.of]
