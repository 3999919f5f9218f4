"""Perturb values by one unit in the last place, or by a rounding error, to see how far results change."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Final, TypeAlias

import ml_dtypes
import numpy as np
import onnx
import onnx.numpy_helper
from onnx.external_data_helper import uses_external_data

from onnxfuse.ir.dtypes import FLOAT_NAMES, FLOATS, Array
from onnxfuse.ir.protos import replace_tensors

ROUNDINGS: Final = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # the largest relative error of a rounding
DRAWN_BLOCK: Final = 1_000_003  # number of random signs before they repeat; a prime, so that no axis has this period
Move: TypeAlias = Callable[[str, Array], Array]  # maps a tensor's name and values to other values


def move_by_one_ulp(name: str, value: Array, draw: int = 0) -> Array:
    """Perturb each floating-point value, up or down, by one unit in the last place; return other dtypes unchanged.

    The lowest and the highest finite number do not change, because they are mask values, and one unit in their last
    place is larger than a score.  Infinities do not change, either.

    draw  a number that selects the random directions (up or down)
    """
    if value.dtype.name not in FLOAT_NAMES:
        return value
    largest = ml_dtypes.finfo(value.dtype).max  # type: ignore[no-untyped-call]
    moved = np.nextafter(value, np.where(_signs(name, value, draw) > 0, largest, -largest))
    with np.errstate(invalid="ignore"):  # a bfloat16 NaN would cause a warning
        return np.where(np.abs(value) < largest, moved, value)


def move_by_rounding(name: str, value: Array, rounding: float, draw: int = 0) -> Array:
    """Perturb each float32 value, up or down, by `rounding` times the value; return other dtypes unchanged.

    draw  a number that selects the random directions (up or down)
    """
    if value.dtype != np.float32:
        return value
    return np.asarray(value * (1 + _signs(name, value, draw).astype(np.float32) * np.float32(rounding)))


def with_moved_weights(model: onnx.ModelProto, move: Move) -> onnx.ModelProto:
    """Return a model whose floating-point initializers are perturbed, except those in external files.

    Whole numbers do not change, because they could be exponents, flags or mask values.
    """

    def moved(tensor: onnx.TensorProto) -> onnx.TensorProto:
        if uses_external_data(tensor) or tensor.data_type not in FLOATS:
            return tensor
        value = onnx.numpy_helper.to_array(tensor)
        with np.errstate(invalid="ignore"):  # a bfloat16 NaN would cause a warning
            is_integral = np.rint(value) == value
        return onnx.numpy_helper.from_array(np.where(is_integral, value, move(tensor.name, value)), tensor.name)

    return replace_tensors(model, moved)


def _signs(name: str, value: Array, draw: int = 0) -> Array:
    random = np.random.default_rng(zlib.crc32(name.encode()) + draw)
    block = random.integers(0, 2, min(value.size, DRAWN_BLOCK), np.int8) * 2 - 1
    return np.resize(block, value.shape)
