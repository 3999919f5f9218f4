"""The host side of gemm_pad.cu, which copies matrices so that every row begins at a multiple of 16 bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from onnxfuse.kernels.gemm.problem import Gemm
from onnxfuse.kernels.tensors import ABSENT, ITEM_BYTES, VECTOR_BYTES, int32
from onnxfuse.runtime.plan import Device, Kernel, Launch, Pointer, Struct, Value

MAX_COPIES: Final = 4  # matrices per launch: x and three weights, or x, two weights and a residual
WARPS: Final = 8  # warps per block
PAIRS: Final = 8  # pairs of 16-bit elements per lane
SEGMENT_BYTES: Final = 32 * PAIRS * 4  # bytes that a warp copies


@dataclass(frozen=True)
class Copy:
    """A contiguous matrix, and its copy in scratch memory; the copy's rows are `padded_columns` elements apart."""

    source: Pointer
    target: Pointer
    rows: int
    columns: int
    dtype: str
    constant: bool  # the matrix is a constant of the model

    @property
    def segments(self) -> int:
        """The number of warps that copy the matrix."""
        return self.rows * -(-self.columns * ITEM_BYTES[self.dtype] // SEGMENT_BYTES)


def padded_columns(columns: int, dtype: str) -> int:
    """Round the elements of a row up to a multiple of 16 bytes."""
    vector = VECTOR_BYTES // ITEM_BYTES[dtype]
    return -(-columns // vector) * vector


def padded(gemm: Gemm, residual: bool) -> tuple[Gemm, list[Copy]]:
    """Return the product with operands whose rows are padded, and the copies that create these operands.

    The rows of y are not padded; the rows of the residual are padded only if `residual` is true.
    """
    copies: list[Copy] = []

    def padded_pointer(pointer: Pointer, rows: int, columns: int, constant: bool = False) -> Pointer:
        if gemm.aligned and columns == padded_columns(columns, gemm.dtype):
            return pointer
        copies.append(Copy(pointer, Pointer("scratch", len(copies)), rows, columns, gemm.dtype, constant))
        return copies[-1].target

    def product(each: Gemm) -> Gemm:
        shape = (each.n, each.k) if each.transposed else (each.k, each.n)
        w = padded_pointer(each.w, *shape, each.weights_constant)
        up = each.up and padded_pointer(each.up, *shape, each.weights_constant)
        added = padded_pointer(each.residual, each.m, each.n) if residual and each.residual else each.residual
        constant = each.weights_constant and w is each.w
        return replace(each, x=x, w=w, up=up, residual=added, weights_constant=constant)

    x = padded_pointer(gemm.x, gemm.m, gemm.k)
    first, *others = (product(each) for each in gemm.products)
    return replace(first, grouped=tuple(others)), copies


def scratch_bytes(copies: list[Copy]) -> tuple[int, ...]:
    """Return the bytes of scratch memory per copy."""
    return tuple(copy.rows * padded_columns(copy.columns, copy.dtype) * ITEM_BYTES[copy.dtype] for copy in copies)


def launches(copies: list[Copy], device: Device) -> tuple[Launch, ...]:
    """Return the one launch that makes all copies; an empty tuple if there are no copies."""
    if not copies:
        return ()
    fields: list[Value] = []
    for copy in copies:
        halves = copy.columns * ITEM_BYTES[copy.dtype] // 2
        fields += [copy.source, copy.target, *int32(copy.rows, halves)]
    fields += [ABSENT, ABSENT, *int32(0, 0)] * (MAX_COPIES - len(copies))
    blocks = -(-sum(copy.segments for copy in copies) // WARPS)
    constants = sum(copy.constant << i for i, copy in enumerate(copies))
    kernel = Kernel("gemm_pad", "gemm_pad", {"WARPS": WARPS, "PAIRS": PAIRS, "WEIGHTS_CONSTANT": constants})
    pdl = device.has_pdl
    return (Launch(kernel, (blocks, 1, 1), (32 * WARPS, 1, 1), (Struct(tuple(fields)),), pdl=pdl),)
