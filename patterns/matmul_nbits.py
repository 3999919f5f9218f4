"""A matrix product with a weight of 2, 4 or 8 bits, quantized in blocks along k."""

from onnxfuse.dsl import Term, attribute, fusion, tensor, weight
from onnxfuse.patterns._quantized_linear import EXAMPLE, Quantized, quantized_linear, require_blocks


@fusion(out="... n", epilogue=True, prologue=True, selection=True, example=EXAMPLE)
def matmul_nbits(
    x: Term = tensor("... k"),
    w: Term = weight(),
    scales: Term = weight(),
    zero_points: Term = weight(optional=True),
    bias: Term = weight("n", optional=True),
    bits: Term = attribute(),
    block_size: Term = attribute(),
    accuracy_level: Term = attribute(),
) -> Term:
    """y = x w + bias; w is (n, blocks, bytes), or (k, n) with weight_layout kn, or (n, k) with weight_layout nk"""
    require_blocks()
    return quantized_linear(x, Quantized(w, scales, zero_points, bits, block_size, accuracy_level), bias)
