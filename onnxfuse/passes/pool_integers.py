"""Let a MaxPool compute integers, where it is between a DequantizeLinear and the QuantizeLinear that undoes it.

The largest number is that of the largest integer, so that the results are equal.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.node import Node, Tensor, is_constant, op_of, producer
from onnxfuse.passes.graph_pass import graph_pass

INTEGERS: Final = ("int8", "uint8")
SCALES: Final = {"float32": (1e-30, 1e36), "float16": (1e-7, 128.0)}  # with which no integer is lost, by dtype


@graph_pass(opset=12)  # the first opset whose MaxPool takes integers
def pool_integers(graph: Graph, shapes: ShapeInfo) -> int:
    """Write each MaxPool of dequantized integers that are quantized again as a MaxPool of the integers."""
    count = 0
    for node in [each for each in graph.nodes if op_of(each) == "QuantizeLinear"]:
        pool = producer(node.inputs[0])
        source = producer(pool.inputs[0]) if pool is not None and op_of(pool) == "MaxPool" else None
        if pool is None or source is None or op_of(source) != "DequantizeLinear":
            continue
        is_read_here = len(pool.outputs) == 1 and graph.sole_consumer(pool.outputs[0]) is node
        if is_read_here and _undoes(graph, node, source):
            graph.rewrite(node, "MaxPool", [source.inputs[0]], pool.attrs)
            count += 1
    return count


def _undoes(graph: Graph, quantize: Node, dequantize: Node) -> bool:
    """Return whether two quantizers have the same zero point, and the same scale, which is positive and ordinary."""
    if len(quantize.inputs) != 3 or len(dequantize.inputs) != 3 or {*quantize.attrs, *dequantize.attrs} - {"axis"}:
        return False
    scale, zero = (_same(graph, quantize.inputs[i], dequantize.inputs[i]) for i in (1, 2))
    if scale is None or zero is None or scale.size != 1 or zero.size != 1 or zero.dtype.name not in INTEGERS:
        return False
    least, largest = SCALES.get(scale.dtype.name, (np.inf, 0.0))
    return bool(least < scale.ravel()[0] < largest)


def _same(graph: Graph, a: Tensor, b: Tensor) -> Array | None:
    """Return the value of two equal constants; None for others."""
    if not is_constant(a) or not is_constant(b):
        return None
    value, other = constant_value(graph, a), constant_value(graph, b)
    return value if value.dtype == other.dtype and np.array_equal(value, other) else None
