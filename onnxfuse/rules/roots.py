"""Rewrite square roots, and the reductions before them, into the form that patterns match."""

from __future__ import annotations

import math
from typing import Final

from onnxfuse.dsl.declaration import Rewrite, Rules, require, rewrite
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import attribute, known, op, rearrange, scalar, tensor


@rewrite(example={"x": (2, 3, 4), "axes": [-1], "keepdims": 1})
def power_of_mean(
    total: Term = tensor(),
    x: Term = tensor(),
    axes: Term = attribute(),
    keepdims: Term = attribute(),
    epsilon: Term = scalar(),
) -> Rules:
    """A power of 0.5 or -0.5 of a mean of squares plus a number above 0 is a root, or its reciprocal.

    The power and the root differ only for -0 and -inf, which such a sum cannot be.
    """
    require("epsilon is above 0", lambda epsilon: 0 < epsilon < math.inf)
    positive = known(total, op.ReduceMean(x**2, axes=axes, keepdims=keepdims) + epsilon)
    yield op.Pow(positive, 0.5), op.Sqrt(positive)
    yield op.Pow(positive, -0.5), op.Reciprocal(op.Sqrt(positive))


@rewrite(out="... 1")
def kept_axis(x: Term = tensor("... d")) -> Rules:
    """A reduction that drops the last axis, and a view that adds it back, become a reduction with keepdims=1."""
    for reduction in (op.ReduceMean, op.ReduceL2):
        dropped = reduction(x, axes=[-1], keepdims=0)
        yield rearrange(dropped, "... -> ... 1"), reduction(x, axes=[-1], keepdims=1)


ROOTS: Final[tuple[Rewrite, ...]] = (*power_of_mean, *kept_axis)
