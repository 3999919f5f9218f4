"""Move the axes of heads before the axis of queries, where one product computes the rows of all heads.

Multi-query attention is one product of (batch, queries * heads, size) and keys that all heads share (gpt_bigcode).
Grouped-query attention of Gemma in JAX is a product of queries (batch, queries, key heads, group, size) and keys
(batch, 1, key heads, size, keys), which all queries share.  The scores are reshaped for the Softmax to (batch, queries,
heads, keys), and the result to (batch, queries, heads * size).  This pass gives queries, scores, masks and the result
the axes (batch, heads, queries, ...) or (batch, key heads, group, queries, ...), without a Reshape between the two
products.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.algebra.sizes import Shape, product
from onnxfuse.analysis.scores import RANK, is_of_last_axis, softmaxes_of_attention
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.attention.new_axes import SCORES, NewAxes, are_read_by, nodes_from_product
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, op_of
from onnxfuse.passes.compose_views import View, sources_of, write_scalings, write_views, written_from
from onnxfuse.passes.graph_pass import graph_pass

AFTER_SOFTMAX = frozenset(("Cast", "Reshape"))


@graph_pass(opset=13)  # from this opset on, Softmax is over one axis
def heads_first(graph: Graph, shapes: ShapeInfo) -> int:
    """Rewrite each attention whose result has the axes of heads after queries.  Returns the number of attentions."""
    return sum(_rewrite(graph, shapes, node) for node in softmaxes_of_attention(graph))


def _rewrite(graph: Graph, shapes: ShapeInfo, softmax: Node) -> bool:
    """Rewrite the attention around a Softmax; return whether that was possible."""
    last, scores = _product_with_values(graph, softmax), shapes.shape(softmax.outputs[0])
    joined = None if last is None else graph.sole_consumer(last.outputs[0])
    if last is None or joined is None or scores is None or not is_of_last_axis(graph, softmax, len(scores)):
        return False
    result, rows = shapes.shape(last.outputs[0]), shapes.shape(joined.outputs[0])
    if len(scores) < RANK or op_of(joined) != "Reshape" or result is None or rows is None:
        return False
    if rows != (*scores[:2], product(scores[2:-1]) * result[-1]):
        return False
    inside = nodes_from_product(last.inputs[0], lambda tensor, node: _is_part(shapes, scores, tensor, node))
    nodes = {**inside, id(last.outputs[0]): last}
    products = [node for node in nodes.values() if op_of(node) == "MatMul"]
    heads = {_heads(shapes, scores, node) for node in products}
    if len(products) != 2 or len(heads) != 1 or not are_read_by(graph, inside.values(), nodes.values()):
        return False
    (found,) = heads
    axes = None if found is None else HeadsFirst(shapes, scores, found, frozenset(id(p.inputs[1]) for p in products))
    made = None if axes is None else NewAxes(shapes, nodes, axes).of(last.outputs[0])
    back = None if axes is None or made is None else axes.back(made, rows)
    return back is not None and graph.replace(joined.outputs[0], back)


def _product_with_values(graph: Graph, softmax: Node) -> Node | None:
    """Return the MatMul whose left operand is a Softmax's probabilities, if nothing else reads them; else None."""
    tensor = softmax.outputs[0]
    while (reader := graph.sole_consumer(tensor)) is not None and op_of(reader) in AFTER_SOFTMAX:
        tensor = reader.outputs[0]
    return reader if reader is not None and op_of(reader) == "MatMul" and reader.inputs[0] is tensor else None


def _is_part(shapes: ShapeInfo, scores: Shape, tensor: Tensor, node: Node) -> bool:
    """Return whether a node can be one of those that compute the scores.

    Where some axes of the scores are merged in the node's result, each operand must have the result's shape or one
    element.
    """
    shape, operands = shapes.shape(tensor), [shapes.shape(each) or () for each in node.inputs if each.name]
    if shape is None or (product(shape), shape[-1]) != (product(scores), scores[-1]):
        return False
    is_aligned = len(shape) == len(scores) or all(each == shape or product(each) == 1 for each in operands)
    return op_of(node) in ("MatMul", "Reshape") or (op_of(node) in SCORES and is_aligned)


