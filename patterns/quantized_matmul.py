"""A product of two computed tensors of 8 bits for each head, as attention has them: of integers or float8."""

from typing import Final

from onnxfuse.dsl import Term, choose, either, fusion, op, rearrange, require, tensor
from onnxfuse.patterns._dequantized import dequantized, require_eight_bits

AXES: Final = "batch heads m n"  # of a product


def _by_layout(name: str, x: Term, scale: Term, zero_point: Term, rows: str, columns: str, heads: str, to: str) -> Term:
    """Return a dequantized operand, rearranged to the axes `to`; the choice `<name>_layout` says how it is stored."""
    stored = {"bshd": f"batch {rows} {heads} {columns}", "bhsd": f"batch {heads} {rows} {columns}"}
    options = {}
    for label, axes in stored.items():
        moved = dequantized(rearrange(x, f"{axes} -> {to}"), scale, zero_point)
        options[label] = either(moved, rearrange(dequantized(x, scale, zero_point), f"{axes} -> {to}"))
    return choose(f"{name}_layout", **options)


def _turned(w: Term, scale: Term, zero_point: Term, axes: str) -> Term:
    arrangement = f"batch {axes} -> batch k n"
    moved = dequantized(rearrange(w, arrangement), scale, zero_point)
    return either(moved, rearrange(dequantized(w, scale, zero_point), arrangement))


@fusion(out="batch m (heads n)", epilogue=True)
def quantized_matmul(
    x: Term = tensor(),
    x_scale: Term = tensor("1?"),
    x_zero_point: Term = tensor("1?", optional=True),
    w: Term = tensor(),
    w_scale: Term = tensor("1?"),
    w_zero_point: Term = tensor("1?", optional=True),
    y_scale: Term = tensor("1?", optional=True),
    y_zero_point: Term = tensor("1?", optional=True),
) -> Term:
    """y = (x - x_zero_point) x_scale (w - w_zero_point) w_scale, for each element of the batch and each head

    Float8 numbers (e4m3fn) have no zero points.  Each head of w serves `repeats` heads of x.  With `w_order` nk, sums
    are along the last axes of both operands, as for queries and keys.  With `out_layout` integers_packed and
    integers_bshd, y is quantized before its axes are rearranged.  Elsewhere, a quantizer of y joins like any operator.
    With `out_layout` alone, the operands have three axes and no heads.
    """
    require_eight_bits()
    require(
        "x has {heads} heads; required {w_heads} heads of w times {repeats}",
        lambda heads, w_heads, repeats: heads is None or heads == w_heads * repeats,
    )
    of_w, axes = (w, w_scale, w_zero_point), "batch (w_heads repeats) k n"
    columns = choose(
        "w_order",
        nk=_by_layout("w", *of_w, "n", "k", "w_heads", axes),
        kn=_by_layout("w", *of_w, "k", "n", "w_heads", axes),
    )
    rows = _by_layout("x", x, x_scale, x_zero_point, "m", "k", "heads", "batch heads m k")
    product = op.MatMul(rows, columns)
    without_heads = op.MatMul(
        dequantized(rearrange(x, "batch m k -> batch m k"), x_scale, x_zero_point),
        choose("w_order", **{order: _turned(*of_w, axes) for order, axes in (("nk", "n k"), ("kn", "k n"))}),
    )
    packed, by_heads = f"{AXES} -> batch m (heads n)", f"{AXES} -> batch m heads n"
    quantized = op.QuantizeLinear(product, y_scale, y_zero_point)
    return choose(
        "out_layout",
        packed=rearrange(product, packed),
        bshd=rearrange(product, by_heads),
        bhsd=rearrange(product, f"{AXES} -> {AXES}"),
        alone=rearrange(without_heads, "batch m n -> batch m n"),
        integers_packed=rearrange(quantized, packed),
        integers_bshd=rearrange(quantized, by_heads),
    )
