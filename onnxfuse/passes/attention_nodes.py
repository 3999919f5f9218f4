"""The nodes of an attention, from one product to the other, and how they are written anew with other axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from onnxfuse.analysis.shape_info import Shape, ShapeInfo
from onnxfuse.ir.attributes import int_attribute
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import AttributeValue, Node, Tensor, consumers, op_of, producer
from onnxfuse.passes.emit import emit

ELEMENTWISE: Final = frozenset(
    ("Add", "Cast", "Clip", "Div", "IsNaN", "Max", "Min", "Mul", "Neg", "Sub", "Tanh", "Where")
)
VIEWS: Final = frozenset(("Reshape", "Squeeze", "Transpose", "Unsqueeze"))


def softmaxes_of_attention(graph: Graph) -> list[Node]:
    """Return the Softmaxes that may be parts of an attention: all but those of which none was made before."""
    return [
        node for node in graph.nodes if op_of(node) == "Softmax" and graph.scores.name(node) not in graph.scores.stay
    ]


def softmaxes_behind(tensor: Tensor, steps: int) -> list[Node]:
    """Return the Softmaxes that read a tensor, or what elementwise operators and views make of it in so many steps."""
    found: list[Node] = []
    seen, front = {tensor.name}, [tensor]
    for _ in range(steps):
        readers = [reader for each in front for reader in consumers(each)]
        found += [reader for reader in readers if op_of(reader) == "Softmax"]
        made = [reader.outputs[0] for reader in readers if op_of(reader) in ELEMENTWISE | VIEWS]
        front = list({each.name: each for each in made if each.name not in seen}.values())
        seen.update(each.name for each in front)
    return found


def computes_probabilities(tensor: Tensor) -> bool:
    """Return whether a tensor is a Softmax, or computed from one element by element."""
    node = producer(tensor)
    while node is not None and op_of(node) in ELEMENTWISE:
        node = next((made for each in reversed(node.inputs) if (made := producer(each)) is not None), None)
    return node is not None and op_of(node) == "Softmax"


def is_of_last_axis(graph: Graph, softmax: Node, rank: int) -> bool:
    """Return whether a Softmax of a tensor of that rank is over its last axis alone."""
    default = -1 if graph.opset >= 13 else 1
    return int_attribute(softmax, "axis", default) in (-1, rank - 1)


def is_batched_product(shapes: ShapeInfo, node: Node | None) -> bool:
    """Return whether a node is a product of two operands with equally many axes."""
    if node is None or op_of(node) != "MatMul":
        return False
    left, right = (shapes.rank(each) for each in node.inputs)
    return left is not None and left == right


@dataclass
class AttentionNodes:
    """An attention that ends in a product, whose nodes are written anew with other axes."""

    graph: Graph
    shapes: ShapeInfo
    last: Node
    new_shape: Callable[[Shape], Shape]  # of what the nodes compute, which has as many axes as the result
    new_operand: Callable[[Tensor], Tensor | None]  # of what comes from outside; None where that is not possible
    stem: str  # what is added to the names of tensors
    _inside: dict[int, Node | None] = field(default_factory=dict)  # by the tensor's id: the node that is written anew
    _written: dict[int, Tensor | None] = field(default_factory=dict)

    def rewritten(self) -> Tensor | None:
        """Return the result with the new axes; None where there is no other product, or something outside reads inside.

        Nodes that were written before an operand was found impossible are dead.
        """
        return self._rewritten(self.last) if self._is_closed() else None

    def _is_closed(self) -> bool:
        """Return whether there is another product, and nothing outside reads what is between the two."""
        self._inside[id(self.last.outputs[0])] = self.last
        scores = self._find(self.last.inputs[0])
        nodes = [node for node in self._inside.values() if node is not None]
        inner = [node.outputs[0] for node in nodes if node is not self.last]
        return scores and all(
            not self.graph.is_kept(each) and all(reader in nodes for reader in consumers(each)) for each in inner
        )

    def _find(self, tensor: Tensor) -> bool:
        """Record what computes a tensor from a product; return whether there is one."""
        if id(tensor) not in self._inside:
            node, rank = producer(tensor), self.shapes.rank(self.last.outputs[0])
            found = node is not None and rank is not None and self.shapes.rank(tensor) == rank
            if found and node is not None and op_of(node) in (*ELEMENTWISE, "Softmax"):
                operands = [self._find(each) for each in node.inputs]  # all of them are recorded
                found = any(operands)
                found &= op_of(node) != "Softmax" or is_of_last_axis(self.graph, node, rank or 0)
            else:
                found = found and is_batched_product(self.shapes, node)
            self._inside[id(tensor)] = node if found else None
        return self._inside[id(tensor)] is not None

    def _new(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor with the new axes; None where that is not possible."""
        if id(tensor) not in self._written:
            node = self._inside.get(id(tensor))
            self._written[id(tensor)] = self.new_operand(tensor) if node is None else self._rewritten(node)
        return self._written[id(tensor)]

    def _rewritten(self, node: Node) -> Tensor | None:
        """Write a node anew; return what it computes."""
        operands = [self._new(each) if each.name else each for each in node.inputs]
        inputs = [each for each in operands if each is not None]
        end = node.outputs[0]
        shape = self.shapes.shape(end)
        if shape is None or len(inputs) < len(operands):
            return None
        wanted = self.new_shape(shape)
        attributes: Mapping[str, AttributeValue] = node.attrs
        if op_of(node) == "Softmax":
            attributes = {**node.attrs, "axis": len(wanted) - 1}
        stem = f"{end.name}_{self.stem}"
        made = emit(self.graph, self.shapes, op_of(node), inputs, stem, wanted, self.shapes.dtype(end), attributes)
        if op_of(node) == "Softmax":
            self.graph.scores.begun[made.name] = self.graph.scores.name(node)
        return made
