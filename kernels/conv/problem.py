"""A convolution of channels-last tensors with its epilogue, as the hosts of every convolution kernel see it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onnxfuse.kernels.epilogue import epilogue_defines
from onnxfuse.kernels.tensors import ABSENT, Defines
from onnxfuse.runtime.plan import Argument, Pointer, Scalar


@dataclass(frozen=True)
class Conv:
    """y = activation(conv(x, w) + bias) + residual; the residual comes before the activation where `residual_first`.

    It is computed in fp32 and rounded once.  Sizes, strides and so on have one entry for each spatial axis, the
    innermost last: (H, W) in two dimensions.  x is (n, *sizes, c), or (n, c, *sizes) where `x_nchw`; y and residual are
    (n, *y_sizes, m); w is (m, *kernel, c / group), or (*kernel, c / group, m) where `w_hwio`.  All are contiguous.  An
    operand that is None is absent.

    Of a `transposed` one, which is ONNX's ConvTranspose, w is (c, *kernel, m / group), or (*kernel, m / group, c) where
    `w_hwio`; its pads are what is cut off the result.
    """

    n: int  # images
    c: int  # channels of x
    m: int  # channels of y: filters
    sizes: tuple[int, ...]  # of x
    y_sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads_begin: tuple[int, ...]
    pads_end: tuple[int, ...]
    group: int
    dtype: str  # of all operands
    aligned: bool  # every pointer is a multiple of 16 bytes
    x: Pointer
    w: Pointer
    y: Pointer
    bias: Pointer | None = None  # m elements
    residual: Pointer | None = None
    residual_first: bool = True
    activation: str = "none"  # a name of onnxfuse.activations.ACTIVATIONS
    alpha: float = 0.0
    beta: float = 0.0
    x_nchw: bool = False
    w_hwio: bool = False
    tf32: bool = False  # float32 operands may be rounded to TF32
    weights_constant: bool = False  # no kernel writes w
    transposed: bool = False

    @property
    def pixels(self) -> int:
        """The number of positions of y, of all images."""
        return self.n * math.prod(self.y_sizes)

    @property
    def taps(self) -> int:
        """The number of positions of the filter."""
        return math.prod(self.kernel)

    @property
    def depthwise(self) -> bool:
        """Whether each channel of y reads one channel of x."""
        return self.group > 1 and self.group == self.c

    @property
    def pointwise(self) -> bool:
        """Whether every pixel of y reads one pixel of x, at the same position, so that it is a matrix product."""
        unpadded = not any(self.pads_begin) and not any(self.pads_end)
        return self.taps == 1 and unpadded and set(self.strides) <= {1} and self.group == 1 and not self.x_nchw

    def epilogue_defines(self) -> Defines:
        """Return the macros of epilogue.cuh."""
        return epilogue_defines(
            self.dtype,
            self.activation,
            bias=self.bias is not None,
            residual=self.residual is not None,
            residual_first=self.residual_first,
        )


def arguments_of_image(conv: Conv) -> tuple[Argument, ...]:
    """Return the arguments of kernels of images: operands, alpha and beta, then n, and two each of sizes and pads."""
    pointers = (conv.x, conv.w, conv.bias, conv.residual, conv.y)
    sizes = (conv.n, *two(conv.sizes), *two(conv.y_sizes), *two(conv.pads_begin, missing=0))
    return (
        *(pointer or ABSENT for pointer in pointers),
        Scalar(conv.alpha, "float32"),
        Scalar(conv.beta, "float32"),
        *(Scalar(size, "int32") for size in sizes),
    )


def two(values: tuple[int, ...], missing: int = 1) -> tuple[int, int]:
    """Return the entries of height and width; `missing` is that of the height of a convolution over one axis."""
    height, width = (missing, *values)[-2:]
    return height, width


def three(values: tuple[int, ...], missing: int = 1) -> tuple[int, int, int]:
    """Return the entries of depth, height and width; `missing` is that of axes that the convolution lacks."""
    depth, height, width = (missing, missing, *values)[-3:]
    return depth, height, width
