"""The spellings of a matrix product with a weight that is quantized in blocks along k."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from onnxfuse.dsl import Term, choose, contrib, either, op, rearrange, require, shared, size, when
from onnxfuse.patterns._linear import linear_by_layout

EXAMPLE: Final[Mapping[str, int | str]] = {"bits": 4, "block_size": 16, "scales": "n blocks", "zero_points": "n zeros"}


class Quantized(NamedTuple):
    """A weight, its scales and zero points, and attributes of MatMulNBits.

    All weights of a fusion have blocks of one size.
    """

    w: Term
    scales: Term
    zero_points: Term
    bits: Term
    block_size: Term
    accuracy_level: Term


def quantized_linear(x: Term, weight: Quantized, bias: Term, number: str = "") -> Term:
    """Return x w + bias, or x w, for a w of 2, 4 or 8 bits that is stored in one of three layouts.

    The attribute `weight_layout` names the layout:

    nbits  as com.microsoft's MatMulNBits stores it: (n, blocks, bytes)
    kn, nk  the operand of a DequantizeLinear by blocks of k: (k, n) or (n, k)

    If a fusion has several products, all have one layout, and `number` is appended to the name of the dimension n.
    """
    n = f"n{number}"
    packed = rearrange(weight.w, f"{n} blocks bytes -> {n} blocks bytes")
    operands, sizes = (x, packed, weight.scales, weight.zero_points), {"K": size("k"), "N": size(n)}
    said = {"bits": weight.bits, "block_size": weight.block_size, "accuracy_level": weight.accuracy_level}
    product = contrib.MatMulNBits(*operands, **sizes, **said)
    return choose(
        "weight_layout",
        nbits=either(product + bias, product, contrib.MatMulNBits(*operands, None, bias, **sizes, **said)),
        **linear_by_layout(x, _dequantized(weight, "k", n, 0), _dequantized(weight, n, "k", -1), bias, number),
    )


def _dequantized(weight: Quantized, first: str, second: str, axis: int) -> Term:
    """Dequantize the weight; `first` and `second` name its axes, and k is on axis `axis` (0 or -1).

    Other nodes may read the result, such as the embedding that shares the weight of the last product.
    """
    axes, n, block_size = f"{first} {second}", (first, second)[1 + axis], weight.block_size
    blocks = axes.replace("k", "blocks")
    w, scales = _with_axes(weight.w, axes), _with_axes(weight.scales, blocks)
    in_blocks = (
        op.DequantizeLinear(w, scales, _with_axes(weight.zero_points, blocks), axis=axis, block_size=block_size),
        op.DequantizeLinear(w, scales, axis=axis, block_size=block_size),
    )
    without_blocks = (
        op.DequantizeLinear(w, _with_axes(weight.scales, n), axis=1 + axis, block_size=block_size),
        op.DequantizeLinear(w, _with_axes(weight.scales, ""), block_size=block_size),
    )
    return shared(
        either(
            *(when(each, "the weight has no blocks", lambda block_size: block_size) for each in in_blocks),
            *(when(each, "the weight has blocks", lambda block_size: not block_size) for each in without_blocks),
        )
    )


def _with_axes(operand: Term, names: str) -> Term:
    return rearrange(operand, f"{names} -> {names}")


def require_blocks() -> None:
    """Require blocks along k whose size and bits both kernels and onnxruntime support, or float8 weights.

    Integers without blocks are left to `quantized_gemm`.
    """
    require("bits is {bits}; required 2, 4 or 8", lambda bits: bits in (None, 2, 4, 8))
    require(
        "a weight without blocks is of float8 numbers",
        lambda block_size, dtypes: block_size or "float8_e4m3fn" in dtypes.values(),
    )
    require(
        "x of a float8 weight without blocks is not float8, too; quantized_gemm multiplies these",
        lambda block_size, x, is_made_by: block_size or not is_made_by(x, "DequantizeLinear"),
    )
    require(
        "block_size is {block_size}; required a power of two, and at least 16",
        lambda block_size: not block_size or (block_size >= 16 and block_size & (block_size - 1) == 0),
    )
    require(
        "a column of {k} elements has {blocks} blocks of {block_size}; required as many as cover it",
        lambda k, blocks, block_size: isinstance(k, int) and blocks == (-(-k // block_size) if block_size else None),
    )
    require(
        "a block has {bytes} bytes; required {block_size} elements of {bits} bits",
        lambda bytes, bits, block_size: bytes is None or 8 * bytes == (bits or 4) * block_size,
    )
    require(
        "zero points of {bits} bits fill whole bytes",
        lambda zeros, blocks, bits: zeros is None or 8 * zeros == -(-blocks * (bits or 4) // 8) * 8,
    )
