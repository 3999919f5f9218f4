"""Give products of merged rows, (batch * heads, groups * queries, columns), an axis for each of the merged ones.

Grouped-query attention as Einsum("btkgh,bskh->bkgts") is decomposed by tf2onnx into products of three axes: batch and
key heads are merged, and so are the queries of all heads that share a key head.  This pass writes the products with the
axes (batch, key heads, groups, queries, columns), and keys and values with an axis of size 1 for the groups.
"""

from __future__ import annotations

from typing import Final

from onnxfuse.algebra.sizes import Shape, product
from onnxfuse.analysis.scores import computes_probabilities, softmaxes_after
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, op_of
from onnxfuse.passes.compose_views import View, farthest_view, write_scalings, write_views
from onnxfuse.passes.emit import write
from onnxfuse.passes.graph_pass import graph_pass

RANK: Final = 3  # rank of the products whose axes are split


@graph_pass(opset=7)  # from this opset on, broadcasting aligns the last axes
def split_merged_rows(graph: Graph, shapes: ShapeInfo) -> int:
    """Rewrite products of an attention on three axes whose rows are split after them; return their number."""
    products = [node for node in graph.nodes if node.op == "MatMul" and shapes.rank(node.outputs[0]) == RANK]
    return sum(_rewrite(graph, shapes, node) for node in products)


def _rewrite(graph: Graph, shapes: ShapeInfo, merged: Node) -> bool:
    """Write a product with more axes where a Reshape after it splits its rows; return whether that was possible."""
    left, right, out = *merged.inputs, merged.outputs[0]
    reader, a, b, shape = graph.sole_consumer(out), *(shapes.shape(each) for each in (left, right, out))
    split = None if reader is None or op_of(reader) != "Reshape" else shapes.shape(reader.outputs[0])
    if reader is None or split is None or a is None or b is None or shape is None or len(a) != len(b):
        return False
    batch, rows = _axes(shape, split)
    read = farthest_view(shapes, left, View(None, (*batch, *rows, a[-1]))) if len(rows) > 1 else None
    if read is None or not (softmaxes_after(reader.outputs[0]) or computes_probabilities(read[0])):
        return False
    operands = [
        _viewed(shapes, left, (*batch, *rows, a[-1])),
        _viewed(shapes, right, (*batch, *[1] * (len(rows) - 1), *b[-2:])),
    ]
    known = [each for each in operands if each is not None]
    made = write(shapes, "MatMul", known, f"{out.name}_rows") if len(known) == len(operands) else None
    result = None if made is None else write_views(shapes, made, (View(None, split),), f"{out.name}_split")
    return result is not None and graph.replace(reader.outputs[0], result)


def _axes(shape: Shape, split: Shape) -> tuple[Shape, Shape]:
    """Return the axes that a Reshape to `split` makes of the first axis, and of the second; () where it merges axes."""
    for i in range(1, len(split)):
        for j in range(i + 1, len(split)):
            if (product(split[:i]), product(split[i:j]), product(split[j:])) == shape and 1 not in split[:j]:
                return split[:i], split[i:j]
    return (), ()


def _viewed(shapes: ShapeInfo, tensor: Tensor, shape: Shape) -> Tensor | None:
    """Return the tensor with this shape, by views of the earliest tensor that need no computed target."""
    found = farthest_view(shapes, tensor, View(None, shape))
    made = None if found is None else write_views(shapes, found[0], found[1], f"{tensor.name}_split")
    return None if found is None or made is None else write_scalings(shapes, made, found[2])
