"""Join the two groups of keys that an attention reads apart, such as global tokens and those of a block (Pegasus-X).

Such a model joins the scores of both groups for one Softmax, cuts its probabilities, multiplies each part by the values
of its group, and adds both products.  This pass joins keys and values instead, so that one product computes the scores
and one reads the probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.algebra.operators import SLICING
from onnxfuse.analysis.scores import is_of_last_axis, nodes_before
from onnxfuse.analysis.shape_info import CannotInfer, ShapeInfo
from onnxfuse.analysis.slice_ranges import slice_ranges
from onnxfuse.ir.attributes import int_attribute
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, consumers, op_of, producer
from onnxfuse.passes.emit import joined_sizes, sizes_along, write
from onnxfuse.passes.graph_pass import graph_pass


@graph_pass(opset=13)  # from this opset on, Softmax is over one axis
def join_key_groups(graph: Graph, shapes: ShapeInfo) -> int:
    """Join the keys and the values of attentions over two groups; return the number of attentions."""
    sums = [node for node in graph.nodes if op_of(node) == "Add"]
    return sum(_rewrite(graph, shapes, node) for node in sums)


def _rewrite(graph: Graph, shapes: ShapeInfo, add: Node) -> bool:
    """Join the groups of the attention whose result is a sum; return whether that was possible."""
    products = _products_of_parts(graph, shapes, add)
    cut = producer(products[0].inputs[0]) if products else None
    softmax = producer(cut.inputs[0]) if cut is not None else None
    if cut is None or softmax is None or graph.scores.name(softmax) in graph.scores.stay:
        return False
    scores = next((node for node in nodes_before(softmax.inputs[0]) if _joins_scores(shapes, node)), None)
    first = [producer(each) for each in scores.inputs] if scores is not None else []
    keys = _joined(shapes, [node.inputs[1] for node in first if node is not None], -1)
    values = _joined(shapes, [node.inputs[1] for node in products], -2)
    if scores is None or first[0] is None or keys is None or values is None:
        return False
    end, result = scores.outputs[0], add.outputs[0]
    made = write(shapes, "MatMul", [first[0].inputs[0], keys], f"{end.name}_joined")
    context = write(shapes, "MatMul", [cut.inputs[0], values], f"{result.name}_joined")
    return graph.replace(end, made) and graph.replace(result, context)


def _products_of_parts(graph: Graph, shapes: ShapeInfo, add: Node) -> list[Node]:
    """Return the two products of a sum that read all probabilities of a Softmax in two parts, in order; else none."""
    products = [node for each in add.inputs if (node := producer(each)) is not None and op_of(node) == "MatMul"]
    cuts = [node for each in products if (node := producer(each.inputs[0])) is not None and op_of(node) in SLICING]
    if len(cuts) != 2 or cuts[0].inputs[0] is not cuts[1].inputs[0]:
        return []
    probabilities = cuts[0].inputs[0]
    softmax, shape = producer(probabilities), shapes.shape(probabilities)
    if softmax is None or op_of(softmax) != "Softmax" or shape is None or not {*consumers(probabilities)} <= {*cuts}:
        return []
    try:
        last = len(shape) - 1
        ranges = [slice_ranges(shapes, cut, each.inputs[0]) for cut, each in zip(cuts, products, strict=True)]
        parts = sorted(zip((each.pop(last) for each in ranges), (0, 1), strict=True))
    except (CannotInfer, KeyError):
        return []
    (start, count), (cut_at, rest) = parts[0][0], parts[1][0]
    is_whole = start == 0 and count == cut_at and cut_at + rest == shape[-1] and not any(ranges)
    is_alone = all(graph.sole_consumer(each.outputs[0]) is add for each in products)
    return (
        [products[i] for _, i in parts] if is_whole and is_alone and is_of_last_axis(graph, softmax, last + 1) else []
    )


def _joins_scores(shapes: ShapeInfo, node: Node) -> bool:
    """Return whether a node joins two products of the same queries, which nothing else reads, along the last axis."""
    if op_of(node) != "Concat" or int_attribute(node, "axis") not in (-1, (shapes.rank(node.outputs[0]) or 0) - 1):
        return False
    products = [producer(each) for each in node.inputs]
    return (
        len(products) == 2
        and all(each is not None and op_of(each) == "MatMul" for each in products)
        and len({id(each.inputs[0]) for each in products if each is not None}) == 1
        and all([*consumers(each)] == [node] for each in node.inputs)
    )


def _joined(shapes: ShapeInfo, groups: Sequence[Tensor], axis: int) -> Tensor | None:
    """Return two groups, joined along an axis, after they were expanded to the same batches; None if batches differ."""
    found = [shape for each in groups if (shape := shapes.shape(each)) is not None]
    if len(found) != 2 or len(found[0]) != len(found[1]):
        return None
    if any(1 not in sizes and sizes[0] != sizes[1] for sizes in zip(found[0][:-2], found[1][:-2], strict=True)):
        return None
    stem = f"{groups[1].name}_joined"
    made = [_expanded(shapes, each, like, stem) for each, like in (groups, groups[::-1])]
    return write(shapes, "Concat", made, stem, {"axis": axis + len(found[0])})


def _expanded(shapes: ShapeInfo, group: Tensor, like: Tensor, stem: str) -> Tensor:
    """Return a group whose batches of size 1 are expanded to those of another group."""
    target: list[int | Tensor] = []
    for i, (size, wanted) in enumerate(zip(shapes.shape(group) or (), shapes.shape(like) or (), strict=True)):
        is_wide = size == 1 != wanted and i < (shapes.rank(group) or 0) - 2
        known = wanted if isinstance(wanted, int) else sizes_along(shapes, like, [i], stem) if is_wide else 1
        target.append(known if is_wide else 1)
    if all(isinstance(each, int) and each == 1 for each in target):
        return group
    return write(shapes, "Expand", [group, joined_sizes(shapes, target, stem)], stem)
