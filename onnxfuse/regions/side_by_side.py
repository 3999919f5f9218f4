"""Put small regions that do not depend on each other into one: their blocks then share a launch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from onnxfuse.regions.cluster import LAUNCH_BYTES, Cluster
from onnxfuse.regions.formation import Formed, Merging

MAX_BYTES: Final = LAUNCH_BYTES // 4  # that a small region moves, in a quarter of the time that its launch takes


def side_by_side(formed: Formed, apart: Collection[Cluster]) -> list[Cluster]:
    """Return the clusters with small ones of one level merged, where that makes no cycle.

    `apart` are the clusters that join no other node, which may be of one operator.
    """
    merging = formed.merging
    if merging is None:
        return list(apart)
    small = {id(one): one for one in apart if _is_small(one)}
    found: dict[int, Cluster] = {}
    for cluster in apart:
        if id(cluster) in small:
            _merge(merging, cluster, small)
        own = merging.clusters.of[cluster.nodes[0]]
        found[id(own)] = own
    return list(found.values())


def _is_small(cluster: Cluster) -> bool:
    return not cluster.is_free and cluster.cost - LAUNCH_BYTES <= MAX_BYTES


def _merge(merging: Merging, cluster: Cluster, small: dict[int, Cluster]) -> None:
    """Merge a small cluster with the others of its level, and let what they become be one of the small ones."""
    of, level = merging.clusters.of, merging.level
    first = cluster.nodes[0]

    def neighbours(own: Cluster) -> list[Cluster]:
        beside = [one for one in small.values() if level[one.nodes[0]] == level[first]]
        return [one for one in beside if one is not own and of[one.nodes[0]] is one]

    if of[first] is cluster and merging.with_neighbours(first, neighbours):
        small[id(of[first])] = of[first]
