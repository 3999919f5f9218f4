"""Rewrite attentions that are computed transposed, so that scores have a row for each query, as patterns require.

Models whose keys and values are images multiply values by transposed probabilities: `v p^T` is the transpose of
`p v^T`.  Some models compute the scores with a row for each key, `k q^T`, and take the Softmax over the rows, or
transpose the scores before the Softmax.  This pass makes the scores `q k^T`, takes the Softmax over the last axis, and
makes the probabilities the left operand of the product with values.  Queries, keys, values and the result are
transposed instead, and these Transposes compose with the views around them.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.algebra.sizes import Shape
from onnxfuse.analysis.scores import ELEMENTWISE, computes_probabilities, nodes_before
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.attention.new_axes import NewAxes, nodes_from_product
from onnxfuse.ir.attributes import int_attribute, perm_of
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, consumers, op_of, producer
from onnxfuse.passes.compose_views import View, write_views
from onnxfuse.passes.emit import write
from onnxfuse.passes.graph_pass import graph_pass


@graph_pass(opset=13)  # from this opset on, Softmax is over one axis
def orient_products(graph: Graph, shapes: ShapeInfo) -> int:
    """Transpose scores, probabilities and results of attentions that have a column for each query, not a row.

    Returns the number of rewrites.
    """
    count = 0
    for node in list(graph.nodes):
        if op_of(node) == "Softmax":
            count += _over_last_axis(graph, shapes, node)
            swaps = [each for each in nodes_before(node.inputs[0]) if _is_swap(shapes, each)]
            count += sum(_product_of_rows(graph, shapes, each) for each in swaps)
        elif op_of(node) == "MatMul":
            count += _probabilities_first(graph, shapes, node)
    return count


def _over_last_axis(graph: Graph, shapes: ShapeInfo, softmax: Node) -> bool:
    """Replace a Softmax over rows by a Softmax over the last axis of transposed scores.

    Returns whether the Softmax was replaced.
    """
    result, shape = softmax.outputs[0], shapes.shape(softmax.inputs[0])
    axis = int_attribute(softmax, "axis", -1)
    if shape is None or axis not in (-2, len(shape) - 2) or not _is_read_by_column(graph, shapes, result):
        return False
    rows = _scores_of_rows(shapes, softmax.inputs[0])
    if rows is None:
        return False
    made = write(shapes, "Softmax", [rows], f"{result.name}_of_rows", {"axis": -1})
    graph.scores.begun[made.name] = graph.scores.name(softmax)
    return graph.replace(result, Transposed(shapes).operand(made))


def _is_read_by_column(graph: Graph, shapes: ShapeInfo, probabilities: Tensor) -> bool:
    """Return whether each consumer is a Transpose, or a MatMul with the probabilities as its right operand."""
    return not graph.is_kept(probabilities) and all(
        _is_swap(shapes, reader) or (op_of(reader) == "MatMul" and reader.inputs[0] is not probabilities)
        for reader in consumers(probabilities)
    )


def _probabilities_first(graph: Graph, shapes: ShapeInfo, product: Node) -> bool:
    """Write `x p^T` as the transpose of `p x^T`, where p are probabilities; return whether that was done."""
    left, right = product.inputs
    node, result, columns = producer(right), product.outputs[0], shapes.shape(right)
    if node is None or columns is None or (shapes.rank(left) or 0) < 2:
        return False
    is_one = columns[-2:] == (1, 1)  # a matrix of one element is its own transpose
    probabilities = node.inputs[0] if _is_swap(shapes, node) else right if is_one else None
    if probabilities is None or not computes_probabilities(probabilities) or computes_probabilities(left):
        return False
    swap = Transposed(shapes)
    made = write(shapes, "MatMul", [probabilities, swap.operand(left)], f"{result.name}_of_rows")
    return graph.replace(result, swap.operand(made))


def _product_of_rows(graph: Graph, shapes: ShapeInfo, swap: Node) -> bool:
    """Compute scores directly in the layout that the Transpose `swap` gives them; return whether that was possible."""
    rows = _scores_of_rows(shapes, swap.inputs[0])
    return rows is not None and graph.replace(swap.outputs[0], rows)


def _scores_of_rows(shapes: ShapeInfo, scores: Tensor) -> Tensor | None:
    """Return scores with their last two axes swapped, computed from `q k^T`, not `k q^T`; None without a product.

    Each tensor from the product to `scores` must have only one consumer.  If a Transpose of the last two axes lies
    between the product and `scores`, the input of this Transpose replaces its result.
    """

    def is_part(tensor: Tensor, node: Node) -> bool:
        if (shapes.rank(tensor) or 0) < 2 or shapes.graph.sole_consumer(tensor) is None:
            return False
        ranks = [shapes.rank(each) for each in node.inputs if each.name]
        if op_of(node) == "MatMul":
            return all((rank or 0) >= 2 for rank in ranks) and not computes_probabilities(node.inputs[0])
        return _is_swap(shapes, node) or (op_of(node) in ELEMENTWISE and None not in ranks)

    nodes = nodes_from_product(scores, is_part)
    inside = {key: node for key, node in nodes.items() if not _is_swap(shapes, node)}
    return NewAxes(shapes, inside, Transposed(shapes), is_transposed=True).of(scores) if nodes else None


@dataclass(frozen=True)
class Transposed:
    """Swaps the last two axes."""

    shapes: ShapeInfo

    def shape(self, shape: Shape) -> Shape:
        """Return a shape with its last two sizes swapped."""
        return (*shape[:-2], shape[-1], shape[-2])

    def operand(self, tensor: Tensor) -> Tensor:
        """Return a tensor with its last two axes swapped; a vector becomes a column, and a scalar is unchanged."""
        node, shape = producer(tensor), self.shapes.shape(tensor)
        if not shape:
            return tensor
        if node is not None and _is_swap(self.shapes, node):
            return node.inputs[0]
        rank = len(shape)
        swap = View((*range(rank - 2), rank - 1, rank - 2), self.shape(shape)) if rank > 1 else View(None, (*shape, 1))
        made = write_views(self.shapes, tensor, (swap,), f"{tensor.name}_of_rows")
        assert made is not None  # neither a Transpose nor an Unsqueeze needs a computed target
        return made


def _is_swap(shapes: ShapeInfo, node: Node) -> bool:
    """Return whether a node is a Transpose of the last two axes."""
    rank = shapes.rank(node.outputs[0])
    if op_of(node) != "Transpose" or rank is None or rank < 2:
        return False
    return perm_of(node, rank) == [*range(rank - 2), rank - 1, rank - 2]
