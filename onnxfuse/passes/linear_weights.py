"""The weights of Conv, ConvTranspose, Gemm and MatMul, rescaled per input or output channel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from onnxfuse.algebra.operators import LINEAR
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import attribute_or_input, int_attribute, ints_attribute, number_parameter
from onnxfuse.ir.dtypes import FLOAT_NAMES, Array
from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.node import Constant, Node, Tensor, is_constant, op_of
from onnxfuse.passes.fold_constants import MAX_GROWTH_BYTES

# Inputs up to this magnitude must not overflow with rescaled weights.  All float16 numbers are smaller.
LARGE_INPUT = 2.0**16


@dataclass(frozen=True)
class Channels:
    """The channels of the input or of the output of a linear node."""

    rank: int | None  # the tensor's rank; None if unknown
    axis_from_end: int  # the channel axis, counted from the end: 1 is the last axis
    count: int


@dataclass(frozen=True)
class RescaledWeights:
    """The new weight and bias of a linear node, in the dtype of its old weight."""

    weight: Array | None  # None: the weight is unchanged
    bias: Array | None  # None: the node has no bias


def weight_of(node: Node) -> Constant:
    """Return the constant weights of a linear node."""
    weight = node.inputs[1]
    assert is_constant(weight)
    return weight


def output_channels(graph: Graph, shapes: ShapeInfo, node: Node) -> Channels:
    """Return the channels that the node computes."""
    shape = weight_of(node).shape
    count = shape[0] if _is_output_first(node) else shape[1] * _groups(graph, node)
    if op_of(node) == "MatMul":
        return Channels(shapes.rank(node.outputs[0]), 1, count)
    return Channels(len(shape), len(shape) - 1, count)


def input_channels(graph: Graph, shapes: ShapeInfo, node: Node) -> Channels | None:
    """Return the channels that the node sums over; None for a transposed input, because its channels are on axis 0."""
    shape = weight_of(node).shape
    count = shape[1] * _groups(graph, node) if _is_output_first(node) else shape[0]
    if op_of(node) == "MatMul":
        return Channels(shapes.rank(node.inputs[0]), 1, count)
    return None if int_attribute(node, "transA", 0) else Channels(len(shape), len(shape) - 1, count)


def is_linear(node: Node) -> bool:
    """Return whether a node multiplies input 0 by constant weights that are not empty and fit its groups."""
    if op_of(node) not in LINEAR or not is_constant(node.inputs[1]):
        return False
    shape, groups = weight_of(node).shape, int_attribute(node, "group", 1)
    if len(shape) < 2 or 0 in shape or groups < 1 or shape[0] % groups:
        return False
    return len(shape) == 2 or op_of(node).startswith("Conv")


def turns_shift_into_bias(graph: Graph, node: Node) -> bool:
    """Return whether adding a constant to an input channel adds one constant to each output channel.

    Where an image is padded, or windows overlap in a ConvTranspose, the constant differs between output elements.
    """
    if op_of(node) == "ConvTranspose":
        return False
    if op_of(node) != "Conv":
        return True
    padding = attribute_or_input(graph, node, "auto_pad") or "NOTSET"
    return padding == "VALID" or (padding == "NOTSET" and not any(ints_attribute(node, "pads") or ()))


def scale_outputs(graph: Graph, node: Node, channels: Channels, scale: Array, shift: Array) -> RescaledWeights | None:
    """Return new weights that make the node compute `output * scale + shift`; None if that is not possible."""
    bias = _read_bias(graph, node)
    if bias is None:
        return None
    beta = number_parameter(graph, node, "beta") if op_of(node) == "Gemm" else 1.0
    new_bias = bias * scale + shift / beta
    if new_bias.size > max(bias.size, channels.count):  # the C of a Gemm has different values for each row
        return None
    if new_bias.size == 1:
        new_bias = np.broadcast_to(new_bias.reshape(-1), (channels.count,))
    blocks = None
    if (scale != 1).any():
        blocks = _read_blocks(graph, node)
        blocks = blocks * np.broadcast_to(scale, (channels.count,)).reshape(len(blocks), 1, -1, 1)
    return _rounded(graph, node, blocks, new_bias)


def scale_inputs(graph: Graph, node: Node, channels: Channels, scale: Array, shift: Array) -> RescaledWeights | None:
    """Return new weights that make the node apply `input * scale + shift` to its input first; None if impossible."""
    bias = _read_bias(graph, node)
    if bias is None or (shift.any() and not turns_shift_into_bias(graph, node)):
        return None
    blocks = _read_blocks(graph, node)
    by_group = (len(blocks), -1, 1, 1)
    scale, shift = (np.broadcast_to(v, (channels.count,)).reshape(by_group) for v in (scale, shift))
    if shift.any():
        added = (blocks * shift).sum(axis=(1, 3)).reshape(-1)
        if op_of(node) == "Gemm":
            added = added * number_parameter(graph, node, "alpha") / number_parameter(graph, node, "beta")
        if math.prod(np.broadcast_shapes(bias.shape, added.shape)) > max(bias.size, added.size):
            return None
        bias = bias + added
    return _rounded(graph, node, blocks * scale, bias)


def set_weights(graph: Graph, node: Node, new: RescaledWeights) -> None:
    """Replace the node's weight and bias by the new values, unless these are None."""
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


