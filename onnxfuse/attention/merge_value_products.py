"""Multiply probabilities that several products read by all of their values at once.

DiffLlama weights two halves of its values by the same probabilities, which are then computed once and read twice.
Attention has one product with values: the values are joined along their last axis, and the result is cut.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from onnxfuse.analysis.scores import RANK
from onnxfuse.analysis.shape_info import Shape, ShapeInfo
from onnxfuse.ir.dtypes import FUSIBLE_FLOATS
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, consumers, op_of, producer
from onnxfuse.passes.emit import emit
from onnxfuse.passes.graph_pass import graph_pass

MAX_SIZE: Final = 256  # elements of a head of values that kernels of attention take


@graph_pass(opset=13)  # whose Unsqueeze has axes as an input
def merge_value_products(graph: Graph, shapes: ShapeInfo) -> int:
    """Rewrite products of the same probabilities as one.  Returns the number of probabilities."""
    ends = [node.outputs[0] for node in graph.nodes if _is_probabilities(node)]
    return sum(_rewrite(graph, shapes, each) for each in ends)


def _is_probabilities(node: Node) -> bool:
    """Return whether a node is a Softmax, or replaces the NaNs of one."""
    if op_of(node) == "Where":
        return any((made := producer(each)) is not None and op_of(made) == "Softmax" for each in node.inputs[1:])
    return op_of(node) == "Softmax"


def _rewrite(graph: Graph, shapes: ShapeInfo, probabilities: Tensor) -> bool:
    """Join the products that read probabilities; return whether that was possible."""
    products = consumers(probabilities)
    are_first = all(op_of(node) == "MatMul" and node.inputs[0] is probabilities for node in products)
    if len(products) < 2 or not are_first or graph.is_kept(probabilities):
        return False
    values = [node.inputs[1] for node in products]
    found = [shapes.shape(each) for each in (probabilities, *values)]
    known: list[Shape] = [shape for shape in found if shape is not None and len(shape) == RANK]
    if len(known) < len(found) or shapes.dtype(probabilities) not in FUSIBLE_FLOATS:
        return False
    rows, first, sizes = known[0], known[1], [shape[-1] for shape in known[1:]]
    numbers = [size for size in sizes if isinstance(size, int)]
    if len(numbers) < len(sizes) or sum(numbers) > MAX_SIZE or any(shape[:-1] != first[:-1] for shape in known[1:]):
        return False
    stem, dtype, total = f"{probabilities.name}_values", shapes.dtype(probabilities), sum(numbers)
    joined = _joined(graph, shapes, values, stem, (*first[:-1], total))
    context = emit(graph, shapes, "MatMul", [probabilities, joined], f"{stem}_product", (*rows[:-1], total), dtype)
    offsets = np.cumsum([0, *numbers]).tolist()
    axis = graph.constant(f"{stem}_axis", np.array([RANK - 1], np.int64))
    cuts = [graph.constant(f"{stem}_cut", np.array([offset], np.int64)) for offset in offsets]
    for place, node in enumerate(products):
        output = node.outputs[0]
        inputs = [context, cuts[place], cuts[place + 1], axis]
        part = emit(graph, shapes, "Slice", inputs, f"{output.name}_part", (*rows[:-1], numbers[place]), dtype)
        graph.replace(output, part)
    return True


def _joined(graph: Graph, shapes: ShapeInfo, values: list[Tensor], stem: str, shape: Shape) -> Tensor:
    """Return values side by side; where all of them repeat heads equally often, what they repeat is joined."""
    dtype, last = shapes.dtype(values[0]), {"axis": RANK - 1}
    sources = [_unrepeated(shapes, each) for each in values]
    known = [source for source in sources if source is not None]
    counts = {found[1] for source in known if (found := shapes.shape(source)) is not None}
    kv_heads, heads, total = next(iter(counts), 0), shape[1], shape[-1]
    if len(known) < len(values) or len(counts) > 1 or not isinstance(kv_heads, int) or not isinstance(heads, int):
        return emit(graph, shapes, "Concat", values, stem, shape, dtype, last)
    batch, _, rows, _ = shape
    joined = emit(graph, shapes, "Concat", known, stem, (batch, kv_heads, rows, total), dtype, last)
    numbers = {"axis": [2], "repeats": [1, 1, heads // kv_heads, 1, 1], "shape": [0, heads, -1, total]}
    constants = {name: graph.constant(f"{stem}_{name}", np.array(each, np.int64)) for name, each in numbers.items()}
    apart = (batch, kv_heads, 1, rows, total)
    made = emit(graph, shapes, "Unsqueeze", [joined, constants["axis"]], f"{stem}_apart", apart, dtype)
    apart = (batch, kv_heads, heads // kv_heads, rows, total)
    made = emit(graph, shapes, "Expand", [made, constants["repeats"]], f"{stem}_repeated", apart, dtype)
    return emit(graph, shapes, "Reshape", [made, constants["shape"]], f"{stem}_heads", shape, dtype)


def _unrepeated(shapes: ShapeInfo, values: Tensor) -> Tensor | None:
    """Return the tensor of which values repeat each head side by side; None if they are made in another way."""
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
