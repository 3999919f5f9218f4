"""Operands of products and convolutions that are stored in 8 bits, with scales and zero points."""

from typing import Final

from onnxfuse.dsl import Term, either, op, or_zeros, require, shared, when

FLOAT: Final = 1  # ONNX's number of float32


def dequantized(x: Term, scale: Term, zero_point: Term) -> Term:
    """Dequantize a computed tensor with one scale; other nodes may read the result too."""
    return shared(op.DequantizeLinear(x, scale, or_zeros(zero_point, x)))


def dequantized_weight(w: Term, scale: Term, zero_point: Term, axis: int) -> Term:
    """Dequantize a weight with one scale, or with `scales` scales along an axis.

    Other nodes may read the result, such as the embedding that shares the weight of the last product.
    """
    operands = w, scale, or_zeros(zero_point, w)
    of_one_scale = when(
        op.DequantizeLinear(*operands),
        f"several scales are along axis {axis}; found {{scales}} along another one",
        lambda scales: scales is None,
    )
    return shared(either(op.DequantizeLinear(*operands, axis=axis), of_one_scale))


def scaled_sums(sums: Term, scale: Term) -> Term:
    """Return integer `sums` times `scale`, the product of both scales, in the operators of dynamic quantizers."""
    return op.Mul(op.Cast(sums, to=FLOAT), scale)


def both_scales(x_scale: Term, w_scale: Term) -> Term:
    """Return the product of two scales; other products may read it too."""
    return shared(op.Mul(x_scale, w_scale))


def require_eight_bits() -> None:
    """Require dtypes that kernels multiply: integers of 8 bits, or float8_e4m3fn."""
    require(
        "x and w are integers of 8 bits, or both are float8_e4m3fn",
        lambda dtypes: (
            {dtypes["x"], dtypes["w"]} <= {"int8", "uint8"} or {dtypes["x"], dtypes["w"]} == {"float8_e4m3fn"}
        ),
    )


def require_few_bits() -> None:
    """Require integers of at most 16 bits, or one dtype of float8: kernels multiply them, or dequantize them first."""
    require(
        "x and w are integers of 8 or 16 bits, or of one dtype of float8",
        lambda dtypes: (
            {dtypes["x"], dtypes["w"]} <= {"int8", "uint8", "int16", "uint16"}
            or {dtypes["x"], dtypes["w"]} in ({"float8_e4m3fn"}, {"float8_e5m2"})
        ),
    )