def read_per_channel(graph: Graph, tensor: Tensor, channels: Channels) -> Array | None:
    """Return the values of a constant with one element, or one per channel, in float64; None for any other tensor.

    Also returns None if the constant has more axes than the tensor that it scales or shifts, because broadcasting would
    add axes to the tensor.
    """
    if not is_constant(tensor) or len(tensor.shape) > (1 if channels.rank is None else channels.rank):
        return None
    size, axis_from_end = math.prod(tensor.shape), channels.axis_from_end
    if size != 1 and (len(tensor.shape) < axis_from_end or not size == channels.count == tensor.shape[-axis_from_end]):
        return None
    value = constant_value(graph, tensor)
    return value.reshape(-1).astype(np.float64) if value.dtype.name in FLOAT_NAMES else None


def _groups(graph: Graph, node: Node) -> int:
    return int(number_parameter(graph, node, "group")) if op_of(node).startswith("Conv") else 1


def _is_output_first(node: Node) -> bool:
    """Return whether axis 0 of the weights is the output channel, and axis 1 the input channel."""
    return bool(op_of(node) == "Conv" or (op_of(node) == "Gemm" and int_attribute(node, "transB", 0)))


def _read_blocks(graph: Graph, node: Node) -> Array:
    """Return the weights in float64 as [group, input channel, output channel, kernel element]."""
    weight = constant_value(graph, weight_of(node)).astype(np.float64)
    blocks = weight.reshape(_groups(graph, node), -1, weight.shape[1], math.prod(weight.shape[2:]))
    return blocks.swapaxes(1, 2) if _is_output_first(node) else blocks


def _read_bias(graph: Graph, node: Node) -> Array | None:
    """Return the bias in float64, or 0 if the node has none; None if it is not constant, or a Gemm's beta is 0."""
    if op_of(node) == "Gemm" and number_parameter(graph, node, "beta") == 0:
        return None
    if op_of(node) == "MatMul" or len(node.inputs) < 3 or not node.inputs[2].name:
        return np.zeros(())
    bias = node.inputs[2]
    return constant_value(graph, bias).astype(np.float64) if is_constant(bias) else None


def _rounded(graph: Graph, node: Node, blocks: Array | None, bias: Array) -> RescaledWeights | None:
    """Return new weights and a new bias in the dtype of the node's weights.

    Returns None if they exceed its range, if a sum of products could overflow although the result without folding does
    not, or if a large weight that other nodes read would be stored a second time.
    """
    weight = weight_of(node)
    dtype = constant_value(graph, weight).dtype
    if dtype.name not in FLOAT_NAMES:
        return None
    new_weight = None
    if blocks is not None:
        is_shared = len(weight.outputs) > 1 or graph.is_kept(weight)
        if is_shared and math.prod(weight.shape) * dtype.itemsize > MAX_GROWTH_BYTES:
            return None
        if np.abs(blocks).sum(axis=(1, 3)).max(initial=0) * LARGE_INPUT > _largest_sum(dtype):
            return None
        blocks = blocks.swapaxes(1, 2) if _is_output_first(node) else blocks
        new_weight = blocks.reshape(weight.shape).astype(dtype)
        largest = np.abs(blocks).max()
        if not np.isfinite(new_weight).all() or 0 < largest < ml_dtypes.finfo(dtype).tiny:  # type: ignore[no-untyped-call]
            return None
    new_bias = bias.astype(dtype) if bias.any() or len(node.inputs) > 2 else None
    if new_bias is not None and not np.isfinite(new_bias).all():
        return None
    return RescaledWeights(new_weight, new_bias)


def _largest_sum(dtype: np.dtype[Any]) -> float:
    """Return the largest number of the dtype in which products are summed: float64 for float64, else float32."""
    return float(np.finfo(np.float64 if dtype == np.float64 else np.float32).max)
