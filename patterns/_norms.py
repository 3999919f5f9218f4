"""The forms in which models write LayerNorm and RMSNorm, for the fusions with and without a preceding sum."""

from onnxfuse.dsl import Term, either, float32, op, require, when


def require_epsilon() -> None:
    """Require an epsilon that onnxruntime accepts when it fuses the operators of a norm into its own operator."""
    require("epsilon is {epsilon}; required 0 or more", lambda epsilon: epsilon is None or epsilon >= 0)


def layer_normalized(x: Term, scale: Term, bias: Term, epsilon: Term) -> Term:
    """Return (x - mean) / sqrt(var + epsilon) * scale + bias over the last axis (Ba et al. 2016, arXiv:1607.06450).

    Flax computes the variance as mean(x^2) - mean^2.  That is the same number, with a rounding error that grows with
    mean^2 / var; all kernels sum the squares of x - mean.
    """
    x32 = float32(x)
    mean = op.ReduceMean(x32, axes=[-1])
    centred = x32 - mean
    fast = op.Sub(op.ReduceMean(x32**2, axes=[-1]), mean**2)
    variance = either(op.ReduceMean(centred**2, axes=[-1]), op.Max(fast, 0.0), op.Relu(fast), fast)
    deviation = op.Sqrt(variance + epsilon)
    scaled = _divided(centred, deviation, scale)
    slope = 1 / deviation * scale
    slopes = either(x32 * slope + (bias - mean * slope), x32 * slope - mean * slope)
    return either(
        op.LayerNormalization(x, scale, bias, epsilon=epsilon),
        scaled + bias,
        when(  # an infinite scale makes these spellings NaN where the others are infinite
            slopes, "no element of scale may be infinite or NaN", lambda scale, is_finite: is_finite(scale)
        ),
        scaled,
    )


def rms_normalized(x: Term, scale: Term, epsilon: Term) -> Term:
    """Return x / sqrt(mean(x^2) + epsilon) * scale over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    x32 = float32(x)
    root = op.Sqrt(op.ReduceMean(x32**2, axes=[-1]) + epsilon)
    return either(op.RMSNormalization(x, scale, epsilon=epsilon), _divided(x32, root, scale))


def _divided(x: Term, root: Term, scale: Term) -> Term:
    """Return x / root * scale, or a product of x, 1 / root and scale in any grouping."""
    return either(op.Div(x, root) * scale, x * (1 / root) * scale)
