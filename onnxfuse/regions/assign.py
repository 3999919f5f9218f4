"""Make regions of what the patterns leave of a graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.graph import Graph
from onnxfuse.regions.formation import form_regions
from onnxfuse.regions.write import order_by_reading, write_region
from onnxfuse.rewrite.replace import REGION, Fused, LocalFunctions


@dataclass(frozen=True)
class RegionResult:
    """The records of the regions, and why nodes are in none, by the labels of these."""

    fused: tuple[Fused, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)


def assign_regions(graph: Graph, shapes: ShapeInfo, exclude: Collection[tuple[str, str]] = frozenset()) -> RegionResult:
    """Replace the regions of a sorted graph by fused nodes.

    `exclude` holds regions that stay as they are, each by REGION and the name of its first output.
    """
    formed = form_regions(graph, shapes)
    functions, fused = LocalFunctions(graph), list[Fused]()
    for region in formed.regions:
        order_by_reading(region, formed.forms)
        if (REGION, next(iter(region.outputs))) not in exclude:
            fused.append(write_region(graph, shapes, region, formed.forms, functions))
    if fused:
        graph.remove_dead()
        graph.sort()
    return RegionResult(tuple(fused), formed.reasons)
