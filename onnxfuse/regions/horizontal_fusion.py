"""Merge small independent regions, so that they share one launch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from onnxfuse.regions.cluster import LAUNCH_BYTES, MAX_OPERANDS, MAX_OUTPUTS, MAX_STEPS, Cluster, Clusters
from onnxfuse.regions.order import read_by, readers_of, set_places
from onnxfuse.regions.siblings import merge_siblings

MAX_BYTES: Final = LAUNCH_BYTES // 4  # maximum bytes of a small region; moving them takes a quarter of a launch
MAX_OPEN: Final = 8  # how many of the latest groups of a level a cluster is compared with


@dataclass
class Group:
    """Small clusters that do not depend on each other, because they have the same level and the same step.

    In this file, a step is a number: each cluster has a higher step than the clusters of its level that it reads (see
    `_groups`).
    """

    step: int
    clusters: list[Cluster] = field(default_factory=list)
    operands: set[str] = field(default_factory=set)

    def add(self, cluster: Cluster) -> None:
        """Add a cluster to the group."""
        self.clusters.append(cluster)
        self.operands.update(cluster.operands)

    def takes(self, cluster: Cluster) -> bool:
        """Return whether another cluster can join the group.

        The group must stay small enough for one region, and all its reductions must be over the same rows.
        """
        every = [*self.clusters, cluster]
        rows = [one.rows for one in every if one.rows is not None]
        return (
            sum(one.steps for one in every) <= MAX_STEPS
            and sum(len(one.outputs) for one in every) <= MAX_OUTPUTS
            and len(self.operands.union(cluster.operands)) <= MAX_OPERANDS
            and all(each == rows[0] for each in rows)
        )

    def shared_bytes(self, cluster: Cluster, clusters: Clusters) -> int:
        """Return the bytes of the operands that both a cluster and this group read."""
        return clusters.bytes_of(tensor for name, tensor in cluster.operands.items() if name in self.operands)


def share_launches(clusters: Clusters, apart: Collection[Cluster]) -> list[Cluster]:
    """Merge clusters of one level that read the same tensors, or are small and independent.

    `apart` holds the clusters that join no fused node, including those of a single operator.  Returns these clusters
    after merging.  See order.py for levels.
    """
    by_level = defaultdict[int, dict[Cluster, None]](dict)
    for node in clusters.forms:
        by_level[clusters.level[node]][clusters.of[node]] = None
    for of_level in by_level.values():
        set_places(clusters, of_level)
    apart = merge_siblings(clusters, apart)
    small = {one for one in apart if not one.is_free and one.cost - LAUNCH_BYTES <= MAX_BYTES}
    for level in sorted({clusters.level[one.nodes[0]] for one in small}):
        of_level = dict.fromkeys(clusters.of[each.nodes[0]] for each in by_level[level])
        in_order = sorted(of_level, key=lambda each: each.place)
        for group in _groups(clusters, in_order, small):
            clusters.unite(group.clusters)
    return list(dict.fromkeys(clusters.of[one.nodes[0]] for one in apart))


def _groups(clusters: Clusters, in_order: Sequence[Cluster], small: Collection[Cluster]) -> Iterable[Group]:
    """Assign each cluster of a level to a step, a number, and return groups of small clusters that have the same step.

    The step of a cluster is greater than the steps of the clusters that it reads, and less than the steps of the
    clusters that read it.  So clusters of one step never depend on each other.
    """
    latest = _latest_steps(clusters, in_order)
    step, groups = dict[Cluster, int](), list[Group]()
    for cluster in in_order:
        earliest = max((step[each] + 1 for each in read_by(clusters, cluster)), default=0)
        step[cluster] = earliest
        if cluster not in small:
            continue
        at_its_steps = [each for each in groups[-MAX_OPEN:] if earliest <= each.step <= latest[cluster]]
        found = [each for each in at_its_steps if each.takes(cluster)]
        if not found:
            found = [Group(earliest)]
            groups += found
        best = max(found, key=lambda each: each.shared_bytes(cluster, clusters))
        best.add(cluster)
        step[cluster] = best.step
    return groups


def _latest_steps(clusters: Clusters, in_order: Sequence[Cluster]) -> dict[Cluster, int]:
    """Return the highest step (see `_groups`) that each cluster can have, given that its readers have higher steps."""
    found = dict[Cluster, int]()
    for cluster in reversed(in_order):
        behind = (found[each] - 1 for each in readers_of(clusters, cluster))
        found[cluster] = min(behind, default=len(in_order))
    return found
