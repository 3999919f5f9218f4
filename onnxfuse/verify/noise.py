"""Move values by one unit in the last place, to see how far that moves what is computed from them."""

from __future__ import annotations

import zlib
from typing import Final

import ml_dtypes
import numpy as np

from onnxfuse.ir.dtypes import FLOAT_NAMES, Array

DRAWN_BLOCK: Final = 1_000_003  # numbers are drawn once and repeated; being prime, the count fits no axis


def move_by_one_ulp(name: str, value: Array) -> Array:
    """Return floating-point values, each moved up or down by one unit in the last place; others as they are."""
    if value.dtype.name not in FLOAT_NAMES:
        return value
    random = np.random.default_rng(zlib.crc32(name.encode()))
    block = random.integers(0, 2, min(value.size, DRAWN_BLOCK), np.int8) * 2 - 1
    largest = float(ml_dtypes.finfo(value.dtype).max)  # type: ignore[no-untyped-call]
    return np.asarray(np.nextafter(value, (np.resize(block, value.shape) * largest).astype(value.dtype)))
