"""Form regions of the operators that pattern fusions left over."""

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
from onnxfuse.rewrite.replace import Fused, LocalFunctions, drop_functions


@dataclass(frozen=True)
class RegionResult:
    """The result of forming regions.

    `fused` holds the records of new regions, and of existing fused nodes into which operators were fused.  `reasons`
    maps the label of each other node to the reason why the node is in no region.
    """

    fused: tuple[Fused, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)


def assign_regions(joining: Joining, fused: Collection[Fused] = ()) -> RegionResult:
    """Replace the regions of a sorted graph by fused nodes, or fuse them into existing fused nodes; return the records.

    `joining` holds the graph, and decides whether operators can join a fused node.  `fused` holds the records of
    existing fused nodes, and of operators that become fused nodes if no region takes them.
    """
    graph = joining.graph
    clusters, formed = form_regions(joining.shapes, joining.keep)
    # `joins` maps the name of a fused node's result to a planned join; `apart` has clusters that join no fused node.
    joins, apart = dict[str, Join](), list[Cluster]()
    records, work = {one.node: one for one in fused}, deque(formed)
    while work:
        cluster = work.popleft()
        # A match that an operator joined before has been fused, and may have replaced nodes of this cluster.
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
    if (joins or norms) and not graph.is_subgraph:
        drop_functions(graph, {*norms, *(join.result.inputs[0] for join in joins.values())})
    functions = LocalFunctions(graph)
    made = [write_epilogue_fusion(clusters, join, functions, bodies, records) for join in joins.values()]
    made += [write_region(clusters, cluster, functions, bodies, records) for cluster in apart]
    copies = [each for each in clusters.copies if each.outputs]  # the copies that are not part of a region now
    for copy in copies:
        graph.names.add(copy.name)  # until now, the copy has the name of the original node
        copy.name = graph.unique_name(copy.name)
    if made or copies:
        graph.remove_dead()
        graph.sort()
    known = {*records, *(label for one in made for label in (*one.replaces, *one.joined))}
    return RegionResult(tuple(made), {label: why for label, why in clusters.reasons.items() if label not in known})


def _with_norms(
    clusters: Clusters, apart: Collection[Cluster], joining: Joining, joins: dict[str, Join]
) -> tuple[list[Cluster], list[Node]]:
    """Merge each cluster with the fused norms that should be computed with it; return the clusters and all these norms.

    `apart` holds the clusters that are not fused into a fused node.  `joins` holds the clusters that are to be fused
    into one, by the name of the node's result.  If this node is a merged norm, its entry is removed from `joins`, and
    the operators of the entry become part of the merged cluster.
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
    """Return whether the cluster of a planned join can join its fused node; write this node if it does not exist yet.

    In that case, the join has the match that the fused node replaces, and the node's record is added to `records`.
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
