"""The axes of images in both layouts, by their number: (N, C, H, W), as ONNX has it, and (N, H, W, C).

An image has one to three spatial axes: (N, C, W), (N, C, H, W) or (N, C, D, H, W).  The attributes of nodes name the
layouts of all of them as those of two spatial axes: nchw and nhwc, ohwi and hwio.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

from onnxfuse.algebra.sizes import Size

Perm: TypeAlias = tuple[int, ...]

IMAGE_RANKS: Final = (3, 4, 5)  # numbers of axes; tensors of others stay channels-first
# Values of the attribute w_layout.  In ONNX, the weights of Conv are (M, C/group, H, W), and those of ConvTranspose,
# whose layouts are ihwo and hwoi, are (C, M/group, H, W).
WeightLayout: TypeAlias = Literal["ohwi", "hwio", "ihwo", "hwoi"]


def to_last(rank: int) -> Perm:
    """Return the perm of the Transpose that makes a channels-first image of so many axes channels-last."""
    return 0, *range(2, rank), 1


def to_first(rank: int) -> Perm:
    """Return the perm of the Transpose that makes a channels-last image of so many axes channels-first."""
    return 0, rank - 1, *range(1, rank - 1)


def weight_perm(layout: WeightLayout, rank: int) -> Perm:
    """Return the perm that brings the weights of a convolution from ONNX's layout to this one."""
    return to_last(rank) if layout in ("ohwi", "ihwo") else (*range(2, rank), 1, 0)


def last_axis(axis: int, rank: int) -> int:
    """Return where an axis of a channels-first image, counted from either end, lies in the channels-last one."""
    return to_last(rank).index(axis % rank)


def spatial_axes(rank: int) -> set[int]:
    """Return the axes of a channels-first image that are neither of the batch nor of channels."""
    return set(range(2, rank))


def has_one_pixel(shape: Sequence[Size] | None) -> bool:
    """Return whether the spatial axes of a channels-first image have size 1, so that both layouts are in one order."""
    return shape is not None and len(shape) in IMAGE_RANKS and all(size == 1 for size in shape[2:])
