"""Make regions of what the patterns leave of a graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field
from types import MappingProxyType

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Tensor
from onnxfuse.regions.cluster import Cluster
from onnxfuse.regions.formation import form_regions, is_worth_it
from onnxfuse.regions.join import joined_result, write_joined
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
    no other node, by that node's fusion.  `joining` are the fusions whose nodes elementwise operators join, with the
    layout that these must have or True, and `fused` the records of the fused nodes that the graph has.  `keep` holds
    the labels of nodes that are in no region.
    """
    formed = form_regions(graph, shapes, keep)
    joined, apart = dict[str, Cluster](), list[Cluster]()  # the former by the fused nodes that they join
    records, results = {one.node: one for one in fused}, dict[str, Tensor]()
    for cluster in (*formed.regions, *formed.others):
        order_by_reading(cluster, formed.forms)
        result = joined_result(graph, shapes, cluster, formed.forms, joining)
        record = records.get(result.inputs[0].name) if result is not None else None
        first = next(iter(cluster.outputs))
        if result is not None and record and (record.fusion, first) not in exclude:
            joined[record.node], results[record.node] = cluster, result
        elif is_worth_it(cluster) and (REGION, first) not in exclude:
            apart.append(cluster)
    bodies = {f.name: f for f in graph.functions if f.domain == DOMAIN}
    if joined and not graph.is_subgraph:
        drop_functions(graph, {each.inputs[0] for each in results.values()})
    functions = LocalFunctions(graph)
    made = [
        write_joined(graph, shapes, cluster, formed.forms, results[name], bodies, functions, records[name])
        for name, cluster in joined.items()
    ]
    made += [write_region(graph, shapes, cluster, formed.forms, functions) for cluster in apart]
    if made:
        graph.remove_dead()
        graph.sort()
    inside = {label for one in made for label in one.joined}
    return RegionResult(tuple(made), {label: why for label, why in formed.reasons.items() if label not in inside})
