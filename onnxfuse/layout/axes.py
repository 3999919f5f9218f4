"""The axes of images in both layouts: (N, C, H, W), as ONNX has it, and (N, H, W, C)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias, TypeVar

from onnxfuse.analysis.dims import Size

Perm: TypeAlias = tuple[int, ...]
T = TypeVar("T")

RANK: Final = 4  # of images; other ranks stay channels-first
TO_LAST: Final[Perm] = (0, 2, 3, 1)  # the perm of the Transpose that makes a channels-first image channels-last
TO_FIRST: Final[Perm] = (0, 3, 1, 2)
# Of the weights of convolutions, by the attribute w_layout that names the stored layout.  In ONNX, those of Conv are
# (M, C/group, H, W), and those of ConvTranspose, whose layouts are ihwo and hwoi, are (C, M/group, H, W).
WEIGHT_PERMS: Final[dict[str, Perm]] = {
    "ohwi": (0, 2, 3, 1), "hwio": (2, 3, 1, 0), "ihwo": (0, 2, 3, 1), "hwoi": (2, 3, 1, 0),
}  # fmt: skip


def permuted(values: Sequence[T], perm: Perm) -> tuple[T, ...]:
    """Return one value for each axis of the result of a Transpose."""
    return tuple(values[axis] for axis in perm)


def inverse(perm: Perm) -> Perm:
    """Return the perm of the Transpose that undoes another one."""
    return tuple(perm.index(axis) for axis in range(len(perm)))


def last_axis(axis: int) -> int:
    """Return where an axis of a channels-first image, counted from either end, lies in the channels-last one."""
    return TO_LAST.index(axis % RANK)


def has_one_pixel(shape: Sequence[Size] | None) -> bool:
    """Return whether a channels-first image has a height and a width of 1, so that both layouts are in one order."""
    return shape is not None and len(shape) == RANK and tuple(shape[2:]) == (1, 1)
