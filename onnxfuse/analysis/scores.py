"""Finds attention scores: the nodes from the product of queries and keys to the Softmax and the product with values."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import int_attribute
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, consumers, is_constant, op_of, producer

MAX_STEPS: Final = 12  # maximum number of nodes followed: from a Softmax to a product, or back to a mask or bias
# Operators between the product of queries and keys and the Softmax, and between the Softmax and the second product.
ELEMENTWISE: Final = frozenset(
    ("Add", "Cast", "Clip", "Div", "IsNaN", "Max", "Min", "Mul", "Neg", "Sub", "Tanh", "Where")
)
VIEWS: Final = frozenset(("Reshape", "Squeeze", "Transpose", "Unsqueeze"))
RANK: Final = 4  # rank of the products that attention patterns match: (batch, heads, rows, columns)
HEADS_AXIS: Final = -3


def softmaxes_of_attention(graph: Graph) -> list[Node]:
    """Return the Softmaxes that can become parts of an attention, because their scores can be rewritten."""
    return [
        node for node in graph.nodes if op_of(node) == "Softmax" and graph.scores.name(node) not in graph.scores.stay
    ]


def nodes_before(tensor: Tensor, through: Collection[str] = ELEMENTWISE, steps: int = MAX_STEPS) -> Iterator[Node]:
    """Yield the producer of a tensor and the nodes before it, consumers first; stop at operators not in `through`."""
    node = producer(tensor)
    if node is not None and steps:
        yield node
        if op_of(node) in through:
            for each in node.inputs:
                yield from nodes_before(each, through, steps - 1)


def is_computed_from_product(tensor: Tensor, through: Collection[str] = ELEMENTWISE) -> bool:
    """Return whether a tensor is a product of two computed tensors, directly or after operators in `through`."""
    return any(
        op_of(node) == "MatMul" and not any(map(is_constant, node.inputs)) for node in nodes_before(tensor, through)
    )


def softmaxes_after(tensor: Tensor) -> list[Node]:
    """Return the Softmaxes that read a tensor directly, or after elementwise operators and views."""
    found: list[Node] = []
    seen, front = {tensor.name}, [tensor]
    for _ in range(MAX_STEPS):
        readers = [reader for each in front for reader in consumers(each)]
        found += [reader for reader in readers if op_of(reader) == "Softmax"]
        made = [reader.outputs[0] for reader in readers if op_of(reader) in ELEMENTWISE | VIEWS]
        front = list({each.name: each for each in made if each.name not in seen}.values())
        seen.update(each.name for each in front)
    return found


def computes_probabilities(tensor: Tensor) -> bool:
    """Return whether a tensor is the output of a Softmax, or is computed from it by elementwise operators."""
    node = producer(tensor)
    while node is not None and op_of(node) in ELEMENTWISE:
        node = next((made for each in reversed(node.inputs) if (made := producer(each)) is not None), None)
    return node is not None and op_of(node) == "Softmax"


def is_of_last_axis(graph: Graph, softmax: Node, rank: int) -> bool:
    """Return whether a Softmax of a tensor of this rank reduces only the last axis."""
    default = -1 if graph.opset >= 13 else 1
    return int_attribute(softmax, "axis", default) in (-1, rank - 1)


def is_batched_product(shapes: ShapeInfo, node: Node | None) -> bool:
    """Return whether a node is a MatMul of two operands of the same known rank."""
    if node is None or op_of(node) != "MatMul":
        return False
    left, right = (shapes.rank(each) for each in node.inputs)
    return left is not None and left == right


def rewritable_softmaxes(graph: Graph, add: Node) -> set[str]:
    """Return the names of the Softmaxes after an Add; an empty set if the scores of any of them must not change."""
    found = {graph.scores.name(each) for each in softmaxes_after(add.outputs[0])}
    return found if graph.scores.stay.isdisjoint(found) else set()


def is_product_of_slopes(shapes: ShapeInfo, bias: Tensor) -> bool:
    """Return whether a bias is slopes (heads, 1, 1) times positions that are the same for all heads (ALiBi)."""
    node = producer(bias)
    if node is not None and op_of(node) == "Cast":
        node = producer(node.inputs[0])
    if node is None or op_of(node) != "Mul" or not is_constant(node.inputs[0]):
        return False
    slopes, positions = (shapes.shape(each) for each in node.inputs)
    if slopes is None or positions is None or slopes[1:] != (1, 1) or len(slopes) != -HEADS_AXIS:
        return False
    rank = RANK if is_constant(node.inputs[1]) else -HEADS_AXIS
    return len(positions) >= rank and positions[HEADS_AXIS] == 1


def is_factored_bias(shapes: ShapeInfo, node: Node) -> bool:
    """Return whether a node computes slopes times positions, a bias that is added to scores that can be rewritten.

    If a Cast follows the product of slopes and positions, the result is true for both the Mul and the Cast.
    """
    output = node.outputs[0] if node.outputs else None  # a node without outputs has been folded to a constant
    if output is None or not is_product_of_slopes(shapes, output):
        return False
    return any(
        (op_of(reader) == "Cast" and is_factored_bias(shapes, reader))
        or (
            op_of(reader) == "Add"
            and any(map(is_computed_from_product, reader.inputs))
            and rewritable_softmaxes(shapes.graph, reader)
        )
        for reader in consumers(output)
    )
