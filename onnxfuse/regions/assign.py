"""Make regions of what the patterns leave of a graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field
from types import MappingProxyType

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.graph import Graph
from onnxfuse.regions.cluster import Cluster
from onnxfuse.regions.formation import form_regions, is_worth_it
from onnxfuse.regions.join import Join, find_join, write_joined
from onnxfuse.regions.side_by_side import side_by_side
from onnxfuse.regions.write import order_by_reading, write_region
from onnxfuse.rewrite.replace import REGION, Fused, LocalFunctions, drop_functions


@dataclass(frozen=True)
class RegionResult:
    """The records of regions, and of fused nodes that others joined; and why nodes are in none, by their labels."""

    fused: tuple[Fused, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)


def assign_regions(
    graph: Graph,
    shapes: ShapeInfo,
    exclude: Collection[tuple[str, str]] = frozenset(),
    joining: Mapping[str, bool | str] = MappingProxyType({}),
    fused: Collection[Fused] = (),
    keep: Set[str] = frozenset(),
) -> RegionResult:
    """Replace the regions of a sorted graph by fused nodes, or join them with fused nodes.

    `exclude` holds regions that stay as they are, each by REGION and the name of its first output, and those that join
    no other node, by that node's fusion.  `joining` are the fusions whose nodes elementwise operators join, with their
    declaration's `epilogue`, and `fused` the records of the fused nodes that the graph has.  `keep` holds the labels of
    nodes that are in no region.
    """
    formed = form_regions(graph, shapes, keep)
    joins, apart = dict[str, Join](), list[Cluster]()  # the former by the fused nodes that they join
    records, work = {one.node: one for one in fused}, deque((*formed.regions, *formed.others))
    while work:
        cluster = work.popleft()
        order_by_reading(cluster, formed.forms)
        join = find_join(formed, cluster, joining)
        record = records.get(join.result.inputs[0].name) if join is not None else None
        is_free = record is not None and record.node not in joins
        if join is not None and record and is_free and (record.fusion, _first(join.cluster)) not in exclude:
            joins[record.node] = join
            if join.apart is not None and formed.merging is not None:
                formed.merging.clusters.split(join.cluster, join.apart)
                work.append(join.apart)
        elif (REGION, _first(cluster)) not in exclude:
            apart.append(cluster)
    apart = [one for one in side_by_side(formed, apart) if is_worth_it(one)]
    for cluster in apart:
        order_by_reading(cluster, formed.forms)
    bodies = {f.name: f for f in graph.functions if f.domain == DOMAIN}
    if joins and not graph.is_subgraph:
        drop_functions(graph, {each.result.inputs[0] for each in joins.values()})
    functions = LocalFunctions(graph)
    made = [
        write_joined(graph, shapes, each.cluster, formed.forms, each.result, bodies, functions, records[name])
        for name, each in joins.items()
    ]
    made += [write_region(graph, shapes, cluster, formed.forms, functions) for cluster in apart]
    if made:
        graph.remove_dead()
        graph.sort()
    inside = {label for one in made for label in (*one.replaces, *one.joined)}
    return RegionResult(tuple(made), {label: why for label, why in formed.reasons.items() if label not in inside})


def _first(cluster: Cluster) -> str:
    """Return the name of the first output, by which a region is known."""
    return next(iter(cluster.outputs))
