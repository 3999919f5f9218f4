"""Functions with which passes add nodes and constants to a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final

import numpy as np

from onnxfuse.analysis.shape_inference import infer_node
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import input_index
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import AttributeValue, Tensor

# The first opset whose Reshape has `allowzero`, with which a 0 in the target is a size; else it copies a size.
ALLOWZERO_OPSET: Final = 14


def write(
    shapes: ShapeInfo,
    op: str,
    inputs: Sequence[Tensor],
    stem: str,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> Tensor:
    """Append a node with one output; return that output, named `stem` or `stem_2` …, with its inferred type."""
    output = shapes.graph.variable(stem)
    infer_node(shapes, shapes.graph.add_node(op, inputs, [output], attributes))
    return output


def integers(graph: Graph, stem: str, numbers: Sequence[int]) -> Tensor:
    """Return a new initializer, a vector of int64."""
    return graph.constant(stem, np.array(numbers, np.int64))


def sizes_along(shapes: ShapeInfo, tensor: Tensor, axes: Sequence[int], stem: str) -> Tensor:
    """Return a vector of a tensor's sizes along these axes, which nodes compute at run time."""
    sizes = write(shapes, "Shape", [tensor], f"{stem}_sizes")
    return write(shapes, "Gather", [sizes, integers(shapes.graph, f"{stem}_axes", axes)], f"{stem}_size", {"axis": 0})


def joined_sizes(shapes: ShapeInfo, sizes: Sequence[int | Tensor], stem: str) -> Tensor:
    """Join sizes, which are numbers or int64 vectors, into one vector."""
    parts: list[Tensor] = []
    for _, run in groupby(sizes, lambda size: isinstance(size, int)):
        known = [*run]
        parts += [each for each in known if not isinstance(each, int)]
        if numbers := [each for each in known if isinstance(each, int)]:
            parts.append(integers(shapes.graph, f"{stem}_numbers", numbers))
    return parts[0] if len(parts) == 1 else write(shapes, "Concat", parts, stem, {"axis": 0})


def sliced(shapes: ShapeInfo, tensor: Tensor, axis: int, start: int, end: int, step: int, stem: str) -> Tensor:
    """Return every `step`-th slice of a tensor along one axis, from `start` to `end` (excluded); needs opset 10."""
    bounds = (integers(shapes.graph, f"{stem}_bounds", [number]) for number in (start, end, axis, step))
    return write(shapes, "Slice", [tensor, *bounds], stem)


def unsqueezed(shapes: ShapeInfo, tensor: Tensor, axes: Sequence[int], stem: str) -> Tensor:
    """Return a tensor with axes of size 1 added."""
    if input_index("Unsqueeze", "axes", shapes.graph.opset) is None:
        return write(shapes, "Unsqueeze", [tensor], stem, {"axes": list(axes)})
    return write(shapes, "Unsqueeze", [tensor, integers(shapes.graph, f"{stem}_axes", axes)], stem)
