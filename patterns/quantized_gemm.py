"""A matrix product of a tensor and a weight, both stored in 8 bits: as integers or float8, with scales."""

from onnxfuse.dsl import Term, choose, either, fusion, op, or_zeros, rearrange, require, tensor, weight
from onnxfuse.patterns._dequantized import both_scales, dequantized, dequantized_weight, require_few_bits, scaled_sums
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

    The weight has one scale, or one for each of its n columns.  The body dequantizes and then multiplies, or it
    multiplies integers and then scales the sums.  Float8 numbers (e4m3fn) have no zero points.  If integers x have one,
    the node may have a further operand, w_sums, which the body does not read: the sums of the weight, which kernels
    need to subtract the zero point's share from their sums.
    """
    require_few_bits()
    require("the weight has one scale or {n}; found {scales}", lambda scales, n: scales in (None, n))
    w_kn, w_nk = (
        dequantized_weight(rearrange(w, f"{axes} -> {axes}"), w_scale, w_zero_point, axis)
        for axes, axis in (("k n", -1), ("n k", 0))
    )
    zero_points = or_zeros(x_zero_point, x), or_zeros(w_zero_point, w)
    sums = choose(
        "weight_layout",
        kn=op.MatMulInteger(x, rearrange(w, "k n -> k n"), *zero_points),
        nk=op.MatMulInteger(x, rearrange(w, "n k -> k n"), *zero_points),
    )
    scaled = scaled_sums(sums, both_scales(x_scale, w_scale))
    return choose(
        "multiplied",
        numbers=choose("weight_layout", **linear_by_layout(dequantized(x, x_scale, x_zero_point), w_kn, w_nk, bias)),
        integers=either(scaled + bias, scaled),
    )
