"""Convolutions by cuDNN, whose kernels compute the epilogue, too."""

from __future__ import annotations

import functools
import logging
from dataclasses import fields, replace
from typing import Final, TypeGuard, get_args

from onnxfuse.kernels.conv.problem import Conv
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime import run_plan
from onnxfuse.runtime.native_library import NativeError
from onnxfuse.runtime.plan import Convolution, ConvolutionActivation, Device, Pointer
from onnxfuse.runtime.symint import is_symbolic

log: Final = logging.getLogger("onnxfuse")

MAX_ENGINES: Final = 3
MAX_ENGINES_ASKED: Final = 12  # engines tried per convolution; many of them differ only in a setting
MAX_WORKSPACE_BYTES: Final = 64 << 20
CUDNN_ACTIVATIONS: Final = get_args(ConvolutionActivation)  # activations that cuDNN fuses with a convolution


def implementations(conv: Conv, device: Device) -> list[Implementation]:
    """Return an implementation for each engine that cuDNN proposes for a non-empty convolution, in cuDNN's order.

    Engines whose kernel cuDNN compiles at run time are left out, because that would take up to some seconds for each
    new shape in each process.  The list is empty if cuDNN is missing or lacks the activation, or if the GPU is in
    another machine.  It is also empty for slopes of a PRelu, for a scale, a shift or further operators after the
    activation, for dynamic sizes, for x in NCHW, for w in HWIO, for misaligned operands (engines reject these at run
    time), and for a transposed convolution that is not the gradient of a convolution.
    """
    if (
        conv.x_nchw
        or conv.program
        or conv.w_hwio
        or not conv.aligned
        or (conv.transposed and not _is_gradient(conv))
        or not _is_cudnn_activation(conv.activation)
        or conv.column_scale
        or conv.extra
        or is_symbolic(conv.n, *conv.sizes)  # cuDNN proposes engines for one shape
        or not (device.is_here and _is_available())
    ):
        return []
    convolution = _convolution(conv, conv.activation)
    found = run_plan.convolution_engines(convolution, device.ordinal, MAX_ENGINES_ASKED)
    kept = [engine for engine in found if not engine.compiles][:MAX_ENGINES]
    return [_with_engine(convolution, engine, rank) for rank, engine in enumerate(kept)]


def _is_gradient(conv: Conv) -> bool:
    """Return whether this transposed convolution is the gradient of a convolution whose input has the sizes of y.

    The result of that convolution must have the sizes of x.  It would be larger than x if y extends beyond the
    filter's last position by a stride or more; the function then returns False.
    """
    axes = zip(
        conv.sizes, conv.y_sizes, conv.kernel, conv.strides, conv.dilations, conv.pads_begin, conv.pads_end, strict=True
    )
    return all(
        (y + before + after - (taps - 1) * dilation - 1) // stride + 1 == size
        for size, y, taps, stride, dilation, before, after in axes
    )


@functools.cache
def _is_available() -> bool:
    try:
        run_plan.cudnn()
    except NativeError as error:
        log.warning("convolutions run without cuDNN, which some sizes are faster with: %s", error)
        return False
    return True


def _is_cudnn_activation(activation: str) -> TypeGuard[ConvolutionActivation]:
    return activation in CUDNN_ACTIVATIONS


def _convolution(conv: Conv, activation: ConvolutionActivation) -> Convolution:
    shared = {each.name: getattr(conv, each.name) for each in fields(Convolution) if hasattr(conv, each.name)}
    return Convolution(**shared | {"activation": activation, "workspace_bytes": MAX_WORKSPACE_BYTES})


def _with_engine(convolution: Convolution, engine: run_plan.Engine, rank: int) -> Implementation:
    size = engine.workspace_bytes
    workspace = Pointer("scratch", 0) if size else None
    step = replace(convolution, engine=engine.words, workspace=workspace, workspace_bytes=size)
    return Implementation(f"cudnn {rank}", (step,), (size,) if size else ())
