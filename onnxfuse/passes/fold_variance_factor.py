"""Fold the factor of a variance into epsilon and the weight of the norm.

An unbiased variance, as torch.var computes it, is the mean of squares times n / (n - 1), and
`x / sqrt(c * mean + eps) * w = x / sqrt(mean + eps / c) * (w / sqrt(c))`.
"""

from __future__ import annotations

import math
from typing import Final

from onnx import TensorProto

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.graph import Graph, constant_number, constant_value
from onnxfuse.ir.node import Node, Tensor, is_constant, op_of, producer
from onnxfuse.passes.emit import emit
from onnxfuse.passes.folded import Folded, node_label
from onnxfuse.passes.graph_pass import graph_pass

FLOAT: Final = TensorProto.FLOAT


@graph_pass()
def fold_variance_factor(graph: Graph, shapes: ShapeInfo) -> list[Folded]:
    """Remove constant factors of the mean before each square root that a weight follows; return their nodes."""
    roots = [node for node in graph.nodes if op_of(node) == "Sqrt" and shapes.dtype(node.outputs[0]) == FLOAT]
    return [one for root in roots for one in _fold(graph, shapes, root)]


def _fold(graph: Graph, shapes: ShapeInfo, root: Node) -> list[Folded]:
    total, product = _with_epsilon(graph, root.inputs[0]), _product_behind(graph, root)
    if total is None or product is None:
        return []
    (mean, epsilon), factor, nodes = total, 1.0, list[Node]()
    while (node := producer(mean)) is not None and (found := _factor(graph, node)):
        mean, factor = found[0], factor * found[1]
        nodes.append(node)
    if not nodes or not 0 < factor < math.inf or not _is_mean_of_squares(graph, mean):
        return []
    shape, stem, at = shapes.shape(mean), root.outputs[0].name, int(is_constant(product.inputs[1]))
    if shape != shapes.shape(root.outputs[0]):  # a factor or an epsilon adds axes
        return []
    weight = product.inputs[at]
    assert is_constant(weight)
    value: Array = constant_value(graph, weight)
    number = graph.constant(f"{stem}_epsilon", value.dtype.type(epsilon / factor).reshape(()))
    root.inputs[0] = emit(graph, shapes, "Add", [mean, number], f"{stem}_of_mean", shape, FLOAT)
    product.inputs[at] = graph.constant(f"{weight.name}_scaled", (value / math.sqrt(factor)).astype(value.dtype))
    return [Folded("scale", node_label(node), node_label(product)) for node in nodes]


def _product_behind(graph: Graph, root: Node) -> Node | None:
    """Return the Mul by a weight that follows the inverse of a root; None if there are other consumers on the way."""
    tensor, is_inverse = root.outputs[0], False
    while (reader := graph.sole_consumer(tensor)) is not None:
        op, constant = op_of(reader), next((t for t in reader.inputs if is_constant(t)), None)
        if op in ("Div", "Reciprocal") and not is_inverse and reader.inputs[-1] is tensor:
            is_inverse = True
        elif op != "Mul" or not is_inverse:
            return None
        elif constant is not None:
            return reader if math.prod(constant.shape) > 1 else None
        tensor = reader.outputs[0]
    return None


def _factor(graph: Graph, node: Node) -> tuple[Tensor, float] | None:
    """Return a tensor and the number that a node scales it by; None if the node is not such a Mul or Div."""
    if op_of(node) not in ("Mul", "Div"):
        return None
    for index in (1, 0) if op_of(node) == "Mul" else (1,):
        number = constant_number(graph, node.inputs[index])
        if number:
            return node.inputs[1 - index], number if op_of(node) == "Mul" else 1 / number
    return None


def _with_epsilon(graph: Graph, tensor: Tensor) -> tuple[Tensor, float] | None:
    """Return the tensor and the number above 0 that an Add sums up; None for other tensors."""
    total = producer(tensor)
    if total is None or op_of(total) != "Add":
        return None
    for other, number in (total.inputs, total.inputs[::-1]):
        epsilon = constant_number(graph, number)
        if epsilon is not None and 0 < epsilon < math.inf:
            return other, epsilon
    return None


def _is_mean_of_squares(graph: Graph, tensor: Tensor) -> bool:
    """Return whether a tensor is the mean of the squares of another one."""
    reduction = producer(tensor)
    return reduction is not None and op_of(reduction) == "ReduceMean" and _is_square(graph, reduction.inputs[0])


def _is_square(graph: Graph, tensor: Tensor) -> bool:
    node = producer(tensor)
    if node is None:
        return False
    if op_of(node) == "Mul":
        return node.inputs[0] is node.inputs[1]
    return op_of(node) == "Pow" and constant_number(graph, node.inputs[1]) == 2
