"""The spellings of layer norm and RMS norm, shared by the fusions with and without a residual in front."""

from typing import Any

from onnxfuse.dsl import Term, either, op, wide


def layer_normalized(x: Term, scale: Any, bias: Any, epsilon: Any) -> Term:
    """(x - mean) / sqrt(var + epsilon) * scale + bias over the last axis."""
    x32 = wide(x)
    mean = op.ReduceMean(x32, axes=[-1])
    centred = x32 - mean
    deviation = op.Sqrt(op.ReduceMean(centred**2, axes=[-1]) + epsilon)
    normal = centred / deviation * scale
    slope = 1 / deviation * scale
    return either(
        op.LayerNormalization(x, scale, bias, epsilon=epsilon),
        normal + bias,
        x32 * slope + (bias - mean * slope),
        normal,
    )


def rms_normalized(x: Term, scale: Any, epsilon: Any) -> Term:
    """x / sqrt(mean(x^2) + epsilon) * scale over the last axis."""
    x32 = wide(x)
    root = op.Sqrt(op.ReduceMean(x32**2, axes=[-1]) + epsilon)
    return either(op.RMSNormalization(x, scale, epsilon=epsilon), x32 / root * scale)
