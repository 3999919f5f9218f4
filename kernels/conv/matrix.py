"""View convolutions as matrix products, and run pointwise ones by the gemm kernels."""

from __future__ import annotations

import math

from onnxfuse.kernels.conv.problem import Conv
from onnxfuse.kernels.gemm.implementations import implementations_if_any
from onnxfuse.kernels.gemm.problem import Gemm
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.plan import Device


def as_gemm(conv: Conv) -> Gemm:
    """Return the matrix product of a convolution with one group: rows are pixels of y, k runs over taps and channels.

    The product's x is the x of the convolution, not gathered by taps, so only pointwise convolutions can run as this
    product.
    """
    return Gemm(
        conv.pixels, conv.m, conv.taps * conv.c, conv.dtype, True, conv.aligned, x=conv.x, w=conv.w, y=conv.y,
        bias=conv.bias, slope=conv.slope, column_scale=conv.column_scale, column_shift=conv.column_shift,
        residual=conv.residual, residual_first=conv.residual_first, activation=conv.activation,
        alpha=conv.alpha, beta=conv.beta, tf32=conv.tf32, weights_constant=conv.weights_constant,
        program=conv.program, gate=conv.gate, gate_rows=math.prod(conv.y_sizes), eight_bits=conv.eight_bits,
    )  # fmt: skip


def implementations(conv: Conv, device: Device) -> list[Implementation]:
    """Return the implementations of a pointwise convolution as a matrix product; none for other convolutions.

    The list can also be empty if cuBLASLt is missing, for example for float32 that must not be rounded to TF32.
    """
    return implementations_if_any(as_gemm(conv), device) if conv.pointwise and not conv.w_hwio else []
