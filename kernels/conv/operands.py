"""Convert a fused node to a Conv: read sizes and operands, and check shapes and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from onnxfuse.activations import ACTIVATIONS, PRELU
from onnxfuse.kernels.conv.problem import Conv
from onnxfuse.kernels.elementwise.elements import activation_parameters
from onnxfuse.kernels.tensors import (
    mixed_dtypes,
    required_pointer,
    required_spec,
    shaped_pointer,
    unsupported_bfloat16,
    unsupported_choice,
    unsupported_dtype,
)
from onnxfuse.runtime.plan import Device, FusedNode, Geometry, Pointer, TensorSpec
from onnxfuse.runtime.symint import expect_equal, maximum

EXPLICIT_PADS: Final = ("NOTSET", "VALID")
AUTO_PADS: Final = (*EXPLICIT_PADS, "SAME_UPPER", "SAME_LOWER")


def unsupported(
    node: FusedNode, input_dtypes: Sequence[str], device: Device, w_layouts: Sequence[str] = ("ohwi", "hwio")
) -> str | None:
    """Return why no kernel computes this convolution on this device; None if one does.

    `w_layouts` are the supported layouts of w; the first is the default of a node without that attribute.
    """
    return (
        unsupported_dtype(node, input_dtypes)
        or unsupported_choice(node, "layout", ("nhwc",), "nchw")
        or unsupported_choice(node, "x_layout", ("nhwc", "nchw"), "nhwc")
        or unsupported_choice(node, "w_layout", w_layouts, w_layouts[0])
        or unsupported_choice(node, "residual_position", ("before", "after"), "before")
        or unsupported_choice(node, "activation", (*ACTIVATIONS, PRELU), "none")
        or unsupported_choice(node, "auto_pad", AUTO_PADS, "NOTSET")
        or mixed_dtypes(node, input_dtypes)
        or unsupported_bfloat16(node, "x", input_dtypes[0], device)
    )


def conv_of(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> tuple[Conv, TensorSpec]:
    """Return the convolution that a node computes, and its output.  Raises ValueError if shapes do not fit."""
    x, w = required_spec(node, inputs, "x"), required_spec(node, inputs, "w")
    rank = len(x.shape) - 2
    if rank < 1 or len(w.shape) != rank + 2:
        raise ValueError(
            f"{node.label}: x has shape {list(x.shape)} and w {list(w.shape)}; required one rank, of at least 3"
        )
    x_nchw, w_hwio = node.text("x_layout", "nhwc") == "nchw", node.text("w_layout", "ohwi") == "hwio"
    n, c, sizes = (x.shape[0], x.shape[1], x.shape[2:]) if x_nchw else (x.shape[0], x.shape[-1], x.shape[1:-1])
    m, c_of_group, kernel = (
        (w.shape[-1], w.shape[-2], w.shape[:-2]) if w_hwio else (w.shape[0], w.shape[-1], w.shape[1:-1])
    )
    group = node.integer("group", 1)
    if group < 1 or m % group or not expect_equal(c, c_of_group * group):
        raise ValueError(
            f"{node.label}: x has {c} channels, w {c_of_group} for each of {group} groups and {m} filters; "
            f"required as many channels as all groups have, and as many filters in each group"
        )
    check_kernel_shape(node, kernel)
    strides, dilations = per_axis(node, "strides", rank), per_axis(node, "dilations", rank)
    begin, end = _pads(node, sizes, kernel, strides, dilations)
    y_sizes = tuple(
        maximum(0, (size + before + after - (taps - 1) * dilation - 1) // stride + 1)
        for size, before, after, taps, dilation, stride in zip(
            sizes, begin, end, kernel, dilations, strides, strict=True
        )
    )
    geometry = Geometry(n, c_of_group * group, m, sizes, y_sizes, kernel, strides, dilations, begin, end, group)
    return with_operands(node, inputs, device, geometry, x_nchw=x_nchw, w_hwio=w_hwio)


def with_operands(
    node: FusedNode, inputs: Sequence[TensorSpec], device: Device, geometry: Geometry, *,
    x_nchw: bool = False, w_hwio: bool = False, transposed: bool = False,
) -> tuple[Conv, TensorSpec]:  # fmt: skip
    """Return the convolution with sizes `geometry`, and its output.  Raises ValueError if operands do not fit it."""
    y_shape = geometry.n, *geometry.y_sizes, geometry.m
    y = TensorSpec(y_shape, node.output_dtypes[0], all(tensor.aligned for tensor in inputs))
    alpha, beta = activation_parameters(node)
    conv = Conv(
        **vars(geometry), dtype=y.dtype, aligned=y.aligned,
        x=required_pointer(node, "x"), w=required_pointer(node, "w"), y=Pointer("output", 0),
        bias=shaped_pointer(node, inputs, "bias", (geometry.m,)),
        slope=_channels(node, inputs, "slope", geometry),
        column_scale=_channels(node, inputs, "column_scale", geometry),
        column_shift=_channels(node, inputs, "column_shift", geometry),
        residual=shaped_pointer(node, inputs, "residual", y.shape),
        residual_first=node.text("residual_position", "before") == "before",
        activation=node.text("activation", "none"), alpha=alpha, beta=beta, x_nchw=x_nchw, w_hwio=w_hwio,
        tf32=device.tf32, weights_constant=required_spec(node, inputs, "w").constant, transposed=transposed,
        gate=shaped_pointer(node, inputs, "gate", (geometry.n, *[1] * len(geometry.sizes), geometry.c)),
    )  # fmt: skip
    _check_vectors(node, conv)
    if conv.gate and not conv.pointwise:
        raise ValueError(f"{node.label}: x has a gate; required a filter of one tap at every pixel, in one group")
    return conv, y


def _check_vectors(node: FusedNode, conv: Conv) -> None:
    """Raise ValueError if prelu has no slope, another activation has one, or a slope and a column_shift are present."""
    if (conv.activation == PRELU) != (conv.slope is not None):
        raise ValueError(f"{node.label}: activation is {conv.activation}; required a slope for prelu alone")
    if conv.slope and conv.column_shift:
        raise ValueError(f"{node.label}: slope and column_shift are present; required at most one of them")


def check_kernel_shape(node: FusedNode, kernel: tuple[int, ...]) -> None:
    """Raise ValueError if `kernel` differs from the node's attribute kernel_shape."""
    declared = node.attributes.get("kernel_shape", list(kernel))
    if declared != list(kernel):
        raise ValueError(f"{node.label}: w has taps {list(kernel)}; required kernel_shape, which is {declared}")


