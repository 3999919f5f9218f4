"""Operands whose rows are no whole vectors, copied so that they are: the host side of gemm_pad.cu."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from onnxfuse.kernels._gemm import Gemm
from onnxfuse.kernels._types import ABSENT, EARLY_ARCH, ITEM_BYTES, VECTOR_BYTES
from onnxfuse.provider.plan import Argument, Device, Kernel, Launch, Pointer, Scalar

MOST: Final = 4  # copies of one launch: x, and three weights or two and a residual
WARPS: Final = 8  # of a block
PAIRS: Final = 8  # of elements of 16 bits, that a lane copies
SEGMENT_BYTES: Final = 32 * PAIRS * 4  # and its warp


@dataclass(frozen=True)
class Copy:
    """A contiguous matrix, and where its copy is in scratch memory, with rows of `whole` elements."""

    source: Pointer
    target: Pointer
    rows: int
    columns: int
    dtype: str
    constant: bool  # the model holds the matrix

    @property
    def parts(self) -> int:
        """How many warps copy it."""
        return self.rows * -(-self.columns * ITEM_BYTES[self.dtype] // SEGMENT_BYTES)


def whole(columns: int, dtype: str) -> int:
    """The elements from row to row where rows of so many begin at multiples of 16 bytes."""
    vector = VECTOR_BYTES // ITEM_BYTES[dtype]
    return -(-columns // vector) * vector


def padded(gemm: Gemm, residual: bool) -> tuple[Gemm, list[Copy]]:
    """The product of matrices with rows of `whole` elements, and the copies that make them; y is as it was.

    `residual`: it is one of these matrices.
    """
    copies: list[Copy] = []

    def placed(pointer: Pointer, rows: int, columns: int, constant: bool = False) -> Pointer:
        if gemm.aligned and columns == whole(columns, gemm.dtype):
            return pointer
        copies.append(Copy(pointer, Pointer("scratch", len(copies)), rows, columns, gemm.dtype, constant))
        return copies[-1].target

    def product(each: Gemm) -> Gemm:
        shape = (each.n, each.k) if each.transposed else (each.k, each.n)
        w, up = placed(each.w, *shape, each.constant), each.up and placed(each.up, *shape, each.constant)
        added = placed(each.residual, each.m, each.n) if residual and each.residual else each.residual
        return replace(each, x=x, w=w, up=up, residual=added, constant=each.constant and w is each.w)

    x = placed(gemm.x, gemm.m, gemm.k)
    first, *others = (product(each) for each in (gemm, *gemm.beside))
    return replace(first, beside=tuple(others)), copies


def scratch_bytes(copies: list[Copy]) -> tuple[int, ...]:
    """The sizes of their targets."""
    return tuple(copy.rows * whole(copy.columns, copy.dtype) * ITEM_BYTES[copy.dtype] for copy in copies)


def launches(copies: list[Copy], device: Device) -> tuple[Launch, ...]:
    """One that makes all copies; none for none."""
    if not copies:
        return ()
    arguments: list[Argument] = []
    for copy in copies:
        halves = copy.columns * ITEM_BYTES[copy.dtype] // 2
        arguments += [copy.source, copy.target, Scalar(copy.rows, "int32"), Scalar(halves, "int32")]
    arguments += [ABSENT, ABSENT, Scalar(0, "int32"), Scalar(0, "int32")] * (MOST - len(copies))
    blocks = -(-sum(copy.parts for copy in copies) // WARPS)
    constants = sum(copy.constant << i for i, copy in enumerate(copies))
    kernel = Kernel("gemm_pad", "gemm_pad", {"WARPS": WARPS, "PAIRS": PAIRS, "WEIGHTS_CONSTANT": constants})
    early = device.arch >= EARLY_ARCH
    return (Launch(kernel, (blocks, 1, 1), (32 * WARPS, 1, 1), tuple(arguments), early=early),)