def _heads(shapes: ShapeInfo, scores: Shape, node: Node) -> Shape | None:
    """Return the sizes of the axes that hold a product's heads: (heads,), or (key heads, query heads per key head).

    Returns None if the right operand is not the same for all queries, or if the product broadcasts the left operand.
    """
    left, right, out = (shapes.shape(each) for each in (*node.inputs, node.outputs[0]))
    if left is None or right is None or out is None or left[:-1] != out[:-1] or len(right) != len(out):
        return None
    batch, queries, *shared = right[:-2] if len(right) >= RANK else (right[0], 1)
    if batch != scores[0] or queries != 1 or (product(shared) != 1 and tuple(shared) != out[2:-2]):
        return None
    heads = product(scores[2:-1])
    return (heads,) if product(shared) in (1, heads) else (product(shared), out[-2])


@dataclass(frozen=True)
class HeadsFirst:
    """Gives tensors of an attention the axes (batch, heads, queries, columns); the heads can be two axes."""

    shapes: ShapeInfo
    scores: Shape  # (batch, queries, heads, keys)
    heads: Shape
    right: frozenset[int]  # ids of the right operands of the products

    def shape(self, shape: Shape) -> Shape:
        """Return the shape of scores, probabilities or the result with the new axes."""
        return (self.scores[0], *self.heads, self.scores[1], shape[-1])

    def operand(self, tensor: Tensor) -> Tensor | None:
        """Return queries, keys, values, a mask or a number with the new axes; None where that is not possible."""
        shape = self.shapes.shape(tensor)
        if shape is None or product(shape) == 1:
            return tensor if shape is not None and len(shape) <= RANK else None
        if id(tensor) in self.right:
            shared = (product(shape[1:-2]), *(1,) * (len(self.heads) - 1))
            return self._viewed(tensor, View(None, (shape[0], *shared, *shape[-2:])))
        if product(shape[:-1]) == product(self.scores[:-1]):
            return self._moved(tensor, self.scores[:2], self.heads, shape)
        full = (*(1,) * (len(self.scores) - len(shape)), *shape)
        ones = (1,) * len(self.heads)
        is_mask = len(full) == len(self.scores) and product(full[2:-1]) == 1
        return self._moved(tensor, full[:2], ones, shape) if is_mask else None

    def _moved(self, tensor: Tensor, rows: Shape, heads: Shape, shape: Shape) -> Tensor | None:
        """Return a tensor whose axes (batch, queries, heads, columns) are written with heads before queries."""
        order = (0, *range(2, len(heads) + 2), 1, len(heads) + 2)
        moved = View(order, (rows[0], *heads, rows[1], shape[-1]))
        return self._viewed(tensor, View(None, (*rows, *heads, shape[-1])), moved)

    def back(self, result: Tensor, rows: Shape) -> Tensor | None:
        """Return the result of the attention as (batch, queries, heads * size)."""
        count, shape = len(self.heads), self.shapes.shape(result)
        assert shape is not None  # the method `shape` computed it
        order = (0, count + 1, *range(1, count + 1), count + 2)
        return self._viewed(result, View(order, tuple(shape[axis] for axis in order)), View(None, rows))

    def _viewed(self, tensor: Tensor, *views: View) -> Tensor | None:
        stem = f"{tensor.name}_by_head"
        for source, shape, before, scalings in sources_of(self.shapes, tensor):
            written = written_from(shape, (*before, *views))
            if written is not None and (made := write_views(self.shapes, source, written, stem)) is not None:
                return write_scalings(self.shapes, made, scalings)
        return write_views(self.shapes, tensor, views, stem)
