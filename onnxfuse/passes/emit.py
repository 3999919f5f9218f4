"""Nodes that passes add to a graph."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np
from onnx import TensorProto

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


def integers(graph: Graph, stem: str, numbers: Sequence[int]) -> Tensor:
    """Return a new initializer, a vector of int64."""
    return graph.constant(stem, np.array(numbers, np.int64))


def sizes_along(graph: Graph, shapes: ShapeInfo, tensor: Tensor, axes: Sequence[int], stem: str) -> Tensor:
    """Return the vector of a tensor's sizes along axes, which are read at run time."""
    rank = shapes.rank(tensor) or 0
    sizes = emit(graph, shapes, "Shape", [tensor], f"{stem}_sizes", (rank,), TensorProto.INT64)
    inputs = [sizes, integers(graph, f"{stem}_axes", axes)]
    return emit(graph, shapes, "Gather", inputs, f"{stem}_size", (len(axes),), TensorProto.INT64, {"axis": 0})


def joined_sizes(graph: Graph, shapes: ShapeInfo, sizes: Sequence[int | Tensor], stem: str) -> Tensor:
    """Return sizes, which are numbers and vectors of int64, as one vector."""
    parts: list[Tensor] = []
    for _, run in groupby(sizes, lambda size: isinstance(size, int)):
        known = [*run]
        parts += [each for each in known if not isinstance(each, int)]
        if numbers := [each for each in known if isinstance(each, int)]:
            parts.append(integers(graph, f"{stem}_numbers", numbers))
    if len(parts) == 1:
        return parts[0]
    count = sum(math.prod(shapes.shape(part) or (1,)) for part in parts)
    return emit(graph, shapes, "Concat", parts, stem, (count,), TensorProto.INT64, {"axis": 0})
