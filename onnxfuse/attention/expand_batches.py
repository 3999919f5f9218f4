"""Give queries, keys and values the batch of the scores, where a mask may broadcast the scores to a larger batch.

Files of tf2onnx name the batch of each input, such as tokens and their padding mask.  Either batch may be 1, so that
the masked scores have a third batch, as has each later layer.  In the first attention, queries, keys and values have
another batch than the scores.  This pass expands the tensors from which they are computed.  The Expand is before
projections and views, so that queries, keys and values of one tensor need one Expand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from onnxfuse.algebra.sizes import Shape, Size
from onnxfuse.analysis.scores import RANK, computes_probabilities
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.attention.new_axes import SCORES, NewAxes, are_read_by, attention_before
from onnxfuse.ir.attributes import perm_of
from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.node import Node, Tensor, is_constant, op_of, producer, tensor_before
from onnxfuse.passes.emit import joined_sizes, sizes_along, write
from onnxfuse.passes.graph_pass import graph_pass

WITH_SINKS: Final = SCORES | {"Concat", "Slice"}  # sinks are joined to the scores, and their probabilities cut off


@graph_pass(opset=8)  # the first opset with Expand
def expand_batches(graph: Graph, shapes: ShapeInfo) -> int:
    """Expand queries, keys and values whose batch may be smaller than their mask's; return the number of attentions."""
    products = [node for node in graph.nodes if node.op == "MatMul" and _is_of_two_batches(shapes, node)]
    found = [node for node in products if computes_probabilities(tensor_before(node.inputs[0], {"Slice"}))]
    return sum(_rewrite(graph, shapes, node) for node in found)


def _is_of_two_batches(shapes: ShapeInfo, product: Node) -> bool:
    left, right = (shapes.shape(each) for each in product.inputs)
    return left is not None and right is not None and len(left) == len(right) == RANK and left[0] != right[0]


def _rewrite(graph: Graph, shapes: ShapeInfo, last: Node) -> bool:
    """Expand what the two products of the attention that ends in `last` read; return whether that was possible."""
    inside, probabilities = attention_before(graph, shapes, last, WITH_SINKS), shapes.shape(last.inputs[0])
    if inside is None or probabilities is None:
        return False
    read = [(node, each) for node in inside.values() for each in node.inputs if each.name and id(each) not in inside]
    read.sort(key=lambda pair: op_of(pair[0]) == "MatMul")  # masks first: one Expand is then enough for all operands
    operands = [each for node, each in read if op_of(node) == "MatMul"]
    repeats = {id(each): _repeats(shapes, each, [each for _, each in read], probabilities[0]) for each in operands}
    if len(operands) != 3 or None in repeats.values() or not any(repeats.values()):
        return False
    before = _nodes_before(graph, shapes, operands, [*inside.values()])
    axes = ExpandedBatch(shapes, {key: each for key, each in repeats.items() if each}, before)
    made = NewAxes(shapes, inside, axes).of(last.outputs[0])
    return made is not None and graph.replace(last.outputs[0], made)


def _repeats(shapes: ShapeInfo, tensor: Tensor, others: Iterable[Tensor], batch: Size) -> tuple[Tensor, ...] | None:
    """Return the tensors with whose batches that of `tensor` broadcasts to `batch`; None where there are none."""
    found: list[Tensor] = []
    size = (shapes.shape(tensor) or (0,))[0]
    for other in others:
        shape = shapes.shape(other)
        if shape is not None and len(shape) == RANK and shapes.broadcast(size, shape[0], batch) == batch:
            if (larger := shapes.broadcast(size, shape[0])) != size:
                found.append(other)
            size = larger
    return tuple(found) if size == batch else None


def _nodes_before(graph: Graph, shapes: ShapeInfo, operands: Iterable[Tensor], readers: list[Node]) -> dict[int, Node]:
    """Return projections and views before these tensors that nothing else reads, by the ids of their outputs."""
    found: dict[int, Node] = {}
    for tensor in operands:
        node, inside = producer(tensor), [*readers]
        while node is not None and are_read_by(graph, [node], inside) and _keeps_batch(graph, shapes, node):
            found[id(node.outputs[0])] = node
            inside.append(node)
            node = next((producer(each) for each in node.inputs if not is_constant(each)), None)
    return found


def _keeps_batch(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Return whether a node computes the same of each element of the first axis of one tensor, and of constants."""
    computed = [each for each in node.inputs if not is_constant(each)]
    before, after = shapes.shape(node.inputs[0]), shapes.shape(node.outputs[0])
    if len(computed) != 1 or computed[0] is not node.inputs[0] or not before or not after or before[0] != after[0]:
        return False
    match op_of(node):
        case "Add" | "Mul" | "MatMul":
            return len(before) == len(after) > (shapes.rank(node.inputs[1]) or 0)
        case "Transpose":
            return perm_of(node, len(before))[0] == 0
        case "Reshape":
            target = node.inputs[1]
            return is_constant(target) and int(constant_value(graph, target)[0]) == 0 and "allowzero" not in node.attrs
    return False


@dataclass
class ExpandedBatch:
    """Expands the operands of an attention's products; the nodes in `before` are copied."""

    shapes: ShapeInfo
    repeats: Mapping[int, tuple[Tensor, ...]]  # the tensors to whose batches an operand is expanded, by its id
    before: Mapping[int, Node]
    _made: dict[tuple[int, tuple[int, ...]], Tensor] = field(default_factory=dict)

    def shape(self, shape: Shape) -> Shape:
        """Return the shape, whose axes stay."""
        return shape

    def operand(self, tensor: Tensor) -> Tensor:
        """Return queries, keys or values with the batch of the scores, and other tensors as they are."""
        return self._expanded(tensor, self.repeats[id(tensor)]) if id(tensor) in self.repeats else tensor

    def _expanded(self, tensor: Tensor, repeats: tuple[Tensor, ...]) -> Tensor:
        if is_constant(tensor):
            return tensor
        key = id(tensor), tuple(map(id, repeats))
        if key not in self._made:
            node, stem, made = self.before.get(id(tensor)), f"{tensor.name}_expanded", tensor
            if node is not None:
                inputs = [self._expanded(each, repeats) for each in node.inputs]
                made = write(self.shapes, op_of(node), inputs, stem, node.attrs)
            for other in repeats if node is None else ():
                ones = [1] * ((self.shapes.rank(tensor) or 1) - 1)
                target = joined_sizes(self.shapes, [sizes_along(self.shapes, other, [0], stem), *ones], stem)
                made = write(self.shapes, "Expand", [made, target], stem)
            self._made[key] = made
        return self._made[key]
