"""Write scores times a mask, plus a number where that is 0, as a Where: `scores * mask - 10000 * (1 - mask)` (GPT).

A mask of 0 and 1 leaves a finite score as it is or makes 0 of it, and what is added is 0 or the number.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
from onnx import TensorProto
from onnx.helper import tensor_dtype_to_np_dtype

from onnxfuse.algebra.operators import VIEWS
from onnxfuse.analysis.scores import MAX_STEPS, nodes_before, softmaxes_of_attention
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.errors import ModelError
from onnxfuse.ir.dtypes import FUSIBLE_FLOATS
from onnxfuse.ir.graph import Graph, constant_number, constant_value
from onnxfuse.ir.node import Node, Tensor, is_constant, op_of, producer
from onnxfuse.passes.emit import emit
from onnxfuse.passes.graph_pass import graph_pass

MAX_ELEMENTS: Final = 2**22  # of a constant that is read
KEEPING_ELEMENTS: Final = VIEWS | {"Slice", "Trilu"}


class Affine(NamedTuple):
    """A tensor times a number, plus another one."""

    tensor: Tensor
    factor: float = 1.0
    offset: float = 0.0


@graph_pass(opset=9)  # whose Where broadcasts
def canonicalize_masked_sums(graph: Graph, shapes: ShapeInfo) -> int:
    """Rewrite such sums in front of every Softmax.  Returns their number."""
    count = 0
    for node in softmaxes_of_attention(graph):
        if any(op_of(each) == "Add" and _rewrite(graph, shapes, each) for each in nodes_before(node.inputs[0])):
            graph.scores.done.add(graph.scores.name(node))
            count += 1
    return count


def _rewrite(graph: Graph, shapes: ShapeInfo, total: Node) -> bool:
    """Write a sum as a Where; return whether it is that of masked scores and a number."""
    end = total.outputs[0]
    dtype, shape = shapes.dtype(end), shapes.shape(end)
    for product, addend in (total.inputs, total.inputs[::-1]):
        node = producer(product)
        if node is None or op_of(node) != "Mul" or dtype not in FUSIBLE_FLOATS or shape is None:
            continue
        fill = _affine(graph, addend)
        for scores, mask in (node.inputs, node.inputs[::-1]):
            if mask is not fill.tensor or fill.factor != -fill.offset or not math.isfinite(fill.offset):
                continue
            if shapes.shape(scores) == shape and _is_zero_or_one(graph, shapes, mask, MAX_STEPS):
                return graph.replace(end, _filled(graph, shapes, end, scores, mask, fill.offset))
    return False


def _filled(graph: Graph, shapes: ShapeInfo, end: Tensor, scores: Tensor, mask: Tensor, number: float) -> Tensor:
    """Return scores, and a number where a mask is 0."""
    stem, dtype, to_bool = f"{end.name}_filled", shapes.dtype(end), {"to": TensorProto.BOOL}
    keep = emit(graph, shapes, "Cast", [mask], f"{stem}_mask", shapes.shape(mask), TensorProto.BOOL, to_bool)
    stored = graph.constant(f"{stem}_number", np.array(number, tensor_dtype_to_np_dtype(dtype)))
    return emit(graph, shapes, "Where", [keep, scores, stored], stem, shapes.shape(end), dtype)


def _affine(graph: Graph, tensor: Tensor) -> Affine:
    """Return the farthest tensor of which another one is a multiple plus a number."""
    node = producer(tensor)
    if node is not None and op_of(node) == "Neg":
        source, factor, offset = _affine(graph, node.inputs[0])
        return Affine(source, -factor, -offset)
    if node is None or op_of(node) not in ("Add", "Mul", "Sub"):
        return Affine(tensor)
    for side in (0, 1):
        number = constant_number(graph, node.inputs[1 - side])
        if number is not None:
            source, factor, offset = _affine(graph, node.inputs[side])
            if op_of(node) == "Mul":
                return Affine(source, factor * number, offset * number)
            if op_of(node) == "Add":
                return Affine(source, factor, offset + number)
            return Affine(source, factor, offset - number) if side == 0 else Affine(source, -factor, number - offset)
    return Affine(tensor)


def _is_zero_or_one(graph: Graph, shapes: ShapeInfo, tensor: Tensor, steps: int) -> bool:
    """Return whether each element of a tensor is 0 or 1: stored ones, and what a Cast makes of booleans."""
    if is_constant(tensor):
        if math.prod(tensor.shape) > MAX_ELEMENTS:
            return False
        try:
            values = constant_value(graph, tensor)
        except ModelError:  # the file with its data cannot be read
            return False
        return values.dtype.kind in "fiu" and bool(np.all((values == 0) | (values == 1)))
    node = producer(tensor)
    if node is None or not steps:
        return False
    if op_of(node) == "Cast" and shapes.dtype(node.inputs[0]) == TensorProto.BOOL:
        return True
    return op_of(node) in (*KEEPING_ELEMENTS, "Cast") and _is_zero_or_one(graph, shapes, node.inputs[0], steps - 1)
