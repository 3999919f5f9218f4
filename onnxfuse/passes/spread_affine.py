"""Spread the numbers that scale and shift the result of a convolution's activation over its channels.

PaddlePaddle models have such an affine block of two learnt numbers after an activation, where it cannot be folded into
the convolution's weights.  The fused convolution takes a vector over channels, so each number is repeated into one.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from onnxfuse.algebra.operators import CONVOLUTIONS
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.dtypes import FUSIBLE_FLOATS, Array
from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.node import Constant, Node, Tensor, is_constant, op_of, producer
from onnxfuse.passes.graph_pass import graph_pass

RANK: Final = 4  # of images; the fusion takes vectors of shape (channels, 1, 1)
ACTIVATIONS: Final = frozenset(  # activations that are one operator
    ("Relu", "Clip", "LeakyRelu", "PRelu", "Elu", "Sigmoid", "HardSigmoid", "Tanh", "Softplus", "HardSwish", "Mish",
     "Gelu", "Swish")
)  # fmt: skip
GATES: Final = frozenset({"Sigmoid", "HardSigmoid"})  # `gate(x) * x` is an activation


@graph_pass(opset=7)
def spread_affine(graph: Graph, shapes: ShapeInfo) -> int:
    """Spread the number of each Mul and Add after a convolution's activation to a vector; return how many were."""
    return sum(_spread_behind(graph, shapes, node) for node in list(graph.nodes) if _is_activation(node))


def _is_activation(node: Node) -> bool:
    """Return whether the node ends the activation of a convolution."""
    if op_of(node) in ACTIVATIONS:
        return _is_convolution(node.inputs[0])
    if op_of(node) != "Mul":
        return False
    for x, gated in (node.inputs, node.inputs[::-1]):
        gate = producer(gated)
        if gate is not None and op_of(gate) in GATES and gate.inputs[0] is x and _is_convolution(x):
            return True
    return False


def _is_convolution(x: Tensor) -> bool:
    """Return whether the tensor is the result of a Conv, or of an Add of a Conv and a residual."""
    node = producer(x)
    if node is not None and op_of(node) == "Add":
        return any(_is_convolution_alone(each) for each in node.inputs)
    return _is_convolution_alone(x)


def _is_convolution_alone(x: Tensor) -> bool:
    node = producer(x)
    return node is not None and op_of(node) in CONVOLUTIONS


def _spread_behind(graph: Graph, shapes: ShapeInfo, activation: Node) -> int:
    """Spread the number of a Mul that is the activation's only consumer, and of an Add after it or in its place."""
    end, count = activation.outputs[0], 0
    shape = shapes.shape(end)
    if shape is None or len(shape) != RANK or shapes.dtype(end) not in FUSIBLE_FLOATS:
        return 0
    channels = shape[1]
    if not isinstance(channels, int):
        return 0
    for op in ("Mul", "Add")[: 2 if op_of(activation) != "PRelu" else 1]:
        reader = graph.sole_consumer(end)
        if reader is None or op_of(reader) != op:
            continue
        index = 0 if is_constant(reader.inputs[0]) else 1
        number = reader.inputs[index]
        if not is_constant(number) or reader.inputs[1 - index] is not end:
            continue
        vector = _vector(graph, number, channels)
        if vector is not None:
            reader.inputs[index] = graph.constant(f"{number.name}_of_channels", vector)
            count += 1
        end = reader.outputs[0]
    return count


def _vector(graph: Graph, number: Constant, channels: int) -> Array | None:
    """Return a constant with one element or one per channel in the shape (channels, 1, 1); None if not needed."""
    shape, wanted = tuple(number.shape), (channels, 1, 1)
    if shape == wanted or len(shape) > RANK:
        return None
    if math.prod(shape) == 1:
        return np.full(wanted, constant_value(graph, number).reshape(()))
    return constant_value(graph, number).reshape(wanted) if shape == (1, *wanted) else None
