"""Replace activations that exporters write as several operators by the one operator that patterns match."""

from __future__ import annotations

import math
from typing import Final

from onnxfuse.dsl.declaration import Rewrite, Rules, require, rewrite
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import choose, computed, either, op, scalar, shared, tensor, weight, when

# Producers that a HardSigmoid is fused with.  After other producers no HardSigmoid is written, because not every CUDA
# provider has a kernel for a HardSigmoid alone.
FUSED_PRODUCERS: Final = ("Conv", "Gemm", "MatMul", "BatchNormalization", "Add", "Sub", "Mul")
UNIT_ROUNDING: Final = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
IMAGE: Final = (2, 4, 3, 5)  # the shape in examples
SLOPES_BROADCAST: Final = "the slopes must broadcast to x", lambda slope, x, broadcasts_to: broadcasts_to(slope, x)


def _hard_sigmoid(x: Term, slope: Term, offset: Term, top: Term) -> tuple[Term, Term]:
    """Return `clip(slope x + offset, 0, top)` as exporters write it, and the HardSigmoid of the same x.

    The HardSigmoid equals the clipped value divided by top.
    """
    require("x must be fused with its activation", lambda x, is_made_by: is_made_by(x, *FUSED_PRODUCERS))
    require(
        "slope and offset must be finite, and top above 0",
        lambda slope, offset, top: slope and math.isfinite(slope * offset) and 0 < top < math.inf,
    )
    ramp = choose("ramp", sum=either(x * slope, x) + offset, product=(x + offset) * slope)
    alpha = computed(lambda slope, top: slope / top)
    gate = choose(
        "ramp",
        sum=op.HardSigmoid(x, alpha=alpha, beta=computed(lambda offset, top: offset / top)),
        product=op.HardSigmoid(x, alpha=alpha, beta=computed(lambda slope, offset, top: slope * offset / top)),
    )
    return choose("clipped", clip=op.Clip(ramp, min=0, max=top), relu=op.Min(op.Relu(ramp), top)), gate


@rewrite(example={"x": IMAGE, "top": 1.0})
def hard_sigmoid(
    x: Term = tensor(), slope: Term = scalar(if_absent=1.0), offset: Term = scalar(), top: Term = scalar()
) -> Rules:
    """`clip(slope x + offset, 0, 1)` becomes a HardSigmoid if x has other consumers.

    If x has no other consumers, slope and offset are instead folded into the operator that computes x.
    """
    require("x must have other readers", lambda x, has_readers: has_readers(x))
    require("top must be 1", lambda top: top == 1)
    yield _hard_sigmoid(x, slope, offset, top)


@rewrite(example={"x": IMAGE, "other": IMAGE, "top": 4.0, "inverse": 0.25})
def scaled_hard_sigmoid(
    x: Term = tensor(),
    other: Term = tensor(),
    slope: Term = scalar(if_absent=1.0),
    offset: Term = scalar(),
    top: Term = scalar(),
    inverse: Term = scalar(),
) -> Rules:
    """`clip(slope x + offset, 0, top) / top`, alone or times another tensor, becomes a HardSigmoid.

    In a product with another tensor, the division can be applied to any factor or to the product.
    """
    require(
        "the factor must be 1 / top",
        lambda inverse, top, dtype: inverse is not None and abs(inverse * top - 1) <= UNIT_ROUNDING[dtype],
    )
    require(
        "it must not be ONNX's HardSwish, which patterns know in this form",
        lambda clipped, slope, offset, top, x, other: (
            clipped != "clip" or (slope, offset, top) != (1, 3, 6) or other is not x
        ),
    )
    clipped, gate = _hard_sigmoid(x, slope, offset, top)
    yield clipped * inverse, gate
    yield clipped * other * inverse, other * gate


IS_FLOAT: Final = "x must hold floats", lambda dtype: dtype in UNIT_ROUNDING


@rewrite(example={"x": IMAGE, "low": -1.0, "high": 6.0})
def limits(x: Term = tensor(), low: Term = scalar(), high: Term = scalar()) -> Rules:
    """`max(x, 0)`, as in JAX, becomes a Relu, and a Max and a Min of numbers become a Clip.

    Both sides differ only in the sign of zeros.
    """
    require(*IS_FLOAT)
    require("low must be below high", lambda low, high: low is None or high is None or low < high)
    yield op.Min(op.Max(x, low), high), op.Clip(x, min=low, max=high)
    yield op.Max(op.Min(x, high), low), op.Clip(x, min=low, max=high)
    yield op.Max(x, 0.0), op.Relu(x)


