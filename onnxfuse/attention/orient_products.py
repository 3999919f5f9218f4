"""Write an attention that is computed transposed with a row for each query, as patterns know it.

Models whose keys and values are images multiply values by transposed probabilities: `v p^T` is the transpose of
`p v^T`.  Some compute the scores with a row for each key, `k q^T`, and take the Softmax over the rows, or transpose
them before it.  Here the Softmax is over the last axis, the scores are `q k^T`, and the probabilities stand on the
left of the values; what is transposed for that are queries, keys, values and the result, whose views compose.
"""

from __future__ import annotations

from functools import partial

from onnxfuse.analysis.scores import ELEMENTWISE, MAX_STEPS, computes_probabilities, nodes_before
from onnxfuse.analysis.shape_info import Shape, ShapeInfo
from onnxfuse.attention.new_axes import NewAxes
from onnxfuse.ir.attributes import int_attribute, ints_attribute
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, consumers, op_of, producer
from onnxfuse.passes.compose_views import View, write_views
from onnxfuse.passes.emit import emit
from onnxfuse.passes.graph_pass import graph_pass


@graph_pass(opset=13)  # whose Softmax is of one axis
def orient_products(graph: Graph, shapes: ShapeInfo) -> int:
    """Give scores, probabilities and the product with values a row for each query.  Returns the number of rewrites."""
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
    """Take a Softmax over the rows of scores over the last axis of the transposed scores; return whether it was one."""
    result, shape = softmax.outputs[0], shapes.shape(softmax.inputs[0])
    axis = int_attribute(softmax, "axis", -1)
    if shape is None or axis not in (-2, len(shape) - 2) or not _is_read_by_column(graph, shapes, result):
        return False
    rows = _scores_of_rows(graph, shapes, softmax.inputs[0])
    if rows is None:
        return False
    stem, dtype = f"{result.name}_of_rows", shapes.dtype(result)
    made = emit(graph, shapes, "Softmax", [rows], stem, _swapped_shape(shape), dtype, {"axis": -1})
    graph.scores.begun[made.name] = graph.scores.name(softmax)
    return graph.replace(result, _swapped(graph, shapes, made))


def _is_read_by_column(graph: Graph, shapes: ShapeInfo, probabilities: Tensor) -> bool:
    """Return whether only products that sum over the rows of probabilities read them."""
    return not graph.is_kept(probabilities) and all(
        _is_swap(shapes, reader) or (op_of(reader) == "MatMul" and reader.inputs[0] is not probabilities)
        for reader in consumers(probabilities)
    )


def _probabilities_first(graph: Graph, shapes: ShapeInfo, product: Node) -> bool:
    """Write `x p^T` as the transpose of `p x^T`, where p are probabilities; return whether the product was one."""
    left, right = product.inputs
    swap, result = producer(right), product.outputs[0]
    shape, rank, columns = shapes.shape(result), shapes.rank(left), shapes.shape(right)
    if swap is None or shape is None or rank is None or columns is None or rank < 2:
        return False
    is_one = columns[-2:] == (1, 1)  # the transpose of itself
    probabilities = swap.inputs[0] if _is_swap(shapes, swap) else right if is_one else None
    if probabilities is None or not computes_probabilities(probabilities) or computes_probabilities(left):
        return False
    inputs, stem = [probabilities, _swapped(graph, shapes, left)], f"{result.name}_of_rows"
    made = emit(graph, shapes, "MatMul", inputs, stem, _swapped_shape(shape), shapes.dtype(result))
    return graph.replace(result, _swapped(graph, shapes, made))


def _product_of_rows(graph: Graph, shapes: ShapeInfo, swap: Node) -> bool:
    """Compute what a Transpose reads in the order in which it is read; return whether it is computed from a product."""
    rows = _scores_of_rows(graph, shapes, swap.inputs[0])
    return rows is not None and graph.replace(swap.outputs[0], rows)


def _scores_of_rows(graph: Graph, shapes: ShapeInfo, scores: Tensor) -> Tensor | None:
    """Return scores with their last two axes swapped, computed in that order; None where they are of no product."""
    inside: dict[int, Node] = {}
    if not _find_product(graph, shapes, scores, inside):
        return None
    swapped = partial(_swapped, graph, shapes)
    return NewAxes(graph, shapes, inside, _swapped_shape, swapped, "of_rows", is_transposed=True).of(scores)


def _find_product(
    graph: Graph, shapes: ShapeInfo, tensor: Tensor, inside: dict[int, Node], steps: int = MAX_STEPS
) -> bool:
    """Return whether a tensor that nothing else reads is a product of scores, or computed from one by elements.

    The nodes that compute it from the product, as far as the first swap, are added to `inside`.
    """
    node, rank = producer(tensor), shapes.rank(tensor)
    if node is None or not steps or rank is None or rank < 2 or graph.sole_consumer(tensor) is None:
        return False
    if _is_swap(shapes, node):
        return _find_product(graph, shapes, node.inputs[0], {}, steps - 1)
    if op_of(node) == "MatMul":
        found = all((shapes.rank(each) or 0) >= 2 for each in node.inputs) and not computes_probabilities(
            node.inputs[0]
        )
    else:
        known = all(not each.name or shapes.rank(each) is not None for each in node.inputs)
        operands = node.inputs if known and op_of(node) in ELEMENTWISE else []
        lead = [_find_product(graph, shapes, each, inside, steps - 1) for each in operands]  # all of them are recorded
        found = any(lead)
    if found:
        inside[id(tensor)] = node
    return found


def _swapped_shape(shape: Shape) -> Shape:
    return (*shape[:-2], shape[-1], shape[-2])


def _swapped(graph: Graph, shapes: ShapeInfo, tensor: Tensor) -> Tensor:
    """Return a tensor with its last two axes swapped; a vector becomes a column, and a number stays."""
    node, shape = producer(tensor), shapes.shape(tensor)
    if not tensor.name or not shape:
        return tensor
    if node is not None and _is_swap(shapes, node):
        return node.inputs[0]
    stem, rank = f"{tensor.name}_of_rows", len(shape)
    view = View((*range(rank - 2), rank - 1, rank - 2), _swapped_shape(shape)) if rank > 1 else View(None, (*shape, 1))
    made = write_views(graph, shapes, tensor, (view,), stem)
    assert made is not None  # neither a Transpose nor an Unsqueeze needs a computed target
    return made


def _is_swap(shapes: ShapeInfo, node: Node) -> bool:
    """Return whether a node is a Transpose of the last two axes."""
    rank = shapes.rank(node.outputs[0])
    if op_of(node) != "Transpose" or rank is None or rank < 2:
        return False
    perm = ints_attribute(node, "perm") or [*range(rank)][::-1]
    return list(perm) == [*range(rank - 2), rank - 1, rank - 2]
