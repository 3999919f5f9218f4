"""Pool the integers where a MaxPool is between a DequantizeLinear and the QuantizeLinear that undoes it.

The results are equal, because the scale is positive: the largest integer is the one with the largest dequantized value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from onnx import TensorProto

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


@graph_pass(opset=12)  # the first opset whose MaxPool takes integers
def pool_integers(graph: Graph, shapes: ShapeInfo) -> int:
    """Replace each MaxPool of dequantized integers, if its result is quantized again, by a MaxPool of the integers."""
    count = 0
    for node in [each for each in graph.nodes if op_of(each) == "QuantizeLinear"]:
        pool = producer(node.inputs[0])
        source = producer(pool.inputs[0]) if pool is not None and op_of(pool) == "MaxPool" else None
        if pool is None or source is None or op_of(source) != "DequantizeLinear":
            continue
        is_read_here = len(pool.outputs) == 1 and graph.sole_consumer(pool.outputs[0]) is node
        if is_read_here and _undoes(graph, shapes, node, source):
            graph.rewrite(node, "MaxPool", [source.inputs[0]], pool.attrs)
            count += 1
    return count


def _undoes(graph: Graph, shapes: ShapeInfo, quantize: Node, dequantize: Node) -> bool:
    """Return whether two quantizers have one zero point and one scale, which is within the limits of `SCALES`."""
    if len(quantize.inputs) != 3 or {*quantize.attrs, *dequantize.attrs} - {"axis"}:
        return False
    dtype, scale = shapes.dtype(quantize.outputs[0]), quantize.inputs[1]
    least, largest = SCALES.get(shapes.dtype(scale), (math.inf, 0.0))
    is_ordinary = least < (graph.number(scale) or 0.0) < largest
    is_of_integers = dtype in INTEGERS and dtype == shapes.dtype(dequantize.inputs[0])
    return is_ordinary and is_of_integers and graph.have_one_scale(quantize, dequantize)
