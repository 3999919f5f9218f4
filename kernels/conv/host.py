"""The plans of convolutions of channels-last tensors with bias, residual and activation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from onnxfuse.kernels.conv import (
    cudnn,
    depthwise,
    depthwise_mma,
    depthwise_sliding,
    gate,
    grouped,
    hopper,
    matrix,
    mma,
    stem,
)
from onnxfuse.kernels.conv.operands import conv_of, unsupported
from onnxfuse.kernels.conv.plans import plans, with_library
from onnxfuse.kernels.conv.problem import Conv, of_fewer_axes
from onnxfuse.kernels.epilogue_node import also_joined, is_joined
from onnxfuse.kernels.epilogue_program import joined_plans
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.plan import Device, FusedNode, Launch, Matmul, Plan, TensorSpec
from onnxfuse.runtime.symint import for_later_plans, is_symbolic

# The maximum number of implementations of each kernel, if several kernels support the convolution.
MAX_MMA: Final = 3
MAX_DEPTHWISE: Final = 2
MAX_OF_PRODUCTS: Final = 3  # maximum of the convolution kernels for a pointwise one, which gemm kernels compute as well
# With at most this many taps, kernels on CUDA cores come first for strided depthwise convolutions. Tensor cores also
# compute the columns of y that the stride skips: for eight strided filters of 3x3 and 5x5, with 64 to 672 channels and
# batch 32, they take 1.1 to 1.6 times as long as CUDA cores on an H200.
FEW_STRIDED_TAPS: Final = 25


def _depthwise(conv: Conv, device: Device) -> list[Implementation]:
    general = [(depthwise_mma.implementations, MAX_MMA), (depthwise.implementations, MAX_DEPTHWISE)]
    if max(conv.strides) > 1 and conv.taps <= FEW_STRIDED_TAPS:
        general.reverse()
    kinds = [(depthwise_sliding.implementations, None), *general]
    every = [(found, most) for kind, most in kinds if (found := kind(conv, device))]
    if len(every) == 1 or is_symbolic(conv.n, *conv.sizes):  # dynamic sizes get only one kind, to compile fewer kernels
        return every[0][0] if every else []
    return [way for found, most in every for way in found[:most]]


def _pointwise(conv: Conv, device: Device) -> list[Implementation]:
    """Return the implementations of a pointwise convolution as a product; in float32, also by convolution kernels.

    The gemm kernels leave TF32 to cuBLASLt if weights are n x k, as here. The convolution kernels use wgmma, and are
    faster than cuBLASLt if x has at least as many channels as y. Times on an H200, by convolution kernel and by
    cuBLASLt, for pixels x channels of y x channels of x: 100352x64x256 40.7 and 47.7 us, 25088x128x512 22.8 and
    26.8 us; but 100352x256x64, which mostly reads and writes y, 76.5 and 68.7 us.
    """
    products = matrix.implementations(conv, device)
    if not products or conv.dtype != "float32" or not _is_of_many_rows(products[0]):
        return products
    library = [each for each in products if isinstance(each.steps[0], Matmul)]
    others = [each for each in products if each not in library]
    is_first = conv.c >= conv.m or not library
    with for_later_plans(0 if is_first else conv.pixels):
        own = hopper.implementations(conv, device)[:MAX_OF_PRODUCTS]
    first, second = (own, library) if is_first else (library, own)
    return [*first, *second, *others]


def _is_of_many_rows(product: Implementation) -> bool:
    step = product.steps[0]
    return isinstance(step, Matmul) or (isinstance(step, Launch) and step.kernel.source == "gemm_mma")


# The kernels for special kinds of convolution come first; at most one of these supports a given convolution.  The
# general kernels follow.
KINDS: Final[tuple[Callable[[Conv, Device], list[Implementation]], ...]] = (
    _pointwise,
    _depthwise,
    stem.implementations,
    grouped.implementations,
    hopper.implementations,
    mma.implementations,
)


WITH_PROGRAMS: Final = (_pointwise, stem.implementations, hopper.implementations, mma.implementations)


supports = also_joined(unsupported)


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the plans for these shapes, the expected fastest first.  Raises ValueError if shapes do not fit."""
    if is_joined(node):
        return joined_plans(node, inputs, device, conv_of, of_programs, candidates)
    conv, y = conv_of(node, inputs, device)
    if conv.gate:
        return gate.plans(node, inputs, device, candidates)
    return plans(node, conv, y, lambda: implementations(of_fewer_axes(conv), device))


def of_programs(conv: Conv, device: Device) -> list[Implementation]:
    """Return the implementations with a program in the epilogue; none if a kernel without programs is faster.

    A program is the code of elementwise operators that are fused into the epilogue.  Kernels without programs are
    faster for depthwise and grouped convolutions.
    """
    if conv.gate:
        return matrix.implementations(conv, device)
    conv = of_fewer_axes(conv)
    plain = replace(conv, program=None)
    if any(kind(plain, device) for kind in (_depthwise, grouped.implementations)):
        return []
    return next((found for kind in WITH_PROGRAMS if (found := kind(conv, device))), [])


def implementations(conv: Conv, device: Device) -> list[Implementation]:
    """Return the implementations of a convolution with non-empty y, fastest expected first."""
    own = next((found for kind in KINDS if (found := kind(conv, device))), [])
    dynamic = is_symbolic(conv.n, *conv.sizes)  # cuDNN proposes engines only for static sizes
    return with_library(own, [] if own and dynamic else cudnn.implementations(conv, device))
