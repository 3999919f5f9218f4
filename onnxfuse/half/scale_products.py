"""Scale what a product with a weight reads, where only its result is beyond half precision (T5's feed-forward blocks).

MatMul(x, w) becomes MatMul(x * 2^-k, w) * 2^k.  The product then reads and writes half precision, and what is left to
float32 is the last factor, beside the addition that reads it.  Powers of two round nothing but numbers below half
precision's smallest ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from onnxfuse.half.operators import is_onnx
from onnxfuse.half.ranges import Range
from onnxfuse.half.scope import Scope
from onnxfuse.half.weights import Weights
from onnxfuse.ir.graph import take_name
from onnxfuse.ir.protos import copy_without

ROOM: Final = 6  # bits between the smallest normal number and the largest of the scaled operand
Scaled = tuple[onnx.ModelProto, dict[str, int], dict[str, Range]]


def scale_products(
    model: onnx.ModelProto, types: Mapping[str, int], ranges: Mapping[str, Range], weights: Weights
) -> Scaled:
    """Return a model whose products with weights are in range, and the types and ranges of its tensors.

    The model may be the same.  What half precision cannot hold of the weights themselves stays as it is.
    """
    graph = model.graph
    scope = Scope(graph, types, {t.name: t for t in graph.initializer})
    bits = {i: k for i in range(len(graph.node)) if (k := _bits(scope, ranges, weights, i))}
    if not bits:
        return model, dict(types), dict(ranges)
    result = copy_without(model, "graph")
    result.graph.CopyFrom(copy_without(graph, "node"))
    names = {name for node in graph.node for name in (node.name, *node.input, *node.output)}
    names |= {each.name for each in (*graph.input, *graph.initializer)}
    new_types, new_ranges = dict(types), dict(ranges)
    for i, node in enumerate(graph.node):
        if i not in bits:
            result.graph.node.append(node)
            continue
        x, y = node.input[0], node.output[0]
        down, up = (_factor(result.graph, names, 2.0**each) for each in (-bits[i], bits[i]))
        new_types |= dict.fromkeys((down, up), onnx.TensorProto.FLOAT)
        small, product = take_name(names, f"{x}_scaled"), take_name(names, f"{y}_scaled")
        multiplied = onnx.NodeProto()
        multiplied.CopyFrom(node)
        multiplied.input[0], multiplied.output[0] = small, product
        result.graph.node.extend((
            onnx.helper.make_node("Mul", [x, down], [small], take_name(names, f"Mul_{small}")),
            multiplied,
            onnx.helper.make_node("Mul", [product, up], [y], take_name(names, f"Mul_{y}")),
        ))  # fmt: skip
        for name, source in ((small, x), (product, y)):
            seen, factor = ranges[source], 2.0 ** -bits[i]
            new_types[name] = types[source]
            new_ranges[name] = Range(seen.lowest * factor, seen.highest * factor, seen.smallest * factor)
    return result, new_types, new_ranges


def _bits(scope: Scope, ranges: Mapping[str, Range], weights: Weights, i: int) -> int:
    """Return the power of two by which a product is to be divided; 0 where that is not worth it."""
    node, precision = scope.nodes[i], weights.precision
    if not is_onnx(node) or node.op_type != "MatMul" or node.input[1] not in scope.constants:
        return 0
    x, y = node.input[0], node.output[0]
    if x in scope.constants or x not in ranges or y not in ranges or not ranges[y].magnitude > precision.limit:
        return 0
    bits = math.ceil(math.log2(ranges[y].magnitude / precision.limit))
    if not precision.smallest * 2 ** (ROOM + bits) <= ranges[x].magnitude <= precision.limit:
        return 0
    return 0 if weights.loss(scope.constants[node.input[1]]) else bits


def _factor(graph: onnx.GraphProto, names: set[str], value: float) -> str:
    name = take_name(names, f"factor_{value:g}")
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(value, np.float32), name))
    return name
