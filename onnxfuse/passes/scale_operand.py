"""Scale an operand of a product instead of its result."""

from __future__ import annotations

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.node import Node, Tensor
from onnxfuse.passes.folded import node_label


def scale_operand(shapes: ShapeInfo, product: Node, scaling: Node) -> Tensor:
    """Write `MatMul(a, b) * s` as `MatMul(a * s, b)`, and return `a * s`.  The result and the nodes keep their names.

    product  the MatMul, whose result no other node reads
    scaling  the Mul, or the Div by s, that reads this result
    """
    graph, operand, end = shapes.graph, product.inputs[0], scaling.outputs[0]
    scaled = graph.variable(f"{end.name}_queries")
    shapes.record(scaled, shapes.shape(operand), shapes.dtype(operand))
    factors = [operand if each is product.outputs[0] else each for each in scaling.inputs]
    names = node_label(scaling), node_label(product)
    for node in (product, scaling):  # both nodes are dead now
        node.outputs.clear()
    graph.add_node(scaling.op, factors, [scaled], name=names[0])
    graph.add_node(product.op, [scaled, product.inputs[1]], [end], name=names[1])
    return scaled
