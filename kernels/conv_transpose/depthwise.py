"""The host side of conv_transpose_depthwise.cu: depthwise transposed convolutions on CUDA cores."""

from __future__ import annotations

import math
from typing import Final

from onnxfuse.kernels.conv.problem import Conv
from onnxfuse.kernels.conv_transpose.mma import geometry_defines
from onnxfuse.kernels.epilogue_program import with_program
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.tensors import ITEM_BYTES, VECTOR_BYTES
from onnxfuse.runtime.plan import Device, Kernel, Launch
from onnxfuse.runtime.symint import estimate

THREADS: Final = 128  # threads per block
MAX_SUMS: Final = 64  # registers per thread for sums
MAX_WIDTHS: Final = 3  # access widths to try; narrower accesses give more threads


def implementations(conv: Conv, device: Device) -> list[Implementation]:
    """Return the implementations, fastest expected first; none unless `conv` is depthwise, with w in layout hwoi."""
    if not conv.w_hwio or not conv.pixels * conv.c:
        return []
    found = [implementation(conv, width, device) for width in widths(conv)]
    blocks_wanted = 4 * device.multiprocessors
    return sorted(found, key=lambda each: estimate(_blocks(each)) < blocks_wanted)


def widths(conv: Conv) -> list[int]:
    """Return the access widths to try, in elements, widest first."""
    item = ITEM_BYTES[conv.dtype]
    width = math.gcd(conv.c * item, VECTOR_BYTES) // item if conv.aligned else 1
    while width > 1 and width * conv.strides[-1] > MAX_SUMS:
        width //= 2
    return [each for i in range(MAX_WIDTHS) if (each := width >> i)]


def implementation(conv: Conv, width: int, device: Device) -> Implementation:
    """Return the implementation with accesses of `width` elements."""
    stride, pad, rows = conv.strides[-1], conv.pads_begin[-1], conv.n * math.prod(conv.y_sizes[:-1])
    strips = (conv.y_sizes[-1] - 1 + pad) // stride + 1 - pad // stride
    defines = {
        **conv.epilogue_defines(), **geometry_defines(conv), "CHANNELS": conv.c, "WIDTH": width, "THREADS": THREADS,
        "WEIGHTS_CONSTANT": int(conv.weights_constant),
    }  # fmt: skip
    kernel = Kernel("conv_transpose_depthwise", "conv_transpose_depthwise", defines)
    blocks = -(-rows * strips * (conv.c // width) // THREADS)
    kernel, arguments = with_program(kernel, conv.arguments, conv.program)
    launch = Launch(kernel, (blocks, 1, 1), (THREADS, 1, 1), arguments, pdl=device.has_pdl)
    return Implementation(f"conv_transpose_depthwise {width}", (launch,))


def _blocks(way: Implementation) -> int:
    (step,) = way.steps
    assert isinstance(step, Launch)
    return step.grid[0]
