"""Finds shape arithmetic, which onnxruntime runs on the host (the CPU), so that regions leave it out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from onnxfuse.analysis.shape_info import MAX_VALUE_ELEMENTS, ShapeInfo
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, consumers, is_constant, op_of, producer

# Maps an operator to the indices of the inputs that onnxruntime reads on the host.
HOST_INPUTS: Final[Mapping[str, range]] = {
    "Reshape": range(1, 2),
    "Expand": range(1, 2),
    "Slice": range(1, 5),
    "Tile": range(1, 2),
    "ConstantOfShape": range(1),
    "Range": range(3),
    "Pad": range(1, 4),
    "Resize": range(1, 4),
    "Upsample": range(1, 2),
    "Squeeze": range(1, 2),
    "Unsqueeze": range(1, 2),
    "Split": range(1, 2),
    "TopK": range(1, 2),
    "OneHot": range(1, 2),
    "Trilu": range(1, 2),
    "If": range(1),
    "Loop": range(2),
}
SEEDS: Final = ("Shape", "Size")


def host_nodes(shapes: ShapeInfo) -> set[Node]:
    """Return the nodes that compute short tensors from shapes alone, or short tensors that only the host reads."""
    graph, found = shapes.graph, set[Node]()
    for node in graph.nodes:
        if op_of(node) in SEEDS or (_is_short(shapes, node) and _reads_only(node, found)):
            found.add(node)
    for node in reversed(graph.nodes):
        if node not in found and _is_short(shapes, node) and all(_is_for_host(graph, t, found) for t in node.outputs):
            found.add(node)
    return found


def _is_short(shapes: ShapeInfo, node: Node) -> bool:
    for tensor in node.outputs:
        shape = shapes.shape(tensor)
        if shape is None or not all(isinstance(size, int) for size in shape):
            return False
        if math.prod(int(str(size)) for size in shape) > MAX_VALUE_ELEMENTS:
            return False
    return True


def _reads_only(node: Node, found: set[Node]) -> bool:
    computed = [t for t in node.inputs if t.name and not is_constant(t)]
    return bool(computed) and all((maker := producer(t)) is not None and maker in found for t in computed)


def _is_for_host(graph: Graph, tensor: Tensor, found: set[Node]) -> bool:
    """Return whether every reader of a tensor is shape arithmetic, or reads the tensor as a shape."""
    if graph.is_kept(tensor) or not tensor.outputs:
        return False
    return all(node in found or _reads_as_shape(node, tensor) for node in consumers(tensor))


def _reads_as_shape(node: Node, tensor: Tensor) -> bool:
    host = HOST_INPUTS.get(op_of(node), range(0))
    return all(i in host for i, each in enumerate(node.inputs) if each is tensor)
