"""Axes of images in the channels-first layout of ONNX, (N, C, H, W), and in the channels-last one, (N, H, W, C).

An image has one to three spatial axes: (N, C, W), (N, C, H, W) or (N, C, D, H, W).  For any number of spatial axes,
attributes of nodes use the layout names of two: nchw, nhwc, ohwi and hwio.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

from onnxfuse.algebra.sizes import Size

Perm: TypeAlias = tuple[int, ...]

IMAGE_RANKS: Final = (3, 4, 5)  # ranks of images; tensors of other ranks stay channels-first
# Values of the attribute w_layout.  In ONNX, the weights of Conv are (M, C/group, H, W).  The weights of ConvTranspose
# are (C, M/group, H, W); their layouts are ihwo and hwoi.
WeightLayout: TypeAlias = Literal["ohwi", "hwio", "ihwo", "hwoi"]


def to_last(rank: int) -> Perm:
    """Return the Transpose's perm from a channels-first to a channels-last image of this rank."""
    return 0, *range(2, rank), 1


def to_first(rank: int) -> Perm:
    """Return the Transpose's perm from a channels-last to a channels-first image of this rank."""
    return 0, rank - 1, *range(1, rank - 1)


def weight_perm(layout: WeightLayout, rank: int) -> Perm:
    """Return the perm that converts a convolution's weights from ONNX's layout to `layout`."""
    return to_last(rank) if layout in ("ohwi", "ihwo") else (*range(2, rank), 1, 0)


def last_axis(axis: int, rank: int) -> int:
    """Return the channels-last index of an axis of a channels-first image; a negative axis counts from the end."""
    return to_last(rank).index(axis % rank)


def spatial_axes(rank: int) -> set[int]:
    """Return the axes of a channels-first image other than batch and channels."""
    return set(range(2, rank))


def has_one_pixel(shape: Sequence[Size] | None) -> bool:
    """Return whether a channels-first image has one pixel: its elements then have the same order in both layouts."""
    return shape is not None and len(shape) in IMAGE_RANKS and all(size == 1 for size in shape[2:])
