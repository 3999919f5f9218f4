"""Write an attention that is computed transposed with a row for each query, as patterns know it.

Models whose keys and values are images multiply values by transposed probabilities: `v p^T` is the transpose of
`p v^T`.  Some compute the scores with a row for each key, `k q^T`, and take the Softmax over the rows, or transpose
them in front of it.  Here the Softmax is over the last axis, the scores are `q k^T`, and the probabilities stand on the
left of the values; what is transposed for that are queries, keys, values and the result, whose views compose.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import int_attribute, ints_attribute
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, consumers, op_of, producer
from onnxfuse.passes.attention_nodes import ELEMENTWISE, computes_probabilities
from onnxfuse.passes.compose_views import View, write_views
from onnxfuse.passes.emit import emit
from onnxfuse.passes.graph_pass import graph_pass

MAX_STEPS: Final = 12  # from the Softmax to the product


@graph_pass(opset=13)  # whose Softmax is of one axis
def orient_products(graph: Graph, shapes: ShapeInfo) -> int:
    """Give scores, probabilities and the product with values a row for each query.  Returns the number of rewrites."""
    count = 0
    for node in list(graph.nodes):
        if op_of(node) == "Softmax":
            count += _over_last_axis(graph, shapes, node)
            count += sum(_product_of_rows(graph, shapes, each) for each in list(_swaps_behind(shapes, node.inputs[0])))
        elif op_of(node) == "MatMul":
            count += _probabilities_first(graph, shapes, node)
    return count


def _over_last_axis(graph: Graph, shapes: ShapeInfo, softmax: Node) -> bool:
    """Take a Softmax over the rows of scores over the last axis of the transposed scores; return whether it was one."""
    scores, result = softmax.inputs[0], softmax.outputs[0]
    shape = shapes.shape(scores)
    axis = int_attribute(softmax, "axis", -1)
    if shape is None or axis not in (-2, len(shape) - 2) or not _is_read_by_column(graph, shapes, result):
        return False
    if not _leads_to_product(graph, shapes, scores, MAX_STEPS):
        return False
    rows = _rewritten(graph, shapes, scores)
    stem, dtype = f"{result.name}_of_rows", shapes.dtype(result)
    made = emit(graph, shapes, "Softmax", [rows], stem, (*shape[:-2], shape[-1], shape[-2]), dtype, {"axis": -1})
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
    made = emit(graph, shapes, "MatMul", inputs, stem, (*shape[:-2], shape[-1], shape[-2]), shapes.dtype(result))
    return graph.replace(result, _swapped(graph, shapes, made))


def _swaps_behind(shapes: ShapeInfo, tensor: Tensor, steps: int = MAX_STEPS) -> Iterator[Node]:
    """Yield the Transposes of the last two axes that a tensor is computed from element by element."""
    node = producer(tensor)
    if node is not None and steps:
        if _is_swap(shapes, node):
            yield node
        elif op_of(node) in ELEMENTWISE:
            for each in node.inputs:
                yield from _swaps_behind(shapes, each, steps - 1)


def _product_of_rows(graph: Graph, shapes: ShapeInfo, swap: Node) -> bool:
    """Compute what a Transpose reads in the order in which it is read; return whether it is computed from a product."""
    source, result = swap.inputs[0], swap.outputs[0]
    if not _leads_to_product(graph, shapes, source, MAX_STEPS):
        return False
    return graph.replace(result, _rewritten(graph, shapes, source))


def _leads_to_product(graph: Graph, shapes: ShapeInfo, tensor: Tensor, steps: int) -> bool:
    """Return whether a tensor that nothing else reads is a product of scores, or computed from one by elements."""
    node, rank = producer(tensor), shapes.rank(tensor)
    if node is None or not steps or rank is None or rank < 2 or graph.sole_consumer(tensor) is None:
        return False
    if op_of(node) == "MatMul":
        return all((shapes.rank(each) or 0) >= 2 for each in node.inputs) and not computes_probabilities(node.inputs[0])
    if op_of(node) not in ELEMENTWISE and not _is_swap(shapes, node):
        return False
    known = all(not each.name or shapes.rank(each) is not None for each in node.inputs)
    return known and any(_leads_to_product(graph, shapes, each, steps - 1) for each in node.inputs)


def _rewritten(graph: Graph, shapes: ShapeInfo, tensor: Tensor) -> Tensor:
    """Return what a tensor that leads to a product is with its last two axes swapped, computed in that order."""
    node, shape = producer(tensor), shapes.shape(tensor)
    assert node is not None and shape is not None
    if _is_swap(shapes, node):
        return node.inputs[0]
    inputs = [
        _rewritten(graph, shapes, each)
        if op_of(node) != "MatMul" and _leads_to_product(graph, shapes, each, MAX_STEPS)
        else _swapped(graph, shapes, each)
        for each in node.inputs
    ]
    if op_of(node) == "MatMul":
        inputs.reverse()
    swapped, stem = (*shape[:-2], shape[-1], shape[-2]), f"{tensor.name}_of_rows"
    return emit(graph, shapes, op_of(node), inputs, stem, swapped, shapes.dtype(tensor), node.attrs)


def _swapped(graph: Graph, shapes: ShapeInfo, tensor: Tensor) -> Tensor:
    """Return a tensor with its last two axes swapped; a vector becomes a column, and a number stays."""
    node, shape = producer(tensor), shapes.shape(tensor)
    if not tensor.name or not shape:
        return tensor
    if node is not None and _is_swap(shapes, node):
        return node.inputs[0]
    stem = f"{tensor.name}_of_rows"
    if len(shape) == 1:
        made = write_views(graph, shapes, tensor, (View(None, (shape[0], 1)),), stem)
        assert made is not None  # an Unsqueeze needs no computed target
        return made
    perm = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
    return emit(
        graph, shapes, "Transpose", [tensor], stem, tuple(shape[i] for i in perm), shapes.dtype(tensor), {"perm": perm}
    )


def _is_swap(shapes: ShapeInfo, node: Node) -> bool:
    """Return whether a node is a Transpose of the last two axes."""
    rank = shapes.rank(node.outputs[0])
    if op_of(node) != "Transpose" or rank is None or rank < 2:
        return False
    perm = ints_attribute(node, "perm") or [*range(rank)][::-1]
    return list(perm) == [*range(rank - 2), rank - 1, rank - 2]
