"""The two matrix products of a gated activation with quantized weights, and the gating itself."""

from onnxfuse.dsl import Term, attribute, fusion, require, tensor, weight
from onnxfuse.patterns._activations import gate_activation
from onnxfuse.patterns._quantized_linear import EXAMPLE, Quantized, quantized_linear, require_blocks


@fusion(
    out="... n",
    epilogue=True,
    prologue=True,
    example={**EXAMPLE, "up_scales": "n blocks", "up_zero_points": "n zeros"},
)
def gated_matmul_nbits(
    x: Term = tensor("... k"),
    w: Term = weight(),
    scales: Term = weight(),
    zero_points: Term = weight(optional=True),
    up: Term = weight(),
    up_scales: Term = weight(),
    up_zero_points: Term = weight(optional=True),
    bias: Term = weight("n", optional=True),
    up_bias: Term = weight("n", optional=True),
    bits: Term = attribute(),
    block_size: Term = attribute(),
    accuracy_level: Term = attribute(),
) -> Term:
    """y = activation(x w + bias) * (x up + up_bias); w and up are stored as in matmul_nbits"""
    require_blocks()
    require("w and up are two weights, so that there are two products", lambda w, up: w is not up)
    require("w and up have one dtype", lambda dtypes: dtypes["w"] == dtypes["up"])
    said = bits, block_size, accuracy_level
    gate = quantized_linear(x, Quantized(w, scales, zero_points, *said), bias)
    return gate_activation(gate) * quantized_linear(x, Quantized(up, up_scales, up_zero_points, *said), up_bias)
