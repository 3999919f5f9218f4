"""The ranges and roundings of float16 and bfloat16, and the largest acceptable loss of a weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
from onnx import TensorProto

from onnxfuse.ir.dtypes import Array

REAL: Final = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})  # dtypes that can change


@dataclass(frozen=True)
class Precision:
    """A half-precision dtype: its range, and the loss that is accepted for a weight."""

    name: str  # the name, as in --dtype
    number: int  # the dtype's number in onnx.TensorProto.DataType
    largest: float
    limit: float  # largest magnitude accepted in observed runs; less than `largest`, because other inputs may give more
    smallest: float  # the smallest normal magnitude: smaller ones lose bits
    rounding: float  # the largest relative error of a value in range
    max_loss: float  # the largest acceptable error of a weight, relative to the weight's norm

    @property
    def numpy(self) -> np.dtype[Any]:
        """The dtype in NumPy."""
        return np.dtype(np.float16 if self.name == "float16" else ml_dtypes.bfloat16)

    def rounded(self, value: Array) -> Array:
        """Return values in this precision; those beyond its range become infinite."""
        with np.errstate(over="ignore"):
            return np.asarray(value).astype(self.numpy)

    def clamped(self, value: Array) -> Array:
        """Return values in this precision, clamped so that finite ones stay finite, as masks and bounds require."""
        wide = np.asarray(value, np.float32)
        return self.rounded(np.where(np.isfinite(wide), np.clip(wide, -self.largest, self.largest), wide))


FLOAT16: Final = Precision("float16", TensorProto.FLOAT16, 65504.0, 65504.0 / 4, 2.0**-14, 2.0**-11, 2.0**-10)
# Rounding to bfloat16 alone may change a weight by 2^-8, so only overflow counts as an unacceptable loss.
BFLOAT16: Final = Precision(
    "bfloat16", TensorProto.BFLOAT16, 3.3895313892515355e38, 3.3895313892515355e38 / 4, 2.0**-126, 2.0**-8, 2.0**-7
)
PRECISIONS: Final = {each.name: each for each in (FLOAT16, BFLOAT16)}


@dataclass(frozen=True)
class Kept:
    """A node that stays in float32, and why."""

    node: str  # the node's name, or the name of its first output
    op: str
    reason: str
