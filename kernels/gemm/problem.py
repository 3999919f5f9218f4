"""A matrix product with its epilogue, as the host code of all GEMM kernels describes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnxfuse.ir.dtypes import FLOAT8
from onnxfuse.kernels.epilogue import epilogue_defines, epilogue_operands
from onnxfuse.kernels.epilogue_program import EpilogueProgram
from onnxfuse.kernels.prologue_node import Norm
from onnxfuse.kernels.tensors import ITEM_BYTES, Defines
from onnxfuse.runtime.plan import Pointer, Struct


@dataclass(frozen=True)
class EightBits:
    """Operands of 8 bits, integers or float8: x represents (x - x_zero) * x_scale, and w (w - w_zero) * w_scale.

    `Gemm.dtype` is then the dtype of the scales, the bias, the residual and y.
    """

    x_dtype: str  # int8, uint8 or float8_e4m3fn
    x_scale: Pointer  # one number
    w_scale: Pointer
    w_scales: int  # how many numbers w_scale has: one, or one for each column of y
    x_zero: Pointer | None  # zero point of x; None means 0
    w_sums: Pointer | None  # sums of w, as in algebra/filter_edges.py; used with x_zero
    is_symmetric: bool  # kernels can multiply the values: x has 8 bits, w is int8 or float8, and w_zero is 0

    @property
    def are_float8(self) -> bool:
        """Whether x and w are float8 numbers; these have no zero points."""
        return self.x_dtype == FLOAT8


@dataclass(frozen=True)
class Gemm:
    """y = activation(x w + bias) [* (x up + up_bias)] * column_scale + column_shift + residual, rounded once from fp32.

    With a gate, x is first multiplied by the gate and rounded to x's dtype.

    All matrices are row-major, contiguous and of one dtype: x is m x k, y and residual are m x n; w and up are k x n,
    or n x k if `transposed`.  An operand that is None is absent.
    """

    m: int
    n: int
    k: int
    dtype: str  # dtype of all matrices and vectors
    transposed: bool
    aligned: bool  # whether every pointer is a multiple of 16 bytes
    x: Pointer
    w: Pointer
    y: Pointer
    bias: Pointer | None = None  # n elements
    up: Pointer | None = None  # the second weight of a gated product
    up_bias: Pointer | None = None  # n elements
    slope: Pointer | None = None  # n slopes, if the activation is PRelu
    column_scale: Pointer | None = None  # n elements
    column_shift: Pointer | None = None  # n elements
    residual: Pointer | None = None
    residual_first: bool = False  # the residual is added before the activation; not for gated products
    activation: str = "none"  # a name of onnxfuse.activations.ACTIVATIONS
    alpha: float = 0.0
    beta: float = 0.0
    tf32: bool = False  # the kernel is allowed to round float32 operands to TF32
    weights_constant: bool = False  # no kernel writes w and up, so they can be read before the previous kernel ends
    program: EpilogueProgram | None = None  # operators fused after the product; None for grouped products
    gate: Pointer | None = None  # k factors per `gate_rows` rows of x
    gate_rows: int = 1
    grouped: tuple[Gemm, ...] = ()  # further products of the same x, with at most a bias, in the same launch
    eight_bits: EightBits | None = None  # x and w have 8 bits
    norm: Norm | None = None  # w multiplies the norm's result, and x is the norm's operand; for stream.py alone

    @property
    def item(self) -> int:
        """The bytes of an element of x and w."""
        return 1 if self.eight_bits else ITEM_BYTES[self.dtype]

    @property
    def products(self) -> tuple[Gemm, ...]:
        """The products of one launch."""
        return (self, *self.grouped)

    @property
    def stores_y(self) -> bool:
        """Whether the kernel stores y; if not, the program stores all outputs, whose dtypes differ from y's."""
        return self.program is None or self.program.dtype == self.dtype

    @property
    def rows(self) -> int:
        """The rows of y."""
        return self.m

    @property
    def extra(self) -> Pointer | None:
        """The column vector up_bias, slope or column_shift; an epilogue has at most one of them."""
        return self.up_bias or self.slope or self.column_shift

    @property
    def epilogue_operands(self) -> Struct:
        """EpilogueOperands of epilogue.cuh."""
        return epilogue_operands(
            (self.bias, self.extra, self.column_scale), self.residual, self.y, (self.alpha, self.beta)
        )

    @property
    def weight_count(self) -> int:
        """The number of weights per product: 2 (w and up) if gated, else 1."""
        return 2 if self.up else 1

    @property
    def flops(self) -> int:
        """Multiplications and additions of the products."""
        return 2 * self.m * self.n * self.k * self.weight_count

    def epilogue_defines(self) -> Defines:
        """Return the macros of epilogue.cuh for the products of one launch."""
        return epilogue_defines(
            self.dtype,
            self.activation,
            gated=self.up is not None,
            bias=any(each.bias is not None for each in self.products),
            up_bias=self.up_bias is not None,
            slope=self.slope is not None,
            column_scale=self.column_scale is not None,
            column_shift=self.column_shift is not None,
            residual=self.residual is not None,
            residual_first=self.residual_first,
            optional_bias=bool(self.grouped),
        )


def group(gemms: Sequence[Gemm]) -> Gemm | None:
    """Return products of one x, each with at most a bias, as one grouped Gemm; None if layouts of weights differ."""
    first, *others = gemms
    return replace(first, grouped=tuple(others)) if len({each.transposed for each in gemms}) == 1 else None
