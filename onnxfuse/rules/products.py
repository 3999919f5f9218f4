"""Rewrite rules for matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from onnxfuse.dsl.declaration import Rewrite, Rules, require, rewrite
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import attribute, contrib, either, op, size, tensor, weight
from onnxfuse.patterns._activations import gate_activation
from onnxfuse.patterns._quantized_linear import require_blocks


def _gated(w: Term, packed: Term, products: Sequence[Term]) -> Rules:
    """Yield (gate and up as halves of one product, gate and up as two products) for either order of the halves."""
    require("{columns} columns are two times {n}", lambda columns, n: columns == 2 * n)
    require("nothing else may read the weight", lambda w, is_read_once: is_read_once(w))
    halves = [_half(packed, i, axis=-1) for i in (0, 1)]
    for gate, up in (0, 1), (1, 0):
        yield gate_activation(halves[gate]) * halves[up], products[up] * gate_activation(products[gate])


def _half(value: Term, index: int, axis: int = 0) -> Term:
    """Return the first or the second n elements of an axis."""
    n = size("n")
    begin, end = ((0, n), (n, 2 * n))[index]
    return op.Slice(value, starts=[begin], ends=[end], axes=[axis], steps=[1])


def _by_columns(value: Term) -> Term:
    """Return scales or zero points with the columns as first axis; older quantizers store them as a vector."""
    return op.Reshape(value, shape=[size("columns"), -1])


@rewrite(out="... n")
def split_packed_gate(
    x: Term = tensor("... k"), w: Term = weight("k columns"), bias: Term = weight("columns", optional=True)
) -> Rules:
    """A product that packs the gate and the up projection, as in Phi-3, becomes two products, one for each.

    Both products are then fused with their gate, and their results are never written to memory.  In the file, the two
    halves of the weight replace the whole weight.
    """
    whole = op.MatMul(x, w)
    products = [op.MatMul(x, _half(w, i, axis=1)) for i in (0, 1)]
    yield from _gated(
        w, either(whole + bias, whole), [either(each + _half(bias, i), each) for i, each in enumerate(products)]
    )


@rewrite(
    out="... n",
    example={"bits": 2, "block_size": 16, "scales": "columns blocks", "zero_points": "columns zeros"},
)
def split_packed_gate_nbits(
    x: Term = tensor("... k"),
    w: Term = weight("columns blocks bytes"),
    scales: Term = weight(),
    zero_points: Term = weight(optional=True),
    bias: Term = weight("columns", optional=True),
    bits: Term = attribute(),
    block_size: Term = attribute(),
    accuracy_level: Term = attribute(),
) -> Rules:
    """A MatMulNBits that packs the gate and the up projection becomes two products, one for each.

    The columns of the weight are the first axis of the weight, the scales and the zero points.
    """
    require_blocks()
    k, said = size("k"), {"bits": bits, "block_size": block_size, "accuracy_level": accuracy_level}
    whole = contrib.MatMulNBits(x, w, scales, zero_points, K=k, N=size("columns"), **said)
    with_bias = contrib.MatMulNBits(x, w, scales, zero_points, None, bias, K=k, N=size("columns"), **said)
    products = []
    for i in (0, 1):
        half = x, _half(w, i), _half(_by_columns(scales), i)
        options = [
            contrib.MatMulNBits(*half, *zeros, K=k, N=size("n"), **said)
            for zeros in ((_half(_by_columns(zero_points), i),), ())
        ]
        products.append(either(*(each + _half(bias, i) for each in options), *options))
    yield from _gated(w, either(whole + bias, whole, with_bias), products)


GATES: Final[tuple[Rewrite, ...]] = (*split_packed_gate, *split_packed_gate_nbits)
