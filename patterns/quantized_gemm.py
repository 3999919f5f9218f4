"""A matrix product of integers of 8 bits: of a tensor and a weight that are dequantized."""

from onnxfuse.dsl import Term, choose, fusion, rearrange, require, tensor, weight
from onnxfuse.patterns._dequantized import dequantized, dequantized_weight, require_eight_bits
from onnxfuse.patterns._linear import linear_by_layout


@fusion(out="... n", epilogue=True)
def quantized_gemm(
    x: Term = tensor("... k"),
    x_scale: Term = tensor("1?"),
    x_zero_point: Term = tensor("1?", optional=True),
    w: Term = weight(),
    w_scale: Term = weight("scales?"),
    w_zero_point: Term = weight("scales?", optional=True),
    bias: Term = weight("n", optional=True),
) -> Term:
    """y = (x - x_zero_point) x_scale (w - w_zero_point) w_scale + bias; w is (k, n), or (n, k) with weight_layout nk

    The weight has one scale, or one for each of its n columns.
    """
    require_eight_bits()
    require("the weight has one scale or {n}; found {scales}", lambda scales, n: scales in (None, n))
    w_kn, w_nk = (
        dequantized_weight(rearrange(w, f"{axes} -> {axes}"), w_scale, w_zero_point, axis)
        for axes, axis in (("k n", -1), ("n k", 0))
    )
    return choose("weight_layout", **linear_by_layout(dequantized(x, x_scale, x_zero_point), w_kn, w_nk, bias))
