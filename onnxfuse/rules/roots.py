"""Rewrite square roots, and the reductions before them, into the form that patterns match."""

from __future__ import annotations

import math
from typing import Final

from onnxfuse.dsl.declaration import Rewrite, Rules, require, rewrite
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import (
    attribute,
    computed,
    either,
    known,
    op,
    rearrange,
    scalar,
    shared,
    tensor,
    weight,
    when,
)


@rewrite(example={"x": (2, 3, 4), "axes": [-1], "keepdims": 1})
def power_of_mean(
    total: Term = tensor(),
    x: Term = tensor(),
    axes: Term = attribute(),
    keepdims: Term = attribute(),
    epsilon: Term = scalar(),
) -> Rules:
    """`(mean(x²) + epsilon)` to the power 0.5 or -0.5 becomes a square root, or the reciprocal of a square root.

    The power and the root differ only for -0 and -inf, which such a sum cannot be.
    """
    require("epsilon must be above 0", lambda epsilon: 0 < epsilon < math.inf)
    positive = known(total, op.ReduceMean(x**2, axes=axes, keepdims=keepdims) + epsilon)
    yield op.Pow(positive, 0.5), op.Sqrt(positive)
    yield op.Pow(positive, -0.5), op.Reciprocal(op.Sqrt(positive))


@rewrite(example={"x": (2, 3, 4), "axes": [-1], "keepdims": 1})
def limited_mean(
    mean: Term = tensor(),
    x: Term = tensor(),
    axes: Term = attribute(),
    keepdims: Term = attribute(),
    epsilon: Term = scalar(),
) -> Rules:
    """`max(variance, 0)`, as in Equinox, becomes the variance, because a mean of squares is never below 0."""
    squares = known(mean, op.ReduceMean(x**2, axes=axes, keepdims=keepdims))
    yield op.Sqrt(op.Max(squares, 0.0) + epsilon), op.Sqrt(squares + epsilon)


@rewrite(out="batch rows 1")
def pooled_mean(x: Term = tensor("batch rows columns")) -> Rules:
    """A GlobalAveragePool of three axes, as tf2onnx writes the mean over the last axis, becomes a ReduceMean."""
    yield op.GlobalAveragePool(x), op.ReduceMean(x, axes=[-1], keepdims=1)


@rewrite(example={"x": (2, 3, 4), "factor": (2, 3, 4), "y": (4,)})
def negated_mean(x: Term = tensor(), mean: Term = tensor(), factor: Term = tensor(), y: Term = tensor()) -> Rules:
    """`-mean * factor + y`, as in the LayerNorm of Keras, becomes `y - mean * factor`."""
    found = known(mean, op.ReduceMean(x, axes=[-1]))
    yield op.Add(op.Mul(-found, factor), y), op.Sub(y, op.Mul(found, factor))


@rewrite(out="batch height width d")
def row_of_norm(
    x: Term = tensor("batch height width d"),
    mean: Term = tensor(),
    variance: Term = tensor("batch height width 1"),
    inverse: Term = tensor(),
    factor: Term = tensor("batch height width d"),
    row: Term = weight("1 1 1 d"),
) -> Rules:
    """The scale and the bias of a LayerNorm of channels-last images, as in Keras, lose their axes of size 1."""
    root, average = known(inverse, 1 / op.Sqrt(variance)), known(mean, op.ReduceMean(x, axes=[-1]))
    flat = op.Reshape(row, shape=[-1])
    yield root * row, root * flat
    yield op.Sub(row, op.Mul(average, factor)), op.Sub(flat, op.Mul(average, factor))


def _fast_variances(x: Term, keepdims: int) -> tuple[Term, Term]:
    """Return mean(x^2) - mean^2 over the last axis, and this variance limited to 0 or more."""
    mean, moment = (op.ReduceMean(each, axes=[-1], keepdims=keepdims) for each in (x, x**2))
    variance = op.Sub(moment, op.Mul(shared(mean), shared(mean)))
    return variance, op.Max(variance, 0.0)


@rewrite(out="... 1")
def kept_axis(x: Term = tensor("... d")) -> Rules:
    """A reduction that drops the last axis, and a view that adds it back, become a reduction with keepdims=1."""
    for reduction in (op.ReduceMean, op.ReduceL2, op.ReduceMax, op.ReduceSum):
        dropped = shared(reduction(x, axes=[-1], keepdims=0))
        yield rearrange(dropped, "... -> ... 1"), reduction(x, axes=[-1], keepdims=1)


@rewrite(out="... 1")
def kept_variance(x: Term = tensor("... d")) -> Rules:
    """A view that adds the last axis back after mean(x^2) - mean^2 (Flax) gives way to means with keepdims=1."""
    for dropped, kept in zip(_fast_variances(x, 0), _fast_variances(x, 1), strict=True):
        yield rearrange(dropped, "... -> ... 1"), kept


IS_COUNT: Final = "{number} is the size {d}", lambda number, d: number == d


