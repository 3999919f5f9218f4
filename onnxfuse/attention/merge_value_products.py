"""Merge several products of the same probabilities with values into one product.

DiffLlama weights two halves of its values by the same probabilities, which are then computed once and read twice.
A fused attention has one product with values, so the values are joined along their last axis and the result is sliced.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Final

from onnxfuse.algebra.sizes import Shape
from onnxfuse.analysis.scores import RANK
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.dtypes import FUSIBLE_FLOATS
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, consumers, op_of, producer
from onnxfuse.passes.emit import integers, unsqueezed, write
from onnxfuse.passes.graph_pass import graph_pass

MAX_SIZE: Final = 256  # maximum number of elements per head of values that attention kernels support


@graph_pass(opset=13)  # from this opset on, the axes of Unsqueeze are an input
def merge_value_products(graph: Graph, shapes: ShapeInfo) -> int:
    """Merge the products of each tensor of probabilities.  Returns the number of such tensors."""
    ends = [node.outputs[0] for node in graph.nodes if _is_probabilities(node)]
    return sum(_rewrite(graph, shapes, each) for each in ends)


def _is_probabilities(node: Node) -> bool:
    """Return whether a node is a Softmax, or a Where that replaces NaN in the result of a Softmax."""
    if op_of(node) == "Where":
        return any((made := producer(each)) is not None and op_of(made) == "Softmax" for each in node.inputs[1:])
    return op_of(node) == "Softmax"


def _rewrite(graph: Graph, shapes: ShapeInfo, probabilities: Tensor) -> bool:
    """Merge the products that read probabilities; return whether that was possible."""
    products = consumers(probabilities)
    are_first = all(op_of(node) == "MatMul" and node.inputs[0] is probabilities for node in products)
    if len(products) < 2 or not are_first or graph.is_kept(probabilities):
        return False
    values = [node.inputs[1] for node in products]
    found = [shapes.shape(each) for each in (probabilities, *values)]
    known: list[Shape] = [shape for shape in found if shape is not None and len(shape) == RANK]
    if len(known) < len(found) or shapes.dtype(probabilities) not in FUSIBLE_FLOATS:
        return False
    first, sizes = known[1], [shape[-1] for shape in known[1:]]
    numbers = [size for size in sizes if isinstance(size, int)]
    if len(numbers) < len(sizes) or sum(numbers) > MAX_SIZE or any(shape[:-1] != first[:-1] for shape in known[1:]):
        return False
    stem, total = f"{probabilities.name}_values", sum(numbers)
    joined = _joined(graph, shapes, values, stem, total)
    context = write(shapes, "MatMul", [probabilities, joined], f"{stem}_product")
    cuts = [integers(graph, f"{stem}_cut", [offset]) for offset in (0, *accumulate(numbers))]
    axis = integers(graph, f"{stem}_axis", [RANK - 1])
    for output, ends in zip([node.outputs[0] for node in products], pairwise(cuts), strict=True):
        graph.replace(output, write(shapes, "Slice", [context, *ends, axis], f"{output.name}_part"))
    return True


def _joined(graph: Graph, shapes: ShapeInfo, values: list[Tensor], stem: str, total: int) -> Tensor:
    """Return values joined along the last axis.

    If all values repeat their heads equally often, the tensors before the repetition are joined, and then the heads are
    repeated.
    """
    sources = [_unrepeated(shapes, each) for each in values]
    known = [source for source in sources if source is not None]
    counts = {found[1] for source in known if (found := shapes.shape(source)) is not None}
    kv_heads, heads = next(iter(counts), 0), (shapes.shape(values[0]) or (0,) * RANK)[1]
    is_grouped = len(known) == len(values) and len(counts) == 1
    if not is_grouped or not isinstance(kv_heads, int) or not isinstance(heads, int):
        return write(shapes, "Concat", values, stem, {"axis": RANK - 1})
    made = write(shapes, "Concat", known, stem, {"axis": RANK - 1})
    made = unsqueezed(shapes, made, [2], f"{stem}_apart")
    repeats = integers(graph, f"{stem}_repeats", [1, 1, heads // kv_heads, 1, 1])
    made = write(shapes, "Expand", [made, repeats], f"{stem}_repeated")
    return write(shapes, "Reshape", [made, integers(graph, f"{stem}_shape", [0, heads, -1, total])], stem)


def _unrepeated(shapes: ShapeInfo, values: Tensor) -> Tensor | None:
    """Return the tensor from which `values` are made by repeating each head several times; None if there is none."""
    tensor, found = values, []
    for op in ("Reshape", "Expand", "Unsqueeze"):
        node = producer(tensor)
        if node is None or op_of(node) != op:
            return None
        tensor = node.inputs[0]
        found.append(shapes.shape(tensor))
    repeated, apart, source = found
    whole = shapes.shape(values)
    if repeated is None or apart is None or source is None or whole is None or len(source) != RANK:
        return None
    batch, heads, rows, size = source
    is_usual = apart == (batch, heads, 1, rows, size) and (*repeated[:2], *repeated[3:]) == source
    return tensor if is_usual and whole == (batch, heads * repeated[2], rows, size) else None
