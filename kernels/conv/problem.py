"""The description of a channels-last convolution and its epilogue that all convolution kernels share."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from onnxfuse.kernels.epilogue import epilogue_defines, epilogue_operands
from onnxfuse.kernels.epilogue_program import EpilogueProgram
from onnxfuse.kernels.gemm.problem import EightBits
from onnxfuse.kernels.tensors import ITEM_BYTES, Defines, int32
from onnxfuse.runtime.plan import Argument, Geometry, Pointer, Struct
from onnxfuse.runtime.symint import is_symbolic


@dataclass(frozen=True)
class Conv(Geometry):
    """y = activation(conv(x, w) + bias) * column_scale + column_shift + residual.

    With `residual_first`, the residual is added before the activation.  With a gate, which only `pointwise`
    convolutions have, x is first multiplied by the gate and rounded to its dtype.

    Arithmetic is in fp32, and results are rounded once.  x is (n, *sizes, c), or (n, c, *sizes) where `x_nchw`; y and
    residual are (n, *y_sizes, m); w is (m, *kernel, c / group), or (*kernel, c / group, m) where `w_hwio`.  All are
    contiguous.  An absent operand is None.

    `transposed`: the operator is ONNX's ConvTranspose. Then w is (c, *kernel, m / group), or (*kernel, m / group, c)
    where `w_hwio`, and the pads are cut off the result.
    """

    dtype: str  # dtype of all operands
    aligned: bool  # every address is a multiple of 16 bytes
    x: Pointer
    w: Pointer
    y: Pointer
    bias: Pointer | None = None  # m elements
    slope: Pointer | None = None  # m slopes, if the activation is PRelu; excludes column_shift
    column_scale: Pointer | None = None  # m elements
    column_shift: Pointer | None = None  # m elements
    residual: Pointer | None = None
    residual_first: bool = True
    activation: str = "none"  # a name of onnxfuse.activations.ACTIVATIONS
    alpha: float = 0.0
    beta: float = 0.0
    x_nchw: bool = False
    w_hwio: bool = False
    tf32: bool = False  # the kernel is allowed to round float32 operands to TF32
    weights_constant: bool = False  # w is a constant of the model, so no kernel writes it
    transposed: bool = False
    program: EpilogueProgram | None = None  # elementwise operators applied to y before it is stored
    gate: Pointer | None = None  # a factor for each image and channel of x: (n, 1, ..., 1, c)
    eight_bits: EightBits | None = None  # x and w have 8 bits

    @property
    def item(self) -> int:
        """The bytes of an element of x and w."""
        return 1 if self.eight_bits else ITEM_BYTES[self.dtype]

    @property
    def extra(self) -> Pointer | None:
        """The column vector slope or column_shift; an epilogue has at most one of them."""
        return self.slope or self.column_shift

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The first kernel arguments: x, w, EpilogueOperands of epilogue.cuh, and ConvSizes of conv_sizes.cuh."""
        sizes = (*three(self.sizes), *three(self.y_sizes), *three(self.pads_begin, missing=0))
        return self.x, self.w, self.epilogue_operands, Struct(int32(self.n, *sizes))

    @property
    def epilogue_operands(self) -> Struct:
        """EpilogueOperands of epilogue.cuh."""
        vectors = (self.bias, self.extra, self.column_scale)
        return epilogue_operands(vectors, self.residual, self.y, (self.alpha, self.beta))

    @property
    def pixels(self) -> int:
        """The number of pixels of y in all images."""
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
        """Whether every pixel of y reads one pixel of x, at the same position: the convolution is a matrix product."""
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
    """Return a 3-D convolution as an equal 2-D one, if its filter has one tap along depth, or along height and width.

    With one tap along depth, each depth becomes an image. With taps along depth only, a depth's pixels become a row.
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


def plain_pads(conv: Conv) -> Conv:
    """Return the convolution with plain integers as `pads_begin`, which is a macro of some kernels.

    With auto_pad and dynamic sizes, a pad can have only few values.  The function takes one of them, and guards
    (conditions on the sizes) restrict the plan to sizes that have this pad.
    """
    reach = [(taps - 1) * dilation for taps, dilation in zip(conv.kernel, conv.dilations, strict=True)]
    begin = (
        next(each for each in range(most + 1) if each == pad) if is_symbolic(pad) else pad
        for pad, most in zip(conv.pads_begin, reach, strict=True)
    )
    return replace(conv, pads_begin=tuple(begin)) if is_symbolic(*conv.pads_begin) else conv


def two(values: tuple[int, ...], missing: int = 1) -> tuple[int, int]:
    """Return the entries of height and width; the height of a 1-D convolution is `missing`."""
    height, width = (missing, *values)[-2:]
    return height, width


def three(values: tuple[int, ...], missing: int = 1) -> tuple[int, int, int]:
    """Return the entries of depth, height and width; axes that the convolution lacks get `missing`."""
    depth, height, width = (missing, missing, *values)[-3:]
    return depth, height, width
