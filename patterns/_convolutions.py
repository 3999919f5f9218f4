"""The parts that the fusions of convolutions share: an example, and the terms after the convolution and its bias."""

from collections.abc import Mapping, Sequence
from typing import Final

from onnxfuse.dsl import Term, choose, either, op, rearrange, require, when
from onnxfuse.patterns._activations import activation

EXAMPLE: Final[Mapping[str, str | Sequence[int]]] = {
    "x": (2, 4, 6, 7), "w": (5, 4, 3, 3), "auto_pad": "SAME_UPPER", "dilations": [1, 2], "kernel_shape": [3, 3],
    "pads": [1, 0, 1, 0], "strides": [2, 1],
}  # fmt: skip


def per_channel(value: Term) -> Term:
    """Return a weight with one number per channel, of shape (m, 1, 1) to broadcast over images."""
    return when(rearrange(value, "m 1 1 -> m 1 1"), "the output has two spatial axes", lambda rank: rank == 4)


def finished(
    product: Term, residual: Term, slope: Term, column_scale: Term, column_shift: Term, alpha: Term, beta: Term
) -> Term:
    """Return activation(product + residual) * column_scale + column_shift.

    The residual can also be added last, in place of the shift.  `slope` is the slope of a PRelu.
    """
    require(
        "an activation or a residual follows the convolution",
        lambda residual, activation: residual is not None or activation != "none",
    )
    added = when(
        product + residual,
        "the residual is added before the activation",
        lambda residual_position: residual_position == "before",
    )
    total = either(added, product)
    activated = activation(total, alpha, beta, none=total, prelu=op.PRelu(total, per_channel(slope)))
    scaled = either(activated * per_channel(column_scale), activated)
    return choose("residual_position", before=either(_shifted(scaled, column_shift), scaled), after=scaled + residual)


def _shifted(scaled: Term, column_shift: Term) -> Term:
    """Return the sum of an image and a shift per channel."""
    return when(
        scaled + per_channel(column_shift),
        "kernels have either slopes of a PRelu or a shift of channels",
        lambda activation: activation != "prelu",
    )
