"""A matrix product with its epilogue, as the hosts of every GEMM kernel see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnxfuse.provider.plan import Launch, Matmul, Pointer


@dataclass(frozen=True)
class Gemm:
    """y = activation(x w + bias) [* (x up + up_bias)] * column_scale + residual, computed in fp32, rounded once.

    All matrices are row-major and contiguous and of one dtype: x is m x k, y and residual are m x n; w and up are
    k x n, or n x k where `transposed`. What is None is absent.
    """

    m: int
    n: int
    k: int
    dtype: str  # of x, w, up, residual and y
    transposed: bool
    aligned: bool  # every pointer is at a multiple of 16 bytes
    x: Pointer
    w: Pointer
    y: Pointer
    bias: Pointer | None = None  # n elements
    up: Pointer | None = None  # the second weight of a gated product
    up_bias: Pointer | None = None
    column_scale: Pointer | None = None  # n elements
    residual: Pointer | None = None
    activation: str = "none"  # a name of _elementwise.ACTIVATIONS
    alpha: float = 0.0
    beta: float = 0.0
    tf32: bool = False  # float32 operands may be rounded to TF32
    constant: bool = False  # the model holds w and up, which may be read while the kernel before still runs
    beside: tuple[Gemm, ...] = ()  # products of the same x in one launch, of gemm_hopper.cu or gemm_stream.cu

    @property
    def flops(self) -> int:
        """Multiplications and additions of the products."""
        return 2 * self.m * self.n * self.k * (2 if self.up else 1)


@dataclass(frozen=True)
class Candidate:
    """A way to run a Gemm, to be timed against others: a plan's steps, without its outputs.

    Scratch pointers count from the candidate's own first buffer; one that runs has all of a plan's scratch to itself.
    """

    name: str  # which kernel and tiling: what a report or a cache of choices calls it
    steps: tuple[Launch | Matmul, ...]
    scratch: tuple[int, ...] = ()  # bytes


def together(gemms: Sequence[Gemm]) -> Gemm | None:
    """Products of one x, with biases and nothing else, as one launch; None where their weights lie differently."""
    first, *others = gemms
    return replace(first, beside=tuple(others)) if len({each.transposed for each in gemms}) == 1 else None
