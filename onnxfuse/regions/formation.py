"""Form regions: merge the nodes that patterns left over, level by level, where that saves bytes or launches.

Each node has a level, a number from `order.levels`.  Only nodes of one level are merged, because this avoids cycles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from functools import partial

from onnxfuse.algebra.operators import FREE
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.node import Node, Tensor, consumers, is_constant, op_of, producer
from onnxfuse.ir.quantizers import QUANTIZERS
from onnxfuse.passes.folded import node_label
from onnxfuse.region_operators import SIXTEEN_BITS
from onnxfuse.regions.borders import settle_borders
from onnxfuse.regions.cluster import NOTHING_BESIDE, Cluster, Clusters
from onnxfuse.regions.dequantizers import dequantize_at_readers
from onnxfuse.regions.host import host_nodes
from onnxfuse.regions.normal_form import MIN_OPSET, normal_form
from onnxfuse.regions.order import levels, merge, readers_of
from onnxfuse.regions.rows import DYNAMIC
from onnxfuse.regions.siblings import is_of_fused, merge_siblings
from onnxfuse.regions.steps import Step


def form_regions(shapes: ShapeInfo, keep: Set[str] = frozenset()) -> tuple[Clusters, list[Cluster]]:
    """Return all clusters of a sorted graph: those that can be regions, then those that can only join a fused node.

    Both groups are in execution order of their first nodes.  The `Clusters` object in the result can merge them
    further.  `keep` holds the labels of nodes that must not be in a region.
    """
    graph = shapes.graph
    if graph.opset < MIN_OPSET:
        return Clusters(graph, shapes, {}, {}, {}), []
    host = host_nodes(shapes)
    reasons, forms = dict[str, str](), dict[Node, tuple[Step, ...]]()
    for node in graph.nodes:
        if node.domain and node.domain != "ai.onnx":
            continue
        found = "it is shape arithmetic, which runs on the host" if node in host else normal_form(shapes, node)
        if node_label(node) in keep:
            found = "it belongs to a match that is switched off"
        if isinstance(found, str):
            reasons[node_label(node)] = found
        else:
            forms[node] = found
    clusters = Clusters(graph, shapes, forms, levels(graph, forms), reasons)
    dequantize_at_readers(clusters)
    _merge_all(clusters)
    settle_borders(clusters)
    merge_siblings(clusters, dict.fromkeys(clusters.of.values()), is_of_fused)
    in_order = sorted(forms, key=graph.position.__getitem__)
    distinct = list(dict.fromkeys(clusters.of[node] for node in in_order))
    inside = {node for one in distinct if is_worth_it(one) for node in one.nodes}
    for node in forms:
        if node not in inside:
            reasons.setdefault(node_label(node), NOTHING_BESIDE)
    outside = {node_label(node) for node in graph.nodes if node not in inside}
    clusters.reasons = {label: why for label, why in reasons.items() if label in outside}
    return clusters, sorted(distinct, key=is_worth_it, reverse=True)


def is_worth_it(cluster: Cluster) -> bool:
    """Return whether a cluster has two operators that take time, or one for which onnxruntime has no CUDA kernel."""
    operators = [op_of(node) for node in cluster.nodes if op_of(node) not in FREE]
    return len(operators) > 1 or DYNAMIC in operators or any(map(_has_sixteen_bits, cluster.nodes))


def _has_sixteen_bits(node: Node) -> bool:
    """Return whether a node is a quantizer of 16 bits, by the dtype of its constant zero point."""
    zero = node.inputs[2:3]
    return op_of(node) in QUANTIZERS and bool(zero) and is_constant(zero[0]) and str(zero[0].dtype) in SIXTEEN_BITS


def _merge_all(clusters: Clusters) -> None:
    """Merge the nodes in execution order, and then the resulting clusters with later clusters that read them.

    Views of a tensor with several readers are tried again, because a merge may save writing the tensor after its other
    readers have joined its cluster.  Before a cluster is merged with its readers, it moves to the highest level (see
    order.py) that it can have.  If it can be merged with no reader there, it moves back.
    """
    nodes = clusters.graph.nodes
    for node in nodes:
        if node in clusters.forms:
            clusters.add(node)
            _merge_with(clusters, node, partial(_read_by, clusters, node))
    for node in reversed(nodes):
        if node.op in FREE and node in clusters.of and _joins_two(clusters, node.inputs[0]):
            _merge_with(clusters, node, partial(_read_by, clusters, node))
        cluster = clusters.of.get(node)
        if cluster is None or cluster.nodes[-1] is not node:
            continue
        early, latest, place = clusters.level[node], _latest_level(clusters, cluster), cluster.place
        if latest > early:
            clusters.move(cluster, latest)
            if not _merge_with(clusters, node, partial(readers_of, clusters)):
                clusters.move(cluster, early, place)


def _joins_two(clusters: Clusters, tensor: Tensor) -> bool:
    """Return whether the producer and the readers of a tensor, which are several, are two clusters."""
    inside = {*map(clusters.of.get, (*tensor.inputs, *tensor.outputs))}
    return len(tensor.outputs) > 1 and len(inside) == 2 and None not in inside


def _read_by(clusters: Clusters, node: Node, own: Cluster) -> list[Cluster]:
    """Return the clusters that a node of the cluster `own` reads; duplicates are possible."""
    makers = [producer(tensor) for tensor in node.inputs]
    return [clusters.of[maker] for maker in makers if maker is not None and maker in clusters.of]


def _latest_level(clusters: Clusters, cluster: Cluster) -> int:
    """Return the highest level that a cluster can have, given the levels of the nodes that read its outputs.

    Returns the present level if no node reads the outputs, or if an output must keep its name.  A level is a number
    that never decreases from a producer to a consumer.
    """
    readers = [node for tensor in cluster.outputs.values() for node in consumers(tensor)]
    if not readers or any(clusters.graph.is_fixed(name) for name in cluster.outputs):
        return clusters.level[cluster.nodes[0]]
    return min(clusters.level[node] - (node not in clusters.of) for node in readers)


def _merge_with(clusters: Clusters, node: Node, neighbours: Callable[[Cluster], Iterable[Cluster]]) -> bool:
    """Merge a node's cluster with neighbours of the same level, the largest gain first; return whether it changed."""
    own, tried, is_merged = clusters.of[node], set[Cluster](), False
    while others := [one for one in dict.fromkeys(neighbours(own)) if one is not own and one not in tried]:
        tried.update(others)
        begun = own
        for other, both in _by_gain(clusters, node, own, others):
            again = both if own is begun else _both(clusters, node, own, other)
            if again is None:
                continue
            if merge(clusters, own, other, again):
                own, is_merged = again, True
            else:
                clusters.reasons[node_label(node)] = f"with '{node_label(other.nodes[0])}' it would make a cycle"
    return is_merged


def _by_gain(clusters: Clusters, node: Node, own: Cluster, others: Iterable[Cluster]) -> list[tuple[Cluster, Cluster]]:
    """Return (cluster, merged cluster) for each cluster that can be merged with `own`, largest gain first."""
    same = [one for one in others if clusters.level[one.nodes[0]] == clusters.level[own.nodes[0]]]
    found = [(other, both) for other in same if (both := _both(clusters, node, own, other)) is not None]
    return sorted(found, key=lambda each: each[1].cost - each[0].cost)


def _both(clusters: Clusters, node: Node, own: Cluster, other: Cluster) -> Cluster | None:
    """Return two clusters merged into one; None, with the reason stored, if that is impossible or does not pay."""
    both = clusters.merged(other, own)
    if isinstance(both, Cluster):
        return both
    clusters.reasons[node_label(node)] = f"it is not merged with '{node_label(other.nodes[0])}': {both}"
    return None
