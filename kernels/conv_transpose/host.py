"""The plans of transposed convolutions of channels-last tensors with bias, residual and activation."""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.kernels.conv import cudnn
from onnxfuse.kernels.conv.plans import plans, with_library
from onnxfuse.kernels.conv.problem import Conv
from onnxfuse.kernels.conv_transpose import depthwise, hopper, mma
from onnxfuse.kernels.conv_transpose.operands import conv_transpose_of, unsupported
from onnxfuse.kernels.epilogue_node import also_joined, is_joined
from onnxfuse.kernels.epilogue_program import joined_plans
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.plan import Device, FusedNode, Plan, TensorSpec
from onnxfuse.runtime.symint import is_symbolic

supports = also_joined(unsupported)


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the plans for these shapes, the expected fastest first.  Raises ValueError if shapes do not fit."""
    if is_joined(node):
        return joined_plans(node, inputs, device, conv_transpose_of, _of_programs, candidates)
    conv, y = conv_transpose_of(node, inputs, device)
    return plans(node, conv, y, lambda: implementations(conv, device))


def _of_programs(conv: Conv, device: Device) -> list[Implementation]:
    """Return the implementations whose epilogue runs a program: elementwise operators that are fused into the node.

    The wgmma kernel does not support programs.
    """
    return depthwise.implementations(conv, device) or mma.implementations(conv, device)


def implementations(conv: Conv, device: Device) -> list[Implementation]:
    """Return the implementations of a transposed convolution with non-empty y, fastest expected first."""
    by_wgmma = hopper.implementations(conv, device)
    if is_symbolic(conv.n, *conv.sizes):  # plans for dynamic sizes have few kernels: of one kind, without cuDNN
        return by_wgmma or depthwise.implementations(conv, device) or mma.implementations(conv, device)
    others = depthwise.implementations(conv, device) or mma.implementations(conv, device)
    return with_library([*by_wgmma, *others], cudnn.implementations(conv, device))
