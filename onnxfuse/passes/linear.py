"""Conv, ConvTranspose, Gemm and MatMul with constant weights: their channels, and their weights rescaled."""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from onnx import TensorProto

from onnxfuse.model.graph import Array, Graph, Node, Tensor, attribute, constant_value, is_constant, op_of
from onnxfuse.shapes.inference import Shapes

LINEAR = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
WIDER: dict[int, tuple[int, ...]] = {  # types that hold every value of a type
    TensorProto.FLOAT16: (TensorProto.FLOAT, TensorProto.DOUBLE),
    TensorProto.BFLOAT16: (TensorProto.FLOAT, TensorProto.DOUBLE),
    TensorProto.FLOAT: (TensorProto.DOUBLE,),
}
SMALL = 64 * 1024  # bytes: what a model may grow by without anyone minding


@dataclass(frozen=True)
class Side:
    """Where the input or the output of a linear node has its channels."""

    rank: int | None
    back: int  # the channel axis, counted from the end: 1 is the last axis
    channels: int


@dataclass(frozen=True)
class Weights:
    """New values for a node, rounded to its type; None: the weight as it is, and no bias."""

    weight: Array | None
    bias: Array | None


def output_side(graph: Graph, shapes: Shapes, node: Node) -> Side:
    """The channels that the node computes."""
    shape = node.inputs[1].shape
    channels = shape[0] if _is_output_first(node) else shape[1] * _groups(graph, node)
    if op_of(node) == "MatMul":
        return Side(shapes.rank(node.outputs[0]), 1, channels)
    return Side(len(shape), len(shape) - 1, channels)


def input_side(graph: Graph, shapes: Shapes, node: Node) -> Side | None:
    """The channels that the node sums over; None where they are not where BatchNormalization has its own."""
    shape = node.inputs[1].shape
    channels = shape[1] * _groups(graph, node) if _is_output_first(node) else shape[0]
    if op_of(node) == "MatMul":
        return Side(shapes.rank(node.inputs[0]), 1, channels)
    return None if node.attrs.get("transA", 0) else Side(len(shape), len(shape) - 1, channels)


def is_linear(node: Node) -> bool:
    """Whether the node multiplies its input 0 by constant weights."""
    if op_of(node) not in LINEAR or not is_constant(node.inputs[1]):
        return False
    rank = len(node.inputs[1].shape)
    return 0 not in node.inputs[1].shape and (rank == 2 or (rank > 2 and op_of(node).startswith("Conv")))


def takes_shift(graph: Graph, node: Node) -> bool:
    """Whether a constant added to every element of an input channel adds one constant to every output element."""
    if op_of(node) == "ConvTranspose":
        return False
    if op_of(node) != "Conv":
        return True
    padding = attribute(graph, node, "auto_pad") or "NOTSET"
    return padding == "VALID" or (padding == "NOTSET" and not any(node.attrs.get("pads") or ()))


def scale_outputs(graph: Graph, node: Node, side: Side, scale: Array, shift: Array) -> Weights | None:
    """The weights that compute `output * scale + shift`; None where there are none."""
    bias = _read_bias(graph, node)
    if bias is None:
        return None
    beta = attribute(graph, node, "beta") if op_of(node) == "Gemm" else 1.0
    changed = bias * scale + shift / beta
    if changed.size > max(bias.size, side.channels):  # a Gemm's C of one value per row
        return None
    if changed.size == 1:
        changed = np.broadcast_to(changed.reshape(-1), (side.channels,))
    blocks = None
    if (scale != 1).any():
        blocks = _read_blocks(graph, node)
        blocks = blocks * np.broadcast_to(scale, (side.channels,)).reshape(len(blocks), 1, -1, 1)
    return _rounded(graph, node, blocks, changed)


