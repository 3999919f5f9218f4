"""Shape rules of image operators: convolutions, pools, padding and resizing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from onnxfuse.algebra.bounds import maximum
from onnxfuse.algebra.sizes import Shape, Size
from onnxfuse.analysis.rules import (
    RuleTable,
    ShapeRule,
    has_input,
    input_shape,
    integers,
    operands_of,
    partial_integers,
    required,
)
from onnxfuse.analysis.shape_info import CannotInfer, ShapeInfo
from onnxfuse.ir.attributes import (
    AtRunTime,
    attribute_or_input,
    int_attribute,
    ints_attribute,
    str_attribute,
    tensor_attribute,
)
from onnxfuse.ir.graph import constant_value
from onnxfuse.ir.node import Node, op_of, producer

RULES = RuleTable[ShapeRule]()
PADS_ARE_INPUT_SINCE = 11  # the opset in which `pads` of a Pad became an input


@RULES.rule("Conv", "ConvInteger", "QLinearConv", "com.microsoft::FusedConv")
def _conv(shapes: ShapeInfo, node: Node) -> tuple[Size | None, ...]:
    image, weight = (input_shape(shapes, node, i) for i in operands_of(node)[:2])
    if len(image) < 2 or len(weight) != len(image):
        raise CannotInfer
    shapes.require(image[1], weight[1] * int_attribute(node, "group", 1))
    kernel = ints_attribute(node, "kernel_shape") or weight[2:]
    return (image[0], weight[0], *_window_counts(node, image[2:], kernel))


@RULES.rule("com.microsoft::NhwcConv", "com.microsoft::NhwcFusedConv")
def _nhwc_conv(shapes: ShapeInfo, node: Node) -> tuple[Size | None, ...]:
    """Return the output shape.

    The weights of NhwcConv are (filters, height, width, channels); those of NhwcFusedConv are in the order of Conv.
    """
    image, weight = input_shape(shapes, node, 0, 4), input_shape(shapes, node, 1, 4)
    kernel = weight[1:-1] if op_of(node) == "com.microsoft::NhwcConv" else weight[2:]
    windows = _window_counts(node, image[1:-1], ints_attribute(node, "kernel_shape") or kernel)
    return (image[0], *windows, weight[0])


@RULES.rule("MaxPool", "AveragePool", "LpPool", "com.microsoft::QLinearAveragePool")
def _pool(shapes: ShapeInfo, node: Node) -> tuple[Size | None, ...]:
    (before, sizes, after), kernel = _image(shapes, node), required(ints_attribute(node, "kernel_shape"))
    return (*before, *_window_counts(node, sizes, kernel), *after)


@RULES.rule("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool", "com.microsoft::QLinearGlobalAveragePool")
def _global_pool(shapes: ShapeInfo, node: Node) -> Shape:
    before, sizes, after = _image(shapes, node)
    return (*before, *[1] * len(sizes), *after)


def _image(shapes: ShapeInfo, node: Node) -> tuple[Shape, Shape, Shape]:
    """Return the sizes of an image in three parts: before the spatial axes, of these axes, and after them."""
    image = input_shape(shapes, node)
    first, end = (1, len(image) - 1) if int_attribute(node, "channels_last", 0) else (2, len(image))
    return image[:first], image[first:end], image[end:]


@RULES.rule("STFT")
def _short_time_fourier_transform(shapes: ShapeInfo, node: Node) -> Shape:
    """Return the shape with unknown numbers of frames and bins, because onnx confuses one- and two-sided spectra."""
    name = node.outputs[0].name
    return (input_shape(shapes, node)[0], shapes.unknown(name, 1), shapes.unknown(name, 2), 2)


def _window_counts(node: Node, spatial: Shape, kernel: Sequence[Size]) -> list[Size | None]:
    """Return the number of windows along each spatial axis; None where it is not known.

    Raises CannotInfer for attributes that do not fit the axes.
    """
    rank = len(spatial)
    strides, dilations = (ints_attribute(node, name) or [1] * rank for name in ("strides", "dilations"))
    pads = ints_attribute(node, "pads") or [0] * 2 * rank
    mode = str_attribute(node, "auto_pad", "NOTSET")
    if not len(kernel) == len(strides) == len(dilations) == rank == len(pads) / 2 or min(strides, default=1) < 1:
        raise CannotInfer
    counts: list[Size | None] = []
    for i, size in enumerate(spatial):
        extent = (kernel[i] - 1) * dilations[i] + 1
        if mode.startswith("SAME"):
            counts.append((size + strides[i] - 1) // strides[i])
        elif int_attribute(node, "ceil_mode", 0):
            counts.append(_ceil_mode_count(size, extent, strides[i], pads[i], pads[i + rank]))
        else:
            room = size + (0 if mode == "VALID" else pads[i] + pads[i + rank]) - extent
            if isinstance(room, int) and room < 0:  # runtimes round this negative quotient toward zero, not down
                counts.append(1 - -room // strides[i])
            else:
                counts.append(room // strides[i] + 1)
    return counts


def _ceil_mode_count(size: Size, extent: Size, stride: int, before: int, after: int) -> Size | None:
    """Return the number of windows with `ceil_mode`; None if unknown.

    The last window can start in the image or in the padding before it, but must not start in the padding after it.
    """
    count = (size + before + after - extent + stride - 1) // stride + 1
    if isinstance(count, int) and isinstance(size, int):
        return count - 1 if (count - 1) * stride >= size + before else count
    return count if isinstance(extent, int) and after + stride <= extent else None


@RULES.rule("ConvTranspose")
def _conv_transpose(shapes: ShapeInfo, node: Node) -> tuple[Size | None, ...]:
    image, weight = input_shape(shapes, node), input_shape(shapes, node, 1)
    shapes.require(image[1], weight[0])
    spatial = image[2:]
    rank = len(spatial)
    strides, dilations = (ints_attribute(node, name) or [1] * rank for name in ("strides", "dilations"))
    output_padding = ints_attribute(node, "output_padding") or [0] * rank
    pads = ints_attribute(node, "pads") or [0] * 2 * rank
    kernel = ints_attribute(node, "kernel_shape") or weight[2:]
    is_same = str_attribute(node, "auto_pad", "NOTSET").startswith("SAME")
    sizes: list[Size | None] = []
    for i, size in enumerate(spatial):
        window = (kernel[i] - 1) * dilations[i] + 1 + output_padding[i]
        # With auto_pad SAME, the output has size * stride elements, or fewer if the window is smaller than the stride,
        # because padding is never negative.
        padding = maximum(0, window - strides[i]) if is_same else pads[i] + pads[i + rank]
        sizes.append((size - 1) * strides[i] + window - padding)
    channels = weight[1] * int_attribute(node, "group", 1)
    return (image[0], channels, *(ints_attribute(node, "output_shape") or sizes))


@RULES.rule("Pad")
def _pad(shapes: ShapeInfo, node: Node) -> tuple[Size | None, ...]:
    source = input_shape(shapes, node)
    given = integers(shapes, node, "axes") if has_input(node, 3) else None
    axes: Sequence[Size] = range(len(source)) if given is None else [axis % len(source) for axis in given]
    opset = shapes.graph.opset
    try:
        pads: Sequence[Size | None] = (
            partial_integers(shapes, node, 1)
            if opset >= PADS_ARE_INPUT_SINCE
            else integers(shapes, node, "pads" if opset > 1 else "paddings") or []
        )
    except CannotInfer:
        return tuple(None if i in axes else size for i, size in enumerate(source))
    result: list[Size | None] = list(source)
    for i, axis in enumerate(axes):
        if not isinstance(axis, int):
            raise CannotInfer
        before, behind = pads[i], pads[i + len(axes)]
        result[axis] = None if before is None or behind is None else source[axis] + before + behind
    return tuple(result)


@RULES.rule("Resize", "Upsample")
def _resize(shapes: ShapeInfo, node: Node) -> tuple[Size | None, ...]:
    source = input_shape(shapes, node)
    axes = [axis % len(source) for axis in ints_attribute(node, "axes") or range(len(source))]
    if str_attribute(node, "keep_aspect_ratio_policy", "stretch") != "stretch":
        return tuple(None if i in axes else size for i, size in enumerate(source))
    if has_input(node, 3) and shapes.shape(node.inputs[3]) != (0,):
        new = partial_integers(shapes, node, 3)
    else:
        new = [_scaled_size(source[axis], scale) for axis, scale in zip(axes, _scales(shapes, node), strict=True)]
    result: list[Size | None] = list(source)
    for axis, size in zip(axes, new, strict=True):
        result[axis] = size
    return tuple(result)


def _scales(shapes: ShapeInfo, node: Node) -> Sequence[Size | float]:
    """Return the scale of each axis: any number if `scales` is constant; computed scales must be integers."""
    scales = attribute_or_input(shapes.graph, node, "scales")
    if isinstance(scales, list):
        numbers = [scale for scale in scales if isinstance(scale, int | float)]
        if len(numbers) != len(scales):  # some elements are lists: `scales` has several axes
            raise CannotInfer
        return numbers
    if isinstance(scales, AtRunTime):
        constant = producer(scales.tensor)
        value = tensor_attribute(constant, "value") if constant is not None and op_of(constant) == "Constant" else None
        if value is not None and len(value.shape) == 1:
            return list(constant_value(shapes.graph, value).tolist())
    return integers(shapes, node, "scales") or []


def _scaled_size(size: Size, scale: Size | float) -> Size | None:
    if isinstance(size, int) and isinstance(scale, int | float):
        return math.floor(np.float32(size) * np.float32(scale))  # in float32 like runtimes: 10 * 0.7 gives 7
    if not isinstance(scale, float):
        return size * scale
    if scale.is_integer():
        return size * int(scale)
    inverse = 1 / scale
    return size // int(inverse) if inverse.is_integer() else None


@RULES.rule("DepthToSpace", "SpaceToDepth")
def _blocks(shapes: ShapeInfo, node: Node) -> Shape:
    batch, channels, height, width = input_shape(shapes, node)
    block = required(int_attribute(node, "blocksize"))
    if op_of(node) == "DepthToSpace":
        return (batch, channels // block**2, height * block, width * block)
    return (batch, channels * block**2, height // block, width // block)
