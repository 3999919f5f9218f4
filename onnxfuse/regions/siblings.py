"""Merge regions that read the same tensor in the same order, by element or by row, so that one kernel reads it once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final

from onnxfuse.algebra.operators import REGROUPING
from onnxfuse.algebra.sizes import Size
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.node import Tensor, producer
from onnxfuse.passes.folded import node_label
from onnxfuse.regions.cluster import NOTHING_BESIDE, Cluster, Clusters
from onnxfuse.regions.order import merge
from onnxfuse.regions.pointwise import POINTWISE
from onnxfuse.regions.rows import is_reduction

MAX_OPEN: Final = 4  # maximum number of earlier readers of a tensor with which a reader is compared


def is_of_fused(tensor: Tensor) -> bool:
    """Return whether a fused node computes a tensor."""
    maker = producer(tensor)
    return maker is not None and maker.domain == DOMAIN


def merge_siblings(
    clusters: Clusters, among: Iterable[Cluster], is_wanted: Callable[[Tensor], bool] = lambda tensor: True
) -> list[Cluster]:
    """Merge clusters that read the same tensor in the order of its elements; return the resulting clusters.

    Only clusters of one level (see order.py) are merged.  Only tensors for which `is_wanted` is true are considered,
    the largest first.  In the order of `Cluster.place`, each cluster must follow the clusters that it reads.
    """
    in_order = sorted(among, key=lambda each: (clusters.level[each.nodes[0]], each.place))
    readers, tensors = defaultdict[str, list[Cluster]](list), dict[str, Tensor]()
    for cluster in in_order:
        for name, tensor in cluster.operands.items():
            readers[name].append(cluster)
            tensors[name] = tensor
    shared = [each for name, each in tensors.items() if len(readers[name]) > 1 and is_wanted(each)]
    for tensor in sorted(shared, key=clusters.bytes, reverse=True):
        _merge_readers(clusters, tensor, readers[tensor.name])
    return list(dict.fromkeys(clusters.of[each.nodes[0]] for each in in_order))


def _merge_readers(clusters: Clusters, tensor: Tensor, readers: Iterable[Cluster]) -> None:
    """Merge clusters that read a tensor in the order of its elements.

    Each cluster is merged with the first possible one of the MAX_OPEN clusters before it.
    """
    found = list[Cluster]()
    for cluster in dict.fromkeys(clusters.of[each.nodes[0]] for each in readers):
        if cluster.is_too_large or not _is_read_in_order(clusters, tensor, cluster):
            continue
        for i, other in enumerate(found):
            why = _merge(clusters, other, cluster)
            if not why:
                found[i] = clusters.of[cluster.nodes[0]]
                break
            because = f"'{node_label(other.nodes[0])}', which reads '{tensor.name}' as well: {why}"
            for label in map(node_label, cluster.nodes):
                if clusters.reasons.get(label, NOTHING_BESIDE) == NOTHING_BESIDE:
                    clusters.reasons[label] = f"it is not merged with {because}"
        else:
            found = [*found[1 - MAX_OPEN :], cluster]


def _merge(clusters: Clusters, a: Cluster, b: Cluster) -> str:
    """Merge two clusters; return "", or why they stay separate."""
    if clusters.level[a.nodes[0]] != clusters.level[b.nodes[0]]:
        return "other nodes are computed between the two"
    both = clusters.merged(a, b)
    if isinstance(both, str):
        return both
    return "" if merge(clusters, a, b, both) else "together they would make a cycle"


def _is_read_in_order(clusters: Clusters, tensor: Tensor, cluster: Cluster) -> bool:
    """Return whether a cluster reads a tensor in the order of the tensor's elements.

    This is the case if the cluster reduces the tensor's rows, or computes an output of the same sizes from the tensor
    by elementwise operators and Reshapes alone.
    """
    dims = _dims(clusters, tensor)
    names = {tensor.name}
    for node in cluster.nodes if dims else ():
        if not any(each.name in names for each in node.inputs):
            continue
        if any(map(is_reduction, clusters.forms[node])):
            return True
        out = node.outputs[0]
        if (node.op in POINTWISE or node.op in REGROUPING) and _dims(clusters, out) == dims:
            if out.name in cluster.outputs:
                return True
            names.add(out.name)
    return False


def _dims(clusters: Clusters, tensor: Tensor) -> tuple[Size, ...]:
    """Return the sizes of a tensor, without those that are 1."""
    return tuple(size for size in clusters.shapes.shape(tensor) or () if size != 1)
