"""Rewrite the nodes of an attention, from its first to its second matrix product, with other axes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from onnxfuse.algebra.sizes import Shape
from onnxfuse.analysis.scores import ELEMENTWISE, RANK, is_batched_product, is_of_last_axis
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import AttributeValue, Node, Tensor, consumers, op_of, producer
from onnxfuse.passes.emit import write

SCORES: Final = ELEMENTWISE | {"Softmax"}  # operators between the two matrix products of an attention


class Axes(Protocol):
    """A change of the axes of all tensors in an attention."""

    def shape(self, shape: Shape) -> Shape:
        """Return the new shape of a tensor that the attention computes."""

    def operand(self, tensor: Tensor) -> Tensor | None:
        """Give the new axes to a tensor that the attention reads but does not compute; None if that is not possible."""


@dataclass
class NewAxes:
    """Writes copies of nodes with other axes.  If a node cannot be copied, earlier copies remain without consumers."""

    shapes: ShapeInfo
    inside: Mapping[int, Node]  # the nodes to rewrite, by the ids of their outputs
    axes: Axes
    is_transposed: bool = False  # whether to swap the operands of products
    _written: dict[int, Tensor | None] = field(default_factory=dict)

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor with the new axes; None where that is not possible."""
        if id(tensor) not in self._written:
            node = self.inside.get(id(tensor))
            self._written[id(tensor)] = self.axes.operand(tensor) if node is None else self._rewritten(node)
        return self._written[id(tensor)]

    def _rewritten(self, node: Node) -> Tensor | None:
        """Rewrite a node with the new axes and return its output; for a Reshape, return only its rewritten input."""
        if op_of(node) == "Reshape":
            return self.of(node.inputs[0])
        operands = [self.of(each) if each.name else each for each in node.inputs]
        inputs = [each for each in operands if each is not None]
        end = node.outputs[0]
        shape = self.shapes.shape(end)
        if shape is None or len(inputs) < len(operands):
            return None
        if self.is_transposed and op_of(node) == "MatMul":
            inputs.reverse()
        wanted, is_softmax = self.axes.shape(shape), op_of(node) == "Softmax"
        attributes: Mapping[str, AttributeValue] = node.attrs
        attributes = {**attributes, "axis": len(wanted) - 1} if is_softmax else attributes
        made = write(self.shapes, op_of(node), inputs, f"{end.name}_rewritten", attributes)
        if is_softmax:
            self.shapes.graph.scores.begun[made.name] = self.shapes.graph.scores.name(node)
        return made


def nodes_from_product(tensor: Tensor, is_part: Callable[[Tensor, Node], bool]) -> dict[int, Node]:
    """Return the nodes from a product to a tensor, by the ids of their outputs; none if no product computes it.

    `is_part` is called with a tensor and its producer, and decides whether the producer can be one of these nodes.
    """
    found: dict[int, Node | None] = {}

    def leads_to_product(tensor: Tensor) -> bool:
        if id(tensor) not in found:
            node = producer(tensor)
            leads = node is not None and is_part(tensor, node)
            if node is not None and leads and op_of(node) != "MatMul":
                leads = any([*map(leads_to_product, node.inputs)])  # a list, so that `any` visits all inputs
            found[id(tensor)] = node if leads else None
        return found[id(tensor)] is not None

    known = leads_to_product(tensor)
    return {key: node for key, node in found.items() if known and node is not None}


def attention_before(
    graph: Graph, shapes: ShapeInfo, last: Node, scores: Collection[str] = SCORES
) -> dict[int, Node] | None:
    """Return the nodes of the attention that ends in a product, by the ids of their outputs.

    The operators between its two products are in `scores`.  The queries of three axes of scores may be a matrix.
    Returns None if only one product is found, or if a node outside reads a tensor between the two.
    """
    end, rank = last.outputs[0], shapes.rank(last.outputs[0]) or 0

    def is_part(tensor: Tensor, node: Node) -> bool:
        is_scores = op_of(node) in scores and (op_of(node) != "Softmax" or is_of_last_axis(graph, node, rank))
        is_product = is_batched_product(shapes, node) or (rank == RANK - 1 and _has_shared_queries(shapes, node))
        return shapes.rank(tensor) == rank and (is_scores or is_product)

    between = nodes_from_product(last.inputs[0], is_part)
    nodes = {**between, id(end): last}
    return nodes if between and are_read_by(graph, between.values(), nodes.values()) else None


def _has_shared_queries(shapes: ShapeInfo, node: Node) -> bool:
    """Return whether a node multiplies a matrix of queries by the keys of a batch."""
    return op_of(node) == "MatMul" and [shapes.rank(each) for each in node.inputs] == [RANK - 2, RANK - 1]


def are_read_by(graph: Graph, nodes: Iterable[Node], readers: Collection[Node], besides: Collection[str] = ()) -> bool:
    """Return whether all consumers of `nodes` are among `readers`, or have an operator among `besides`."""
    made = [tensor for node in nodes for tensor in node.outputs]
    return not any(map(graph.is_kept, made)) and all(
        reader in readers or op_of(reader) in besides for tensor in made for reader in consumers(tensor)
    )
