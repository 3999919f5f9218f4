"""Rewrite rules for matrix products."""

from __future__ import annotations

from typing import Final

from onnxfuse.dsl.declaration import Rewrite, Rules, require, rewrite
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import either, op, size, tensor, weight
from onnxfuse.patterns._activations import gate_activation


@rewrite(out="... n")
def split_packed_gate(
    x: Term = tensor("... k"), w: Term = weight("k columns"), bias: Term = weight("columns", optional=True)
) -> Rules:
    """A product that packs the gate and the up projection, as in Phi-3, becomes two products, one for each.

    Both products are then fused with their gate, and their results are never written to memory.  In the file, the two
    halves of the weight replace the whole weight.
    """
    n = size("n")
    require("{columns} columns are two times {n}", lambda columns, n: columns == 2 * n)
    require("nothing else reads the weight", lambda w, is_read_once: is_read_once(w))
    whole = op.MatMul(x, w)
    packed = either(whole + bias, whole)
    halves, products = [], []
    for begin, end in ((0, n), (n, 2 * n)):
        halves.append(op.Slice(packed, starts=[begin], ends=[end], axes=[-1], steps=[1]))
        product = op.MatMul(x, op.Slice(w, starts=[begin], ends=[end], axes=[1], steps=[1]))
        products.append(either(product + op.Slice(bias, starts=[begin], ends=[end], axes=[0], steps=[1]), product))
    yield gate_activation(halves[0]) * halves[1], products[1] * gate_activation(products[0])
    yield gate_activation(halves[1]) * halves[0], products[0] * gate_activation(products[1])


GATES: Final[tuple[Rewrite, ...]] = split_packed_gate
