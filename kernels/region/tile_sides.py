"""How many elements a tile has along each of its axes."""

from __future__ import annotations

from typing import Final

from onnxfuse.algebra.sizes import Size, number_of
from onnxfuse.runtime.plan import Device
from onnxfuse.runtime.symint import is_symbolic

TILE_AREA: Final = 4096  # elements of a tile at most, as words of shared memory
MIN_TILE_AREA: Final = 1024
TILE_ROUNDS: Final = 4  # vectors of a thread that reads or stores a tile
TILE_BLOCKS: Final = 16  # blocks of tiles per multiprocessor: tiles are made smaller until there are so many
MAX_TILE_WASTE: Final = 1.15  # by how much tiles may exceed an axis before they are longer along it than a square
TILE_STEP: Final = 8  # a tile has a multiple of so many elements along each of its axes


def tile_area(count: int, elements: int, words: int, device: Device) -> int:
    """Return how many elements a tile has at most, of a nest of `count` with so many words of each in shared memory.

    Threads of a block take so many `elements` in a round.
    """
    area = max(MIN_TILE_AREA, min(TILE_AREA // words, TILE_ROUNDS * elements))
    if is_symbolic(count):
        return MIN_TILE_AREA
    while area > MIN_TILE_AREA and count < TILE_BLOCKS * device.multiprocessors * area:
        area //= 2
    return area


def tile_sides(across: Size, last: Size, area: int) -> tuple[int, int]:
    """Return the elements of a tile along both of its axes: about a square, or longer where the other one is short."""
    found = [_longest(across, last, area), _longest(last, across, area)[::-1]]
    return min(found, key=lambda sides: _covered(across, sides[0]) * _covered(last, sides[1]))


def _longest(one: Size, other: Size, area: int) -> tuple[int, int]:
    """Return the sides of a tile, the first of which may have an axis that is longer than the side of a square."""
    square = 1 << (area.bit_length() - 1) // 2
    first = _side(one, square)
    if _covered(one, first) > MAX_TILE_WASTE * (number_of(one) or first):
        first = min(first, _side(one, 2 * square - 1), key=lambda side: _covered(one, side))
    second = _side(other, area // first // TILE_STEP * TILE_STEP)
    return max(first, _side(one, area // second // TILE_STEP * TILE_STEP)), second


def _side(extent: Size, most: int) -> int:
    """Return the elements of a tile along an axis, of which equally long ones cover the axis."""
    if not isinstance(extent, int):
        return most
    count = -(-extent // most)
    return -(-extent // (count * TILE_STEP)) * TILE_STEP


def _covered(extent: Size, side: int) -> int:
    """Return how many elements of an axis tiles have together, or those of one tile where that is dynamic."""
    return -(-(number_of(extent) or 1) // side) * side
