"""Give an attention whose products have no axis for heads one of size 1, and one for the batch where that lacks too.

Attention of one head is often written as softmax(q k^T) v of (batch, rows, size), as in the middle of a variational
autoencoder, or with a module for each head.  It is an attention of one head.  This runs when no other pass changes
anything any more, because (batch * heads, rows, size) is split where a model tells the number of heads.
"""

from __future__ import annotations

from onnxfuse.analysis.scores import RANK, computes_probabilities, is_batched_product
from onnxfuse.analysis.shape_info import Shape, ShapeInfo
from onnxfuse.attention.new_axes import NewAxes, attention_before
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor
from onnxfuse.passes.compose_views import View, write_views
from onnxfuse.passes.graph_pass import graph_pass


@graph_pass(opset=7)  # with broadcasting from the last axis on
def add_heads_axis(graph: Graph, shapes: ShapeInfo) -> int:
    """Compute every attention of two or three axes on four.  Returns the number of attentions."""
    found = [
        node
        for node in graph.nodes
        if is_batched_product(shapes, node)
        and (shapes.rank(node.outputs[0]) or RANK) < RANK
        and computes_probabilities(node.inputs[0])
    ]
    return sum(_rewrite(graph, shapes, node) for node in found)


def _rewrite(graph: Graph, shapes: ShapeInfo, last: Node) -> bool:
    """Write the attention that ends in a product with four axes; return whether that was possible."""
    end = last.outputs[0]
    shape, inside = shapes.shape(end), attention_before(graph, shapes, last)
    if shape is None or inside is None:
        return False

    def operand(tensor: Tensor) -> Tensor | None:
        sizes = shapes.shape(tensor)
        if sizes is None or 0 in sizes:  # which a Reshape would keep
            return None
        if len(sizes) < len(shape):  # it broadcasts over the new axes as it is
            return tensor
        return write_views(graph, shapes, tensor, (View(None, _with_heads(sizes)),), f"{tensor.name}_of_one_head")

    result = NewAxes(graph, shapes, inside, _with_heads, operand, "of_one_head").of(end)
    if result is None:
        return False
    made = write_views(graph, shapes, result, (View(None, shape),), f"{end.name}_without_heads")
    return made is not None and graph.replace(end, made)


def _with_heads(shape: Shape) -> Shape:
    """Return a shape of two or three axes with one for heads before the last two, and one for the batch."""
    batch: Shape = (1,) if len(shape) < RANK - 1 else shape[:1]
    return (*batch, 1, *shape[-2:])