def per_axis(node: FusedNode, attribute: str, rank: int) -> tuple[int, ...]:
    """Return an attribute that has one positive value per spatial axis; ones if it is absent."""
    values = node.attributes.get(attribute, [1] * rank)
    if not isinstance(values, list) or len(values) != rank or any(value < 1 for value in values):
        raise ValueError(f"{node.label}: {attribute} is {values}; required {rank} positive integers")
    return tuple(map(int, values))


def explicit_pads(node: FusedNode, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the padding before and after each spatial axis; the node's auto_pad is one of EXPLICIT_PADS."""
    if node.text("auto_pad", "NOTSET") == "VALID":
        return (0,) * rank, (0,) * rank
    pads = node.attributes.get("pads", [0] * 2 * rank)
    if not isinstance(pads, list) or len(pads) != 2 * rank or any(pad < 0 for pad in pads):
        raise ValueError(f"{node.label}: pads are {pads}; required {2 * rank} integers of at least 0")
    return tuple(map(int, pads[:rank])), tuple(map(int, pads[rank:]))


def _pads(
    node: FusedNode,
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the padding before and after each spatial axis, as the ONNX operator Conv defines them."""
    rank, auto_pad = len(sizes), node.text("auto_pad", "NOTSET")
    if auto_pad in EXPLICIT_PADS:
        return explicit_pads(node, rank)
    totals = [
        maximum(0, (taps - 1) * dilation - (size - 1) % stride)
        for size, taps, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True)
    ]
    less, more = tuple(total // 2 for total in totals), tuple(total - total // 2 for total in totals)
    return (less, more) if auto_pad == "SAME_UPPER" else (more, less)


def _channels(node: FusedNode, inputs: Sequence[TensorSpec], name: str, geometry: Geometry) -> Pointer | None:
    """Return the pointer to an operand with one number per channel, which has the shape (m, 1, ...); None if absent."""
    return shaped_pointer(node, inputs, name, (geometry.m, *[1] * len(geometry.sizes)))