@rewrite(example={"x": IMAGE, "alpha": 0.25})
def selected_slopes(x: Term = tensor(), alpha: Term = scalar()) -> Rules:
    """A Where of x above 0 and `alpha x` elsewhere, as in JAX, becomes a LeakyRelu; both differ only for -0."""
    require(*IS_FLOAT)
    require("the opset must have GreaterOrEqual", lambda opset: opset >= 12)
    require("the slope must be finite", lambda alpha: math.isfinite(alpha))
    for is_above in (op.GreaterOrEqual(x, 0.0), op.Greater(x, 0.0)):
        yield op.Where(is_above, x, x * alpha), op.LeakyRelu(x, alpha=alpha)
    yield op.Where(op.Less(x, 0.0), x * alpha, x), op.LeakyRelu(x, alpha=alpha)


@rewrite(example={"x": IMAGE, "alpha": 0.5})
def selected_exponential(x: Term = tensor(), alpha: Term = scalar()) -> Rules:
    """A Where of x above 0 and `alpha (exp(min(x, 0)) - 1)` elsewhere, as in JAX, becomes an Elu."""
    require(*IS_FLOAT)
    require("alpha must be finite", lambda alpha: alpha is None or math.isfinite(alpha))
    is_above = shared(op.Greater(x, 0.0))
    powers = op.Sub(op.Exp(op.Where(is_above, 0.0, x)), 1.0)
    yield op.Where(is_above, x, powers * alpha), op.Elu(x, alpha=alpha)
    yield op.Where(is_above, x, powers), op.Elu(x, alpha=1.0)


@rewrite(example={"x": IMAGE})
def leaky_relu(x: Term = tensor(), alpha: Term = scalar()) -> Rules:
    """A PRelu with one slope for all elements becomes a LeakyRelu."""
    require("the slope must be finite", lambda alpha: math.isfinite(alpha))
    yield op.PRelu(x, alpha), op.LeakyRelu(x, alpha=alpha)


@rewrite(example={"x": IMAGE, "slope": (1, 4, 1, 1)})
def prelu_of_channels(x: Term = tensor(), slope: Term = weight()) -> Rules:
    """The slopes of a PRelu lose the axis of size 1 that precedes the channels."""
    require("the slopes must begin with an axis of size 1", lambda slope, begins_with_one: begins_with_one(slope))
    require(*SLOPES_BROADCAST)
    yield op.PRelu(x, slope), op.PRelu(x, op.Squeeze(slope, axes=[0]))


@rewrite(example={"x": IMAGE, "slope": (4, 1, 1)})
def prelu(x: Term = tensor(), slope: Term = weight(), factor: Term = scalar(if_absent=1.0)) -> Rules:
    """`relu(x) - slope relu(-x)` and `relu(x) + slope (x - |x|) / 2` become a PRelu."""
    require("the slopes must be finite", lambda slope, factor, is_finite: is_finite(slope) and math.isfinite(factor))
    require(*SLOPES_BROADCAST)
    negative, twice = slope * factor * op.Relu(-x), slope * factor * (x - op.Abs(x))
    yield op.Relu(x) - negative, op.PRelu(x, slope * factor)
    yield op.Relu(x) + negative, op.PRelu(x, slope * computed(lambda factor: -factor))
    yield op.Relu(x) + twice, op.PRelu(x, slope * computed(lambda factor: 2 * factor))
    yield op.Relu(x) - twice, op.PRelu(x, slope * computed(lambda factor: -2 * factor))


@rewrite(example={"x": IMAGE, "factor": -0.5})
def complement_of_erf(x: Term = tensor(), factor: Term = scalar()) -> Rules:
    """`1 - erf(-x)`, as in the GELU of TensorFlow, becomes `1 + erf(x)`, because erf is odd."""
    erf = when(op.Erf(x * factor), "the factor is below 0", lambda factor: factor < 0)
    yield op.Sub(1, op.Erf(-x)), op.Erf(x) + 1
    yield op.Sub(1, op.Erf(op.Mul(-x, factor))), op.Erf(x * factor) + 1
    yield op.Sub(1, erf), op.Erf(x * computed(lambda factor: -factor)) + 1


ACTIVATIONS: Final[tuple[Rewrite, ...]] = (
    *selected_slopes, *selected_exponential, *hard_sigmoid, *scaled_hard_sigmoid, *leaky_relu, *prelu_of_channels,
    *prelu, *complement_of_erf,
)  # fmt: skip
LIMITS: Final[tuple[Rewrite, ...]] = limits
