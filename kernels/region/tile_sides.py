"""Chooses the number of elements of a tile along each of its axes."""

from __future__ import annotations

from typing import Final

from onnxfuse.algebra.sizes import Size, number_of
from onnxfuse.runtime.plan import Device
from onnxfuse.runtime.symint import is_symbolic

TILE_AREA: Final = 4096  # maximum number of elements of a tile, if each takes one word of shared memory
MIN_TILE_AREA: Final = 1024
TILE_ROUNDS: Final = 4  # maximum number of vectors that each thread reads, or stores, per tile
TILE_BLOCKS: Final = 16  # wanted tiles per multiprocessor; tiles are halved until there are enough
# Largest ratio of the length that square tiles cover to the length of the axis; above it, tiles are not square.
MAX_TILE_WASTE: Final = 1.15
TILE_STEP: Final = 8  # the sides of a tile are multiples of this number of elements


def tile_area(count: int, elements: int, words: int, device: Device) -> int:
    """Return the maximum number of elements of a tile, for a loop nest of `count` elements.

    Shared memory holds `words` words per element.  The threads of a block read `elements` elements at a time.
    """
    area = max(MIN_TILE_AREA, min(TILE_AREA // words, TILE_ROUNDS * elements))
    if is_symbolic(count):
        return MIN_TILE_AREA
    while area > MIN_TILE_AREA and count < TILE_BLOCKS * device.multiprocessors * area:
        area //= 2
    return area


def tile_sides(across: Size, last: Size, area: int) -> tuple[int, int]:
    """Return the sides of a tile in elements: about a square, or longer along one axis if the other one is short."""
    found = [_longest(across, last, area), _longest(last, across, area)[::-1]]
    return min(found, key=lambda sides: _covered(across, sides[0]) * _covered(last, sides[1]))


def _longest(one: Size, other: Size, area: int) -> tuple[int, int]:
    """Return the sides of a tile of about `area` elements; the first side is longer if the second axis is short."""
    square = 1 << (area.bit_length() - 1) // 2
    first = _side(one, square)
    if _covered(one, first) > MAX_TILE_WASTE * (number_of(one) or first):
        first = min(first, _side(one, 2 * square - 1), key=lambda side: _covered(one, side))
    second = _side(other, area // first // TILE_STEP * TILE_STEP)
    return max(first, _side(one, area // second // TILE_STEP * TILE_STEP)), second


def _side(extent: Size, most: int) -> int:
    """Return the side of a tile along an axis: the axis is divided into the fewest tiles of equal length <= `most`."""
    if not isinstance(extent, int):
        return most
    count = -(-extent // most)
    return -(-extent // (count * TILE_STEP)) * TILE_STEP


def _covered(extent: Size, side: int) -> int:
    """Return the number of elements that the tiles along an axis cover together, including those beyond its end.

    For a dynamic axis, one tile counts.
    """
    return -(-(number_of(extent) or 1) // side) * side
