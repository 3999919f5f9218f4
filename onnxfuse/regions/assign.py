"""Form regions of the operators that pattern fusions left over."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.node import Node
from onnxfuse.regions.cluster import Cluster
from onnxfuse.regions.epilogue_fusion import Join, find_epilogue_fusion, write_epilogue_fusion
from onnxfuse.regions.formation import Formed, form_regions, is_worth_it
from onnxfuse.regions.horizontal_fusion import share_launches
from onnxfuse.regions.joining import Joining
from onnxfuse.regions.norms import with_moved_norm, with_norms
from onnxfuse.regions.write import order_by_reading, write_region
from onnxfuse.rewrite.replace import Fused, LocalFunctions, drop_functions


@dataclass(frozen=True)
class RegionResult:
    """The records of regions and of nodes that took in operators; `reasons` maps other nodes' labels to reasons."""

    fused: tuple[Fused, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)


def assign_regions(joining: Joining, fused: Collection[Fused] = ()) -> RegionResult:
    """Replace the regions of a sorted graph by fused nodes, or fuse them into existing fused nodes; return the records.

    `joining` holds the graph, and says which fused nodes take operators.  `fused` holds the records of existing fused
    nodes.
    """
    graph, formed = joining.graph, form_regions(joining.graph, joining.shapes, joining.keep)
    joins, apart = dict[str, tuple[Join, Fused]](), list[Cluster]()  # joins: by the name of the fused node's result
    records, work = {one.node: one for one in fused}, deque((*formed.regions, *formed.others))
    while work:
        cluster = work.popleft()
        if not all(node.outputs for node in cluster.nodes):  # a join that was made since has replaced some of its nodes
            continue
        order_by_reading(cluster, formed.forms)
        join = find_epilogue_fusion(formed, cluster, joining, joins)
        record = _record(formed, join, records, joining) if join is not None else None
        if join is not None and record is not None:
            joins[join.result.name] = join, record
            if join.apart is not None:
                formed.merging.clusters.split(join.cluster, join.apart)
                work.append(join.apart)
        elif joining.may_be_region(cluster.outputs):
            apart.append(cluster)
    apart, norms = _with_norms(formed, apart, joining, joins)
    apart = [one for one in share_launches(formed, apart) if is_worth_it(one)]
    for cluster in apart:
        order_by_reading(cluster, formed.forms)
    bodies = {f.name: f for f in graph.functions if f.domain == DOMAIN}
    if (joins or norms) and not graph.is_subgraph:
        drop_functions(graph, {*norms, *(join.result.inputs[0] for join, _ in joins.values())})
    functions = LocalFunctions(graph)
    made = [write_epilogue_fusion(formed, join, record, functions, bodies) for join, record in joins.values()]
    made += [write_region(formed, cluster, functions, bodies, records) for cluster in apart]
    if made:
        graph.remove_dead()
        graph.sort()
    inside = {label for one in made for label in (*one.replaces, *one.joined)}
    return RegionResult(tuple(made), {label: why for label, why in formed.reasons.items() if label not in inside})


def _with_norms(
    formed: Formed, apart: Collection[Cluster], joining: Joining, joins: dict[str, tuple[Join, Fused]]
) -> tuple[list[Cluster], list[Node]]:
    """Return clusters, each merged with the norms that should be computed with it, and all these norms.

    `apart` holds clusters that join no fused node.  If operators were to join such a norm, they become part of the
    cluster instead, and are removed from `joins`.
    """
    found, norms = list[Cluster](), list[Node]()
    for cluster in apart:
        by_result = {name: join for name, (join, _) in joins.items()}
        both, taken = with_norms(formed, cluster, joining, by_result)
        for norm in taken:
            joins.pop(norm.outputs[0].name, None)
        found.append(both)
        norms += taken
    for i, cluster in enumerate(found):
        found[i], taken = with_moved_norm(formed, cluster, joining)
        norms += taken
    return found, norms


def _record(formed: Formed, join: Join, records: Mapping[str, Fused], joining: Joining) -> Fused | None:
    """Return the record of the fused node that a cluster joins, made now if needed; None if it must not join."""
    (maker,) = join.result.inputs
    record = records.get(maker.name)
    fusion = join.match.fusion.name if join.match else record.fusion if record else ""
    if (fusion, next(iter(join.cluster.outputs))) in joining.exclude:
        return None
    if join.match is None:
        return record
    made = joining.replace(join.match)
    if made is not None:
        formed.merging.level[join.result.inputs[0]] = formed.merging.level[maker]
    return made
