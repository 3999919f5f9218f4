"""The plans of convolutions of channels-last tensors with bias, residual and activation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from onnxfuse.kernels.conv import (
    cudnn,
    depthwise,
    depthwise_mma,
    depthwise_sliding,
    grouped,
    hopper,
    matrix,
    mma,
    stem,
)
from onnxfuse.kernels.conv.operands import conv_of, unsupported
from onnxfuse.kernels.conv.plans import plans, with_library
from onnxfuse.kernels.conv.problem import Conv, of_fewer_axes
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.plan import Device, FusedNode, Plan, TensorSpec
from onnxfuse.runtime.symint import is_symbolic

# Of the implementations of a depthwise convolution that have several kernels.
MAX_MMA: Final = 3
MAX_DEPTHWISE: Final = 2
# Matrix units compute the columns of y that a stride leaves out as well. For eight strided filters of 3x3 and 5x5, with
# 64 to 672 channels and batch 32, they take 1.1 to 1.6 times as long as fma on an H200.
FEW_STRIDED_TAPS: Final = 25


def _depthwise(conv: Conv, device: Device) -> list[Implementation]:
    general = [(depthwise_mma.implementations, MAX_MMA), (depthwise.implementations, MAX_DEPTHWISE)]
    if max(conv.strides) > 1 and conv.taps <= FEW_STRIDED_TAPS:
        general.reverse()
    kinds = [(depthwise_sliding.implementations, None), *general]
    every = [(found, most) for kind, most in kinds if (found := kind(conv, device))]
    if len(every) == 1 or is_symbolic(conv.n, *conv.sizes):  # the first kind alone: a template has few kernels
        return every[0][0] if every else []
    return [way for found, most in every for way in found[:most]]


# Kernels for one kind of convolution, of which at most one kind takes each; then those that take any.
KINDS: Final[tuple[Callable[[Conv, Device], list[Implementation]], ...]] = (
    matrix.implementations,
    _depthwise,
    stem.implementations,
    grouped.implementations,
    hopper.implementations,
    mma.implementations,
)


def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Return why no kernel runs this node on this device; None if one does."""
    return unsupported(node, input_dtypes, device)


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the plans for these shapes, the expected fastest first.  Raises ValueError if shapes do not fit."""
    conv, y = conv_of(node, inputs, device)
    return plans(node, conv, y, lambda: implementations(of_fewer_axes(conv), device))


def implementations(conv: Conv, device: Device) -> list[Implementation]:
    """Return the ways to run a convolution with at least one element of y, the expected fastest first."""
    own = next((found for kind in KINDS if (found := kind(conv, device))), [])
    dynamic = is_symbolic(conv.n, *conv.sizes)  # cuDNN is asked for engines by their numbers
    return with_library(own, [] if own and dynamic else cudnn.implementations(conv, device))