def scale_inputs(graph: Graph, node: Node, side: Side, scale: Array, shift: Array) -> Weights | None:
    """The weights that compute the output for `input * scale + shift`; None where there are none."""
    bias = _read_bias(graph, node)
    if bias is None or (shift.any() and not takes_shift(graph, node)):
        return None
    blocks = _read_blocks(graph, node)
    channels = (len(blocks), -1, 1, 1)
    scale, shift = (np.broadcast_to(v, (side.channels,)).reshape(channels) for v in (scale, shift))
    if shift.any():
        added = (blocks * shift).sum(axis=(1, 3)).reshape(-1)
        if op_of(node) == "Gemm":
            added = added * attribute(graph, node, "alpha") / attribute(graph, node, "beta")
        if math.prod(np.broadcast_shapes(bias.shape, added.shape)) > max(bias.size, added.size):
            return None
        bias = bias + added
    return _rounded(graph, node, blocks * scale, bias)


def set_weights(graph: Graph, node: Node, new: Weights) -> None:
    """Let the node read the new values."""
    weight = node.inputs[1]
    if new.weight is not None:
        node.inputs[1] = graph.constant(f"{weight.name}_folded", new.weight)
    if new.bias is None:
        return
    bias = graph.constant(f"{weight.name}_bias", new.bias)
    if len(node.inputs) > 2:
        node.inputs[2] = bias
    else:
        node.inputs.append(bias)


def per_channel(graph: Graph, tensor: Tensor, side: Side) -> Array | None:
    """A constant that holds one value, or one per channel, and does not change the shape of what it meets."""
    if not is_constant(tensor) or len(tensor.shape) > (1 if side.rank is None else side.rank):
        return None
    size = math.prod(tensor.shape)
    if size != 1 and (len(tensor.shape) < side.back or not size == side.channels == tensor.shape[-side.back]):
        return None
    value = constant_value(graph, tensor)
    return value.reshape(-1).astype(np.float64) if value.dtype.name in FLOATS else None


def _groups(graph: Graph, node: Node) -> int:
    return int(attribute(graph, node, "group")) if op_of(node).startswith("Conv") else 1


def _is_output_first(node: Node) -> bool:
    return bool(op_of(node) == "Conv" or (op_of(node) == "Gemm" and node.attrs.get("transB", 0)))


def _read_blocks(graph: Graph, node: Node) -> Array:
    """The weights in double precision as [group, channel summed over, channel computed, kernel element]."""
    weight = constant_value(graph, node.inputs[1]).astype(np.float64)
    blocks = weight.reshape(_groups(graph, node), -1, weight.shape[1], math.prod(weight.shape[2:]))
    return blocks.swapaxes(1, 2) if _is_output_first(node) else blocks


def _read_bias(graph: Graph, node: Node) -> Array | None:
    """The bias in double precision, 0 where the node has none; None where it is computed or counts for nothing."""
    if op_of(node) == "Gemm" and attribute(graph, node, "beta") == 0:
        return None
    if op_of(node) == "MatMul" or len(node.inputs) < 3 or not node.inputs[2].name:
        return np.zeros(())
    return constant_value(graph, node.inputs[2]).astype(np.float64) if is_constant(node.inputs[2]) else None


def _rounded(graph: Graph, node: Node, blocks: Array | None, bias: Array) -> Weights | None:
    """The values in the weights' own type; None where they leave its range, or a big weight would be stored twice."""
    weight = node.inputs[1]
    dtype = constant_value(graph, weight).dtype
    if dtype.name not in FLOATS:
        return None
    new_weight = None
    if blocks is not None:
        if (len(weight.outputs) > 1 or graph.is_kept(weight)) and math.prod(weight.shape) * dtype.itemsize > SMALL:
            return None
        blocks = blocks.swapaxes(1, 2) if _is_output_first(node) else blocks
        new_weight = blocks.reshape(weight.shape).astype(dtype)
        peak = np.abs(blocks).max()
        if not np.isfinite(new_weight).all() or 0 < peak < ml_dtypes.finfo(dtype).tiny:  # type: ignore[no-untyped-call]
            return None
    new_bias = bias.astype(dtype) if bias.any() or len(node.inputs) > 2 else None
    if new_bias is not None and not np.isfinite(new_bias).all():
        return None
    return Weights(new_weight, new_bias)
