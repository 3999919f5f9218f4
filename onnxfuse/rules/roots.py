"""Roots of a mean of squares take the form that patterns know."""

from __future__ import annotations

import math
from typing import Final

from onnxfuse.dsl.declaration import Rewrite, Rules, require, rewrite
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import attribute, known, op, scalar, tensor


@rewrite(example={"x": (2, 3, 4), "axes": [-1], "keepdims": 1})
def power_of_mean(
    total: Term = tensor(),
    x: Term = tensor(),
    axes: Term = attribute(),
    keepdims: Term = attribute(),
    epsilon: Term = scalar(),
) -> Rules:
    """A power of 0.5 or -0.5 of a mean of squares plus a number above 0.

    Of -0 and of -inf, which such a sum cannot be, the power and the root differ.
    """
    require("epsilon is above 0", lambda epsilon: 0 < epsilon < math.inf)
    positive = known(total, op.ReduceMean(x**2, axes=axes, keepdims=keepdims) + epsilon)
    yield op.Pow(positive, 0.5), op.Sqrt(positive)
    yield op.Pow(positive, -0.5), op.Reciprocal(op.Sqrt(positive))


ROOTS: Final[tuple[Rewrite, ...]] = power_of_mean
