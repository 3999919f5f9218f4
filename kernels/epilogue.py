"""The macros and operands of epilogue.cuh, which matrix products and convolutions share."""

from __future__ import annotations

from onnxfuse.activations import PRELU
from onnxfuse.kernels.tensors import ABSENT, STORAGE, Defines, float32
from onnxfuse.runtime.plan import Pointer, Struct


def epilogue_defines(
    dtype: str,
    activation: str,
    *,
    gated: bool = False,
    bias: bool = False,
    up_bias: bool = False,
    slope: bool = False,
    column_scale: bool = False,
    column_shift: bool = False,
    residual: bool = False,
    residual_first: bool = False,
    optional_bias: bool = False,
) -> Defines:
    """Return the macros of epilogue.cuh for a y of `dtype`; a flag is true if the operand of its name is present.

    A `slope` is the alpha of each column of a PRelu.  There is at most one of up_bias, slope and column_shift.
    `residual_first`: the residual is added before the activation.  `optional_bias`: the launch computes several
    products, some of which may have no bias.
    """
    return {
        "ELEMENT": STORAGE[dtype],
        "ACTIVATION": "leaky_relu" if activation == PRELU else activation,
        "PRECISE": int(dtype == "float32"),
        "GATED": int(gated),
        "HAS_BIAS": int(bias),
        "HAS_UP_BIAS": int(up_bias),
        "HAS_SLOPE": int(slope),
        "HAS_COLUMN_SCALE": int(column_scale),
        "HAS_COLUMN_SHIFT": int(column_shift),
        "HAS_RESIDUAL": int(residual),
        "RESIDUAL_FIRST": int(residual and residual_first),
        "OPTIONAL_BIAS": int(optional_bias),
    }


def epilogue_operands(
    vectors: tuple[Pointer | None, Pointer | None, Pointer | None], residual: Pointer | None, y: Pointer | None,
    parameters: tuple[float, float],
) -> Struct:  # fmt: skip
    """Return the struct EpilogueOperands of epilogue.cuh; operands that are None are null.

    vectors     bias, extra (one of up_bias, slope and column_shift), and column_scale
    parameters  alpha and beta of the activation
    """
    return Struct((*(each or ABSENT for each in (*vectors, residual, y)), *float32(*parameters)))
