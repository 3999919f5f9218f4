"""Move integers instead of floats, where an operator moves dequantized elements that are then quantized again.

The results are equal, because the QuantizeLinear undoes the DequantizeLinear for each element.  A MaxPool selects the
integer whose dequantized value is the largest, which is the largest integer, because the scale is positive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from onnx import TensorProto

from onnxfuse.algebra.operators import REARRANGING
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, op_of, producer
from onnxfuse.passes.graph_pass import graph_pass

INTEGERS: Final = (TensorProto.INT8, TensorProto.UINT8)
# By the dtype of the scale: with a scale between these limits, an integer that is dequantized and quantized again is
# the same integer.
SCALES: Final[Mapping[int, tuple[float, float]]] = {
    TensorProto.FLOAT: (1e-30, 1e36),
    TensorProto.FLOAT16: (1e-7, 128.0),
}
# Operators that move elements, with a kernel of onnxruntime for uint8 on CUDA -> the first opset in which they take it.
SINCE: Final[Mapping[str, int]] = {
    **dict.fromkeys((*REARRANGING, "Concat", "Expand", "Gather", "Slice"), 1), "MaxPool": 12, "Resize": 10,
}  # fmt: skip


@graph_pass()
def move_integers(graph: Graph, shapes: ShapeInfo) -> int:
    """Replace each operator that moves dequantized integers, if its result is quantized again, by one on integers."""
    count = 0
    for node in [each for each in graph.nodes if op_of(each) == "QuantizeLinear"]:
        moving = producer(node.inputs[0])
        if moving is None or graph.opset < SINCE.get(op_of(moving), math.inf):
            continue
        if not _takes_integers(moving, shapes.dtype(node.outputs[0])):
            continue
        moved = moving.inputs if op_of(moving) == "Concat" else moving.inputs[:1]
        sources = [producer(tensor) for tensor in moved]
        found = [each for each in sources if each is not None and op_of(each) == "DequantizeLinear"]
        is_read_here = len(moving.outputs) == 1 and graph.sole_consumer(moving.outputs[0]) is node
        if is_read_here and len(found) == len(moved) and all(_undoes(graph, shapes, node, each) for each in found):
            others = moving.inputs[len(moved) :]
            graph.rewrite(node, op_of(moving), [*(each.inputs[0] for each in found), *others], moving.attrs)
            count += 1
    return count


def _takes_integers(node: Node, dtype: int) -> bool:
    """Return whether an operator moves integers of `dtype`: a MaxPool any, others uint8, a Resize only the nearest.

    On CPUs, onnxruntime 1.32 writes int8 as uint8 before it fuses operators on integers, but only where a
    DequantizeLinear directly follows its QuantizeLinear.
    """
    is_resampled = op_of(node) == "Resize" and node.attrs.get("mode", "nearest") != "nearest"
    return (dtype == TensorProto.UINT8 and not is_resampled) or op_of(node) == "MaxPool"


def _undoes(graph: Graph, shapes: ShapeInfo, quantize: Node, dequantize: Node) -> bool:
    """Return whether two quantizers have one zero point and one scale, which is within the limits of `SCALES`."""
    if len(quantize.inputs) != 3 or {*quantize.attrs, *dequantize.attrs} - {"axis"}:
        return False
    dtype, scale = shapes.dtype(quantize.outputs[0]), quantize.inputs[1]
    least, largest = SCALES.get(shapes.dtype(scale), (math.inf, 0.0))
    is_ordinary = least < (graph.number(scale) or 0.0) < largest
    is_of_integers = dtype in INTEGERS and dtype == shapes.dtype(dequantize.inputs[0])
    return is_ordinary and is_of_integers and graph.have_one_scale(quantize, dequantize)
