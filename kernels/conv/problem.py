"""A convolution of channels-last tensors with its epilogue, as the hosts of every convolution kernel see it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from onnxfuse.kernels.epilogue import epilogue_defines
from onnxfuse.kernels.epilogue_program import EpilogueProgram
from onnxfuse.kernels.tensors import ABSENT, Defines
from onnxfuse.runtime.plan import Argument, Pointer, Scalar
from onnxfuse.runtime.symint import is_symbolic


@dataclass(frozen=True)
class Conv:
    """y = activation(conv(x, w) + bias) * column_scale + column_shift + residual.

    The residual comes before the activation where `residual_first`.  With a gate, which only a `pointwise` one has, x
    is multiplied by it first, and rounded to its dtype.

    It is computed in fp32 and rounded once.  Sizes, strides and so on have one entry for each spatial axis, the
    innermost last: (H, W) in two dimensions.  x is (n, *sizes, c), or (n, c, *sizes) where `x_nchw`; y and residual are
    (n, *y_sizes, m); w is (m, *kernel, c / group), or (*kernel, c / group, m) where `w_hwio`.  All are contiguous.  An
    operand that is None is absent.

    Of a `transposed` one, which is ONNX's ConvTranspose, w is (c, *kernel, m / group), or (*kernel, m / group, c) where
    `w_hwio`; its pads are cut off the result.
    """

    n: int  # images
    c: int  # channels of x
    m: int  # channels of y: filters
    sizes: tuple[int, ...]  # spatial sizes of x
    y_sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads_begin: tuple[int, ...]
    pads_end: tuple[int, ...]
    group: int
    dtype: str  # dtype of all operands
    aligned: bool  # every pointer is a multiple of 16 bytes
    x: Pointer
    w: Pointer
    y: Pointer
    bias: Pointer | None = None  # m elements
    slope: Pointer | None = None  # m slopes of a PRelu, which is the activation; not with a column_shift
    column_scale: Pointer | None = None  # m elements
    column_shift: Pointer | None = None  # m elements
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
    program: EpilogueProgram | None = None  # operators that follow
    gate: Pointer | None = None  # (n, ones, c): a factor for each channel of an image of x

    @property
    def extra(self) -> Pointer | None:
        """The column vector slope or column_shift; an epilogue has at most one of them."""
        return self.slope or self.column_shift

    @property
    def operands(self) -> tuple[Argument, ...]:
        """The first arguments of kernels: x, w, the vectors of the epilogue, residual and y."""
        pointers = (self.x, self.w, self.bias, self.extra, self.column_scale, self.residual, self.y)
        return tuple(pointer or ABSENT for pointer in pointers)

    @property
    def pixels(self) -> int:
        """The number of positions of y, of all images."""
        return self.n * math.prod(self.y_sizes)

    @property
    def rows(self) -> int:
        """The rows of y: its pixels, each of m columns."""
        return self.pixels

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
            slope=self.slope is not None,
            column_scale=self.column_scale is not None,
            column_shift=self.column_shift is not None,
            residual=self.residual is not None,
            residual_first=self.residual_first,
        )


def of_fewer_axes(conv: Conv) -> Conv:
    """Return a convolution of three spatial axes as one of two, where one tap along axes lets it be one.

    Convolutions over space alone have an image for each depth; to those over depth alone, pixels of a depth are a row.
    """
    alone = [
        taps == stride == 1 and before == behind == 0
        for taps, stride, before, behind in zip(conv.kernel, conv.strides, conv.pads_begin, conv.pads_end, strict=True)
    ]
    fields = ("sizes", "y_sizes", "kernel", "strides", "dilations", "pads_begin", "pads_end")
    if len(alone) == 3 and alone[0] and (conv.c == 1 or not conv.x_nchw):
        inner = {name: getattr(conv, name)[1:] for name in fields}
        return replace(conv, n=conv.n * conv.sizes[0], **inner)
    if len(alone) == 3 and alone[1] and alone[2]:
        outer = {name: getattr(conv, name)[:2] for name in fields}
        rows = {name: (getattr(conv, name)[0], math.prod(getattr(conv, name)[1:])) for name in ("sizes", "y_sizes")}
        return replace(conv, **{**outer, **rows})
    return conv


def arguments_of_image(conv: Conv) -> tuple[Argument, ...]:
    """Return the arguments of kernels of images: operands, alpha and beta, then n, and two each of sizes and pads."""
    sizes = (conv.n, *two(conv.sizes), *two(conv.y_sizes), *two(conv.pads_begin, missing=0))
    return (
        *conv.operands,
        Scalar(conv.alpha, "float32"),
        Scalar(conv.beta, "float32"),
        *(Scalar(size, "int32") for size in sizes),
    )


def plain_pads(conv: Conv) -> Conv:
    """Return the convolution with plain integers for the padding in front, which some kernels hold as constants.

    Of auto_pad and dynamic sizes it is one of few numbers: guards say for which sizes.
    """
    reach = [(taps - 1) * dilation for taps, dilation in zip(conv.kernel, conv.dilations, strict=True)]
    begin = (
        next(each for each in range(most + 1) if each == pad) if is_symbolic(pad) else pad
        for pad, most in zip(conv.pads_begin, reach, strict=True)
    )
    return replace(conv, pads_begin=tuple(begin)) if is_symbolic(*conv.pads_begin) else conv


def two(values: tuple[int, ...], missing: int = 1) -> tuple[int, int]:
    """Return the entries of height and width; `missing` is the entry of the height for a convolution over one axis."""
    height, width = (missing, *values)[-2:]
    return height, width


def three(values: tuple[int, ...], missing: int = 1) -> tuple[int, int, int]:
    """Return the entries of depth, height and width; `missing` is the entry of axes that the convolution lacks."""
    depth, height, width = (missing, missing, *values)[-3:]
    return depth, height, width
