"""Write scores times a mask, plus a number where that is 0, as a Where: `scores * mask - 10000 * (1 - mask)` (GPT).

A mask of 0 and 1 leaves a finite score as it is or makes 0 of it, and the addend is 0 or the number.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from onnx import TensorProto
from onnx.helper import tensor_dtype_to_np_dtype

from onnxfuse.analysis.magnitudes import holds_zero_or_one
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.dtypes import FUSIBLE_FLOATS
from onnxfuse.ir.graph import Graph, constant_number
from onnxfuse.ir.node import Node, Tensor, op_of, producer
from onnxfuse.passes.emit import emit, write


class Affine(NamedTuple):
    """A tensor times a number, plus another one."""

    tensor: Tensor
    factor: float = 1.0
    offset: float = 0.0


def fill_masked_sum(graph: Graph, shapes: ShapeInfo, total: Node) -> bool:
    """Write a sum of masked scores and a number as a Where; return whether it is one."""
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
            if shapes.shape(scores) == shape and holds_zero_or_one(shapes, mask):
                stem = f"{end.name}_filled"
                keep = write(graph, shapes, "Cast", [mask], f"{stem}_mask", {"to": TensorProto.BOOL})
                number = graph.constant(f"{stem}_number", np.array(fill.offset, tensor_dtype_to_np_dtype(dtype)))
                inputs = [keep, scores, number]
                return graph.replace(end, emit(graph, shapes, "Where", inputs, stem, shape, dtype))
    return False


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