@rewrite(out="... 1", example={"number": "d"})
def mean_of_sum(x: Term = tensor("... d"), number: Term = scalar()) -> Rules:
    """A sum over the last axis that is divided by the number of its elements becomes a mean."""
    require(*IS_COUNT)
    yield op.Div(op.ReduceSum(x, axes=[-1], keepdims=1), number), op.ReduceMean(x, axes=[-1], keepdims=1)


@rewrite(out="...", example={"number": "d"})
def mean_of_dropped_axis(x: Term = tensor("... d"), number: Term = scalar()) -> Rules:
    """A sum that drops the last axis, divided by the number of its elements, becomes a mean that drops it."""
    require(*IS_COUNT)
    yield op.Div(op.ReduceSum(x, axes=[-1], keepdims=0), number), op.ReduceMean(x, axes=[-1], keepdims=0)


@rewrite(out="batch groups 1 1 1")
def kept_axes_of_groups(x: Term = tensor("batch groups size height width")) -> Rules:
    """A mean per group that drops three axes, and a view that adds them back, become a mean with keepdims=1."""
    dropped = op.ReduceMean(x, axes=[2, 3, 4], keepdims=0)
    yield rearrange(dropped, "batch groups -> batch groups 1 1 1"), op.ReduceMean(x, axes=[2, 3, 4], keepdims=1)


@rewrite(out="batch height width groups size")
def groups_of_channels_last(
    x: Term = tensor("batch height width groups size"),
    scale: Term = weight("1 1 1 groups size"),
    bias: Term = weight("1 1 1 groups size"),
    epsilon: Term = scalar(),
) -> Rules:
    """A GroupNorm of channels-last images, as Keras computes it, becomes a GroupNorm of transposed images.

    Keras computes x * slopes + (bias - mean * slopes), which is NaN for an infinite scale, so the scale must be finite.
    The variance can be written as mean(x^2) - mean^2, as in Flax.
    """
    require("the scale must be finite", lambda scale, is_finite: is_finite(scale))
    mean = op.ReduceMean(x, axes=[1, 2, 4], keepdims=1)
    fast = op.Sub(op.ReduceMean(x**2, axes=[1, 2, 4], keepdims=1), mean**2)
    variance = either(op.ReduceMean((x - mean) ** 2, axes=[1, 2, 4], keepdims=1), fast)
    slopes = 1 / op.Sqrt(variance + epsilon) * scale
    rows = rearrange(x, "batch height width groups size -> batch groups size height width")
    centred = rows - op.ReduceMean(rows, axes=[2, 3, 4], keepdims=1)
    normalized = centred / op.Sqrt(op.ReduceMean(centred**2, axes=[2, 3, 4], keepdims=1) + epsilon)
    image = rearrange(normalized, "batch groups size height width -> batch (groups size) height width")
    factor, shift = (rearrange(each, "1 1 1 groups size -> (groups size) 1 1") for each in (scale, bias))
    written = rearrange(image * factor + shift, "batch (groups size) height width -> batch height width groups size")
    yield x * slopes + either(op.Sub(bias, mean * slopes), op.Add(op.Mul(-mean, slopes), bias)), written


@rewrite(out="... d", example={"axes": [-1], "keepdims": 1})
def variance_factor(
    x: Term = tensor("... d"),
    mean: Term = tensor(),
    y: Term = tensor("... d"),
    w: Term = weight("d"),
    factor: Term = scalar(),
    epsilon: Term = scalar(),
    axes: Term = attribute(),
    keepdims: Term = attribute(),
) -> Rules:
    """The factor of a variance is moved into epsilon and into the weight of the norm.

    An unbiased variance, as torch.var computes it, is the mean of squares times n / (n - 1), and
    `x / sqrt(factor * mean + epsilon) * w = x / sqrt(mean + epsilon / factor) * (w / sqrt(factor))`.
    """
    require("epsilon must be above 0", lambda epsilon: 0 < epsilon < math.inf)
    require("the factor must be above 0", lambda factor: 0 < factor < math.inf)
    squares = known(mean, op.ReduceMean(y**2, axes=axes, keepdims=keepdims))
    root = op.Sqrt(shared(squares * factor + epsilon))
    new_root = op.Sqrt(squares + computed(lambda epsilon, factor: epsilon / factor))
    new_weight = op.Div(w, computed(lambda factor: math.sqrt(factor)))
    norm = either(op.Div(x, root) * w, x * (1 / root) * w)
    yield (
        when(norm, "float32 must hold the scaled numbers", lambda dtype: dtype == "float32"),
        x / new_root * new_weight,
    )


ROOTS: Final[tuple[Rewrite, ...]] = (
    *power_of_mean, *limited_mean, *pooled_mean, *negated_mean, *row_of_norm, *kept_axis, *kept_variance, *mean_of_sum,
    *mean_of_dropped_axis, *kept_axes_of_groups, *groups_of_channels_last,
)  # fmt: skip
VARIANCES: Final[tuple[Rewrite, ...]] = variance_factor
