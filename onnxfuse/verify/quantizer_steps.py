"""Find out whether quantized values differ only because a QuantizeLinear rounds ties differently.

Quantized values are integers or float8 numbers.  A tie is a number halfway between two of them; a small error decides
to which of them it is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx

from onnxfuse.algebra.operators import REGROUPING
from onnxfuse.ir.dtypes import LARGEST_FLOAT8, Array
from onnxfuse.verify.difference import unequal
from onnxfuse.verify.ties import source_of

FOLLOWED_OPS: Final = REGROUPING | {"Identity"}  # operators that the search for a QuantizeLinear passes


@dataclass(frozen=True)
class Quantizer:
    """A QuantizeLinear: the names of its inputs ("" for an absent zero point), and the axis of its scales."""

    x: str
    scale: str
    zero: str
    axis: int

    @property
    def inputs(self) -> list[str]:
        """The names of the inputs that the node has."""
        return [name for name in (self.x, self.scale, self.zero) if name]

    def share_moved(
        self, values: Mapping[str, object], old: object, new: object, tolerances: Mapping[str, float], half: str
    ) -> float:
        """Return the share of values that differ; infinity if any of them differs although x is not nearly a tie.

        `values` are the inputs of the quantizer, by name; x is the number that it rounds.  x is nearly a tie if the old
        and the new value are neighbours and x is close to the middle between them.  The allowed distance is t times
        (|x| + the root mean square of all x); t is the tolerance of the dtype, or half precision, in which x is
        computed.
        """
        given = np.asarray(values[self.x])
        x, scale = given.astype(np.float64), np.asarray(values[self.scale]).astype(np.float64)
        zero = np.asarray(values[self.zero]).astype(np.float64) if self.zero else np.zeros(())
        if not isinstance(old, np.ndarray) or not isinstance(new, np.ndarray) or not old.size == x.size == new.size:
            return math.inf
        tolerance = max(tolerances.get(given.dtype.name, 0.0), tolerances.get(half, 0.0))
        shape = [1] * x.ndim
        if scale.size > 1:
            shape[self.axis] = -1
        scale, zero = (np.broadcast_to(each.reshape(shape), x.shape).ravel() for each in (scale, zero))
        moved = unequal(old, new).ravel()
        at, steps = x.ravel()[moved], [each.astype(np.float64).ravel()[moved] for each in (old, new)]
        places = [_place(each.ravel()[moved]) for each in (old, new)]
        middle = ((steps[0] + steps[1]) / 2 - zero[moved]) * scale[moved]
        finite = x[np.isfinite(x)]
        allowed = tolerance * (np.abs(at) + np.sqrt(np.square(finite).sum() / max(1, finite.size)))
        are_ties = (np.abs(places[0] - places[1]) == 1) & (np.abs(at - middle) <= allowed)
        return float(moved.mean()) if are_ties.all() else math.inf


def _place(values: Array) -> Array:
    """Return numbers in the order of the quantized values, in which neighbours are 1 apart."""
    if values.dtype.name not in LARGEST_FLOAT8:
        return values.astype(np.float64)
    codes = values.view(np.uint8).astype(np.float64)
    return np.where(codes < 128, codes, 128 - codes)


def source_quantizer(model: onnx.ModelProto, output: str) -> Quantizer | None:
    """Return the QuantizeLinear whose result an output is, perhaps reshaped; None if another operator computes it."""
    node, _ = source_of(model, output, FOLLOWED_OPS)
    if node is None or node.op_type != "QuantizeLinear" or any(a.name == "block_size" and a.i for a in node.attribute):
        return None
    x, scale, zero = (*node.input, "")[:3]
    return Quantizer(x, scale, zero, next((a.i for a in node.attribute if a.name == "axis"), 1))
