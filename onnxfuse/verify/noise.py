"""Move values by one unit in the last place, to see how far that moves what is computed from them."""

from __future__ import annotations

import zlib
from typing import Final

import ml_dtypes
import numpy as np

from onnxfuse.ir.dtypes import FLOAT_NAMES, Array

ROUNDINGS: Final = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # the largest relative error of a rounding
DRAWN_BLOCK: Final = 1_000_003  # numbers are drawn once and repeated; being prime, the count fits no axis


def move_by_one_ulp(name: str, value: Array, draw: int = 0) -> Array:
    """Return floating-point values, each moved up or down by one unit in the last place; others as they are.

    The lowest and the highest number and infinities stay: masks hold them, and one unit of theirs is more than a score.

    draw  another one has other directions
    """
    if value.dtype.name not in FLOAT_NAMES:
        return value
    largest = ml_dtypes.finfo(value.dtype).max  # type: ignore[no-untyped-call]
    moved = np.nextafter(value, np.where(_signs(name, value, draw) > 0, largest, -largest))
    with np.errstate(invalid="ignore"):  # NaN in bfloat16
        return np.where(np.abs(value) < largest, moved, value)


def move_by_rounding(name: str, value: Array, rounding: float, draw: int = 0) -> Array:
    """Return float32 values, each moved up or down by a relative error; others as they are.

    draw  another one has other directions
    """
    if value.dtype != np.float32:
        return value
    return np.asarray(value * (1 + _signs(name, value, draw).astype(np.float32) * np.float32(rounding)))


def _signs(name: str, value: Array, draw: int = 0) -> Array:
    random = np.random.default_rng(zlib.crc32(name.encode()) + draw)
    block = random.integers(0, 2, min(value.size, DRAWN_BLOCK), np.int8) * 2 - 1
    return np.resize(block, value.shape)
