"""Put small regions that do not depend on each other into one: their blocks then share a launch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from onnxfuse.regions.cluster import LAUNCH_BYTES, MAX_OPERANDS, MAX_OUTPUTS, MAX_STEPS, Cluster, Clusters
from onnxfuse.regions.formation import Formed, Merging
from onnxfuse.regions.order import read_by, readers_of, set_places
from onnxfuse.regions.siblings import merge_siblings

MAX_BYTES: Final = LAUNCH_BYTES // 4  # bytes of a small region, which move in a quarter of its launch's time
MAX_OPEN: Final = 8  # groups of a level that are compared with the next cluster


@dataclass
class Group:
    """Small clusters of one level and one step, which do not depend on each other."""

    step: int
    clusters: list[Cluster] = field(default_factory=list)
    operands: set[str] = field(default_factory=set)

    def add(self, cluster: Cluster) -> None:
        """Add a cluster."""
        self.clusters.append(cluster)
        self.operands.update(cluster.operands)

    def takes(self, cluster: Cluster) -> bool:
        """Return whether the clusters and another one are small enough for one region, and reduce the same rows."""
        every = [*self.clusters, cluster]
        rows = [one.rows for one in every if one.rows is not None]
        return (
            sum(one.steps for one in every) <= MAX_STEPS
            and sum(len(one.outputs) for one in every) <= MAX_OUTPUTS
            and len(self.operands.union(cluster.operands)) <= MAX_OPERANDS
            and all(each == rows[0] for each in rows)
        )

    def shared_bytes(self, cluster: Cluster, clusters: Clusters) -> int:
        """Return the bytes of the operands that another cluster reads as well."""
        return clusters.bytes_of(tensor for name, tensor in cluster.operands.items() if name in self.operands)


def share_launches(formed: Formed, apart: Collection[Cluster]) -> list[Cluster]:
    """Return the clusters with those of one level merged that read the same, or are small and independent.

    `apart` are the clusters that join no other node, which may be of one operator.
    """
    merging, clusters = formed.merging, formed.merging.clusters
    by_level = defaultdict[int, dict[Cluster, None]](dict)
    for node in formed.forms:
        by_level[merging.level[node]][clusters.of[node]] = None
    for of_level in by_level.values():
        set_places(clusters, merging.level, of_level)
    apart = merge_siblings(clusters, merging.level, formed.reasons, apart)
    small = {one for one in apart if not one.is_free and one.cost - LAUNCH_BYTES <= MAX_BYTES}
    for level in sorted({merging.level[one.nodes[0]] for one in small}):
        of_level = dict.fromkeys(clusters.of[each.nodes[0]] for each in by_level[level])
        in_order = sorted(of_level, key=lambda each: each.place)
        for group in _groups(merging, in_order, small):
            clusters.unite(group.clusters)
    return list(dict.fromkeys(clusters.of[one.nodes[0]] for one in apart))


def _groups(merging: Merging, in_order: Sequence[Cluster], small: Collection[Cluster]) -> Iterable[Group]:
    """Yield the groups of the small ones among all clusters of a level.

    Each cluster gets a step after those of what it reads, and before the last one that leaves steps for what reads it.
    So clusters of one step do not depend on each other, whichever of them are grouped.
    """
    latest = _latest_steps(merging, in_order)
    step, groups = dict[Cluster, int](), list[Group]()
    for cluster in in_order:
        earliest = max((step[each] + 1 for each in read_by(merging.clusters, merging.level, cluster)), default=0)
        step[cluster] = earliest
        if cluster not in small:
            continue
        at_its_steps = [each for each in groups[-MAX_OPEN:] if earliest <= each.step <= latest[cluster]]
        found = [each for each in at_its_steps if each.takes(cluster)]
        if not found:
            found = [Group(earliest)]
            groups += found
        best = max(found, key=lambda each: each.shared_bytes(cluster, merging.clusters))
        best.add(cluster)
        step[cluster] = best.step
    return groups


def _latest_steps(merging: Merging, in_order: Sequence[Cluster]) -> dict[Cluster, int]:
    """Return the last step that each cluster can have, if there are as many steps as clusters."""
    found = dict[Cluster, int]()
    for cluster in reversed(in_order):
        behind = (found[each] - 1 for each in readers_of(merging.clusters, merging.level, cluster))
        found[cluster] = min(behind, default=len(in_order))
    return found
