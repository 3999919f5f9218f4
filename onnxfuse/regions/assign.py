"""Form regions from the operators that the fusions of patterns left over."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.node import Node
from onnxfuse.regions.cluster import Cluster, Clusters
from onnxfuse.regions.epilogue_fusion import Join, find_epilogue_fusion, write_epilogue_fusion
from onnxfuse.regions.formation import form_regions, is_worth_it
from onnxfuse.regions.horizontal_fusion import share_launches
from onnxfuse.regions.joining import Joining
from onnxfuse.regions.norms import with_moved_norm, with_norms
from onnxfuse.regions.write import order_by_reading, write_region
from onnxfuse.rewrite.replace import Fused


@dataclass(frozen=True)
class RegionResult:
    """The result of forming regions.

    `fused` holds the records of new regions, and of existing fused nodes that took in operators.  `reasons` maps the
    label of each node that was not fused to the reason.
    """

    fused: tuple[Fused, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)


def assign_regions(joining: Joining, fused: Collection[Fused] = ()) -> RegionResult:
    """Form regions in a sorted graph; replace each by a fused node, or fuse it into an existing fused node.

    Returns the records of the fused nodes, and the reasons for all other nodes.  `joining` holds the graph, and decides
    whether operators can join a fused node.  `fused` holds the records of existing fused nodes, and of operators that
    become fused nodes if no region takes them.
    """
    graph = joining.graph
    clusters, formed = form_regions(joining.shapes, joining.keep)
    # `joins` maps the name of a fused node's result to the planned join of operators; `apart` has all other clusters.
    joins, apart = dict[str, Join](), list[Cluster]()
    records, work = {one.node: one for one in fused}, deque(formed)
    while work:
        cluster = work.popleft()
        # An earlier join can have fused a match, which replaced nodes of this cluster.
        if not all(node.outputs for node in cluster.nodes):
            continue
        order_by_reading(cluster, clusters.forms)
        join = find_epilogue_fusion(clusters, cluster, joining, joins)
        if join is not None and _is_made(clusters, join, records, joining):
            joins[join.result.name] = join
            if join.apart is not None:
                clusters.split(join.cluster, join.apart)
                work.append(join.apart)
        elif joining.may_be_region(cluster.outputs):
            apart.append(cluster)
    apart, norms = _with_norms(clusters, apart, joining, joins)
    apart = [one for one in share_launches(clusters, apart) if is_worth_it(one) and not joining.is_match(one.nodes)]
    for cluster in apart:
        order_by_reading(cluster, clusters.forms)
    bodies = {f.name: f for f in graph.functions if f.domain == DOMAIN}
    joining.drop_functions({*norms, *(join.result.inputs[0] for join in joins.values())})
    made = [write_epilogue_fusion(clusters, join, joining.functions, bodies, records) for join in joins.values()]
    made += [write_region(clusters, cluster, joining.functions, bodies, records) for cluster in apart]
    copies = [each for each in clusters.copies if each.outputs]  # copies that have not become part of a fused node
    for copy in copies:
        graph.names.add(copy.name)  # so far, the copy has the name of the original node
        copy.name = graph.unique_name(copy.name)
    if made or copies:
        graph.remove_dead()
        graph.sort()
    known = {*records, *(label for one in made for label in (*one.replaces, *one.joined))}
    return RegionResult(tuple(made), {label: why for label, why in clusters.reasons.items() if label not in known})


def _with_norms(
    clusters: Clusters, apart: Collection[Cluster], joining: Joining, joins: dict[str, Join]
) -> tuple[list[Cluster], list[Node]]:
    """Merge clusters with fused norms where one kernel should compute both; return the clusters and the merged norms.

    `apart` holds the clusters that join no fused node.  `joins` maps the name of a fused node's result to the planned
    join of operators.  If a norm is merged, its entry is removed from `joins`, and the operators of this entry become
    part of the merged cluster.
    """
    found, norms = list[Cluster](), list[Node]()
    for cluster in apart:
        both, taken = with_norms(clusters, cluster, joining, joins)
        for norm in taken:
            joins.pop(norm.outputs[0].name, None)
        found.append(both)
        norms += taken
    for i, cluster in enumerate(found):
        found[i], taken = with_moved_norm(clusters, cluster, joining)
        norms += taken
    return found, norms


def _is_made(clusters: Clusters, join: Join, records: dict[str, Fused], joining: Joining) -> bool:
    """Return whether a planned join is possible; if the join has a match, replace it by the fused node first.

    The record of a new fused node is added to `records`.
    """
    (maker,) = join.result.inputs
    record = records.get(maker.name)
    fusion = join.match.fusion.name if join.match else record.fusion if record else ""
    if (fusion, next(iter(join.cluster.outputs))) in joining.exclude:
        return False
    if join.match is None:
        return record is not None
    made = joining.replace(join.match)
    if made is not None:
        clusters.level[join.result.inputs[0]] = clusters.level[maker]
        records[made.node] = made
    return made is not None
