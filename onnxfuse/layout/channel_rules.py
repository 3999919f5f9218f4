"""Convert Concat and Split along channels to fused nodes on channels-last images, which have their own kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import onnx
from onnx import helper

from onnxfuse.ir.attributes import input_index, int_attribute
from onnxfuse.ir.dtypes import FUSIBLE_FLOATS
from onnxfuse.ir.node import AttributeValue, Node, Tensor
from onnxfuse.layout.axes import last_axis, to_last
from onnxfuse.layout.bodies import channels_last_function
from onnxfuse.layout.conversion import Conversion, Model, fused_node
from onnxfuse.layout.writer import ImageCall, image_rank
from onnxfuse.rewrite.chain_bodies import function_of

CHANNEL_FUSIONS: Final = frozenset({"concat", "split"})
MAX_PARTS: Final = 32  # maximum number of tensors that a Concat joins or a Split computes


def concat(model: Model, node: Node) -> Conversion | None:
    """Return the conversion of a Concat along the channel axis, where all numbers of channels are known."""
    axis = int_attribute(node, "axis")
    if axis is None or not _are_of_channels(model, axis, node.inputs) or not 1 < len(node.inputs) <= MAX_PARTS:
        return None
    operands = {f"x_{i}": tensor for i, tensor in enumerate(node.inputs)}
    inner = helper.make_node("Concat", list(operands), ["y"], axis=_last(model, node.inputs[0]))
    body = function_of(list(operands), [inner], model.graph.opset)
    call = ImageCall("concat", body, operands, {"axis": -1}, operands, is_channels_last=True, is_deferred=True)
    return fused_node(node, call)


def split(model: Model, node: Node) -> Conversion | str | None:
    """Return the conversion of a Split along the channel axis, where all numbers of channels are known."""
    x, opset = node.inputs[0], model.graph.opset
    is_of_channels = _are_of_channels(model, int_attribute(node, "axis", 0), (x, *node.outputs))
    if not is_of_channels or not 1 < len(node.outputs) <= MAX_PARTS:
        return None
    sizes = _channels(model, node.outputs)
    if sum(sizes) != _channels(model, [x])[0]:
        return "its parts do not make the channels of its image"
    outputs, last = [f"y_{i}" for i in range(len(sizes))], _last(model, x)
    if input_index("Split", "split", opset) is None:
        inner = [helper.make_node("Split", ["x"], outputs, axis=last, split=sizes)]
    else:
        stored = onnx.numpy_helper.from_array(np.array(sizes, np.int64))
        inner = [
            helper.make_node("Constant", [], ["sizes"], value=stored),
            helper.make_node("Split", ["x", "sizes"], outputs, axis=last),
        ]
    body = function_of(["x"], inner, opset)
    own: dict[str, AttributeValue] = {"split": sizes, "axis": -1}
    return fused_node(node, ImageCall("split", body, {"x": x}, own, is_channels_last=True, is_deferred=True))


def between_transposes(function: onnx.FunctionProto) -> onnx.FunctionProto:
    """Return the function of a channels-last concat or split, rewritten for channels-first images between Transposes.

    The functions of other channels-last nodes have this form.  When functions are expanded to operators again, the
    Transposes cancel with those of neighbouring nodes.
    """
    body = onnx.FunctionProto()
    body.CopyFrom(function)
    axis = next(each for each in body.node[-1].attribute if each.name == "axis")
    perm, axis.i = to_last(axis.i + 1), 1
    perms = dict.fromkeys(body.input, perm), dict.fromkeys(body.output, perm)
    return channels_last_function(body, *perms)


def _are_of_channels(model: Model, axis: int, tensors: Sequence[Tensor]) -> bool:
    """Return whether an axis is the channel axis, and all tensors are images with known numbers of channels."""
    shapes = model.shapes
    are_images = all(image_rank(shapes, tensor) and shapes.dtype(tensor) in FUSIBLE_FLOATS for tensor in tensors)
    if not are_images or last_axis(axis, _last(model, tensors[0]) + 1) != _last(model, tensors[0]):
        return False
    return len(_channels(model, tensors)) == len(tensors)


def _last(model: Model, image: Tensor) -> int:
    """Return the index of the channel axis of an image in its channels-last form."""
    return image_rank(model.shapes, image) - 1


def _channels(model: Model, tensors: Sequence[Tensor]) -> list[int]:
    """Return the numbers of channels of channels-first images, without those that are not known."""
    every = (model.shapes.shape(tensor) for tensor in tensors)
    return [size for shape in every if shape is not None and isinstance(size := shape[1], int)]
