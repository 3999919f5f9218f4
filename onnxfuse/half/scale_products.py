"""Scale the operand of a product with a weight, where only the result exceeds half precision (T5's feed-forward).

MatMul(x, w) becomes MatMul(x * 2^-k, w) * 2^k.  The product then reads and writes half precision; only the last
multiplication and the addition that reads it stay in float32.  Scaling by powers of two is exact, except for results
below half precision's smallest normal number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.half.ranges import Range
from onnxfuse.half.weights import Weights
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, is_constant, op_of
from onnxfuse.passes.emit import write

ROOM: Final = 6  # bits by which the scaled operand's largest number must exceed the smallest normal number


def scale_products(shapes: ShapeInfo, ranges: Mapping[str, Range], weights: Weights) -> dict[str, Range]:
    """Bring products with weights into range; return the ranges of the new tensors, if any, by name.

    Weights that half precision cannot hold are left as they are.
    """
    graph, made = shapes.graph, dict[str, Range]()
    for node in [node for node in graph.nodes if op_of(node) == "MatMul"]:
        if not (bits := _bits(graph, ranges, weights, node)):
            continue
        x, y = node.inputs[0], node.outputs[0]
        down, up = (graph.constant(f"factor_{each:g}", np.array(each, np.float32)) for each in (2.0**-bits, 2.0**bits))
        small = write(shapes, "Mul", [x, down], f"{x.name}_scaled")
        product = graph.variable(f"{y.name}_scaled")
        shapes.record(product, shapes.shape(y), shapes.dtype(y))
        node.inputs[0], node.outputs[0] = small, product
        graph.add_node("Mul", [product, up], [y])
        made |= {new.name: ranges[old.name].scaled(2.0**-bits) for new, old in ((small, x), (product, y))}
    return made


def _bits(graph: Graph, ranges: Mapping[str, Range], weights: Weights, node: Node) -> int:
    """Return k if the operand should be scaled by 2^-k; 0 if the product is in range, or scaling would lose bits."""
    precision, weight = weights.precision, node.inputs[1]
    read, written = ranges.get(node.inputs[0].name), ranges.get(node.outputs[0].name)
    if not is_constant(weight) or read is None or written is None or not written.magnitude > precision.limit:
        return 0
    bits = math.ceil(math.log2(written.magnitude / precision.limit))
    if not precision.smallest * 2 ** (ROOM + bits) <= read.magnitude <= precision.limit:
        return 0
    return 0 if weights.loss(graph, weight) else bits
