"""Describe a fused transposed convolution as a `conv.problem.Conv`: read its sizes, and check its shapes and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from onnxfuse.kernels.conv import operands as conv_operands
from onnxfuse.kernels.conv.operands import (
    EXPLICIT_PADS,
    check_kernel_shape,
    explicit_pads,
    per_axis,
    with_operands,
)
from onnxfuse.kernels.conv.problem import Conv
from onnxfuse.kernels.tensors import required_spec
from onnxfuse.runtime.plan import Device, FusedNode, Geometry, TensorSpec
from onnxfuse.runtime.symint import expect_equal, maximum

MAX_DIMS: Final = 3  # maximum number of spatial axes
MAX_STRIDE: Final = 64  # largest stride along the width of a depthwise convolution: a thread computes that many pixels


def unsupported(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Return why no kernel computes this transposed convolution on this device; None if one does."""
    return conv_operands.unsupported(node, input_dtypes, device, ("ihwo", "hwoi")) or _unsupported_stride(node)


def _unsupported_stride(node: FusedNode) -> str | None:
    strides = node.attributes.get("strides", [1])
    if not isinstance(strides, list) or node.text("w_layout", "ihwo") != "hwoi" or int(strides[-1]) <= MAX_STRIDE:
        return None
    return f"{node.fusion}: the stride along the width is {strides[-1]}; the depthwise kernel takes up to {MAX_STRIDE}"


def conv_transpose_of(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> tuple[Conv, TensorSpec]:
    """Return the transposed convolution of a node, and its output.  Raises ValueError if shapes do not fit."""
    x, w = required_spec(node, inputs, "x"), required_spec(node, inputs, "w")
    rank = len(x.shape) - 2
    if not 1 <= rank <= MAX_DIMS or len(w.shape) != rank + 2:
        raise ValueError(
            f"{node.label}: x has shape {list(x.shape)} and w {list(w.shape)}; required one rank, of 3 to "
            f"{MAX_DIMS + 2}"
        )
    w_hwoi = node.text("w_layout", "ihwo") == "hwoi"
    c, sizes, group = x.shape[-1], x.shape[1:-1], node.integer("group", 1)
    channels, filters, kernel = (
        (w.shape[-1], w.shape[-2], w.shape[:-2]) if w_hwoi else (w.shape[0], w.shape[-1], w.shape[1:-1])
    )
    if group < 1 or channels % group or not expect_equal(c, channels):
        raise ValueError(
            f"{node.label}: x has {c} channels, w {channels}; required as many, in {group} groups of equal size"
        )
    if w_hwoi and (filters != 1 or group != channels):
        raise ValueError(
            f"{node.label}: w is hwoi with {filters} filters for each of {group} groups of {channels} channels; "
            f"required one channel and one filter for each group"
        )
    check_kernel_shape(node, kernel)
    strides, dilations = per_axis(node, "strides", rank), per_axis(node, "dilations", rank)
    y_sizes, begin, end = _y_sizes(node, sizes, kernel, strides, dilations)
    m = filters * group
    geometry = Geometry(x.shape[0], channels, m, sizes, y_sizes, kernel, strides, dilations, begin, end, group)
    return with_operands(node, inputs, device, geometry, w_hwio=w_hwoi, transposed=True)


def _y_sizes(
    node: FusedNode,
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return (sizes of y, elements cut off before y, elements cut off after y), as onnxruntime defines ConvTranspose.

    With `output_shape`, elements are cut off until y has these sizes.  Otherwise SAME_UPPER and SAME_LOWER cut off
    elements until y has the sizes of x times the strides, and the pads are used in all other cases.  If the wanted y is
    larger than the full result, nothing is cut off, and elements of y that the filter does not reach equal the bias.
    """
    rank, auto_pad = len(sizes), node.text("auto_pad", "NOTSET")
    extra = _integers(node, "output_padding", rank) or [0] * rank
    beyond = [  # per axis: the size of the result before elements are cut off, minus the size of x times the stride
        added + (taps - 1) * dilation + 1 - stride
        for stride, added, taps, dilation in zip(strides, extra, kernel, dilations, strict=True)
    ]
    products = [size * stride for size, stride in zip(sizes, strides, strict=True)]
    stated = _integers(node, "output_shape", rank)
    if not stated and auto_pad in EXPLICIT_PADS:
        begin, end = explicit_pads(node, rank)
    else:
        totals = [
            maximum(0, more + (product - stated[i] if stated else 0))
            for i, (more, product) in enumerate(zip(beyond, products, strict=True))
        ]
        less, more = tuple(total // 2 for total in totals), tuple(total - total // 2 for total in totals)
        begin, end = (less, more) if auto_pad == "SAME_UPPER" else (more, less)
    left = [
        product + (more - before - after)
        for product, more, before, after in zip(products, beyond, begin, end, strict=True)
    ]
    return tuple(maximum(0, size) for size in stated or left), begin, end


def _integers(node: FusedNode, attribute: str, rank: int) -> list[int]:
    """Return an attribute with one value of at least 0 per spatial axis; an empty list if it is absent."""
    values = node.attributes.get(attribute, [])
    if not isinstance(values, list) or len(values) not in (0, rank) or any(value < 0 for value in values):
        raise ValueError(f"{node.label}: {attribute} is {values}; required {rank} integers of at least 0")
    return [int(value) for value in values]
