"""Nodes that passes add to a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnxfuse.algebra.sizes import Size
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import AttributeValue, Tensor


def emit(
    graph: Graph,
    shapes: ShapeInfo,
    op: str,
    inputs: Sequence[Tensor],
    stem: str,
    shape: Sequence[Size] | None,
    dtype: int,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> Tensor:
    """Append a node with one output; return that output, named `stem` or `stem_2` …, with its type recorded."""
    output = graph.variable(stem)
    shapes.record(output, shape, dtype)
    graph.add_node(op, inputs, [output], attributes)
    return output
