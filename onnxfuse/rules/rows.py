"""Rewrite products of flattened rows, as TensorFlow's Tensordot and Einsum compute them, as products of the rows.

If only one row of a product is read, the product becomes that of this row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from onnxfuse.dsl.declaration import Rewrite, Rules, require, rewrite
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import attribute, known, op, rearrange, tensor, weight

END: Final = 2**63 - 1  # the end of a Slice that goes on to the end of its axis


def _of_rows(rows: Term, x: Term, kn: Term, nk: Term, beta: Term) -> Iterator[tuple[Term, Term]]:
    """Yield (product of the flattened `rows` with a weight, product of the unflattened x with the weight)."""
    require("the bias of a Gemm must be optional", lambda opset: opset >= 11)
    yield op.MatMul(rows, kn), op.MatMul(x, kn)
    yield op.Gemm(rows, kn, beta=beta), op.MatMul(x, kn)
    yield op.Gemm(rows, nk, transB=1, beta=beta), op.MatMul(x, op.Transpose(nk, perm=[1, 0]))


@rewrite(out="batch rows ... n")
def product_of_rows(
    x: Term = tensor("batch rows ... k"), kn: Term = weight("k n"), nk: Term = weight("n k"), beta: Term = attribute()
) -> Rules:
    """A product of flattened rows, as in TensorFlow's Tensordot, becomes a product of the rows without a Reshape."""
    for flat, product in _of_rows(rearrange(x, "batch rows ... k -> (batch rows ...) k"), x, kn, nk, beta):
        yield rearrange(flat, "(batch rows ...) n -> batch rows ... n"), product


@rewrite(out="batch rows heads size")
def product_of_heads(
    x: Term = tensor("batch rows k"),
    kn: Term = weight(),
    nk: Term = weight(),
    beta: Term = attribute(),
) -> Rules:
    """A product of flattened rows, then split into heads (Keras' Einsum), becomes a product of unflattened rows."""
    weights = rearrange(kn, "k (heads size) -> k (heads size)"), rearrange(nk, "(heads size) k -> (heads size) k")
    for flat, product in _of_rows(rearrange(x, "batch rows k -> (batch rows) k"), x, *weights, beta):
        heads = rearrange(flat, "(batch rows) (heads size) -> batch rows heads size")
        yield heads, rearrange(product, "batch rows (heads size) -> batch rows heads size")


@rewrite(out="batch rows n")
def product_of_context(
    x: Term = tensor("batch heads rows size"),
    kn: Term = weight(),
    nk: Term = weight(),
    bias: Term = weight("n"),
    beta: Term = attribute(),
) -> Rules:
    """A product of an attention's result, flattened to (batch * rows, columns), becomes one of unflattened rows."""
    rows = rearrange(x, "batch heads rows size -> batch rows (heads size)")
    flattened = rearrange(x, "batch heads rows size -> (batch rows) (heads size)")
    weights = rearrange(kn, "(heads size) n -> (heads size) n"), rearrange(nk, "n (heads size) -> n (heads size)")
    unbiased = _of_rows(flattened, rows, *weights, beta)
    transposed = op.MatMul(rows, op.Transpose(weights[1], perm=[1, 0])) + bias
    biased = (op.Gemm(flattened, weights[0], bias), op.MatMul(rows, weights[0]) + bias)
    for flat, product in (*unbiased, biased, (op.Gemm(flattened, weights[1], bias, transB=1), transposed)):
        yield rearrange(flat, "(batch rows) n -> batch rows n"), product


@rewrite(out="batch rows heads size")
def bias_of_heads(
    y: Term = tensor(),
    x: Term = tensor("batch rows k"),
    kn: Term = weight(),
    bias: Term = weight("heads size"),
) -> Rules:
    """A bias that is added to a product after a Reshape to heads is added before this Reshape instead."""
    product = known(y, op.MatMul(x, rearrange(kn, "k (heads size) -> k (heads size)")))
    heads = "batch rows (heads size) -> batch rows heads size"
    yield rearrange(product, heads) + bias, rearrange(product + rearrange(bias, "heads size -> (heads size)"), heads)


def _gathered(value: Term, index: Term) -> Term:
    """Return one row."""
    return op.Gather(value, index, axis=1)


def _last(value: Term) -> Term:
    """Return the last row, whose axis stays."""
    return op.Slice(value, starts=[-1], ends=[END], axes=[1], steps=[1])


@rewrite(out="batch n", example={"index": ()})
def row_of_product(
    x: Term = tensor("batch rows k"), w: Term = weight("k n"), bias: Term = weight("n"), index: Term = weight()
) -> Rules:
    """A Gather of one row of a product, as for the logits of the last token, becomes the product of that row."""
    product, of_row = op.MatMul(x, w), op.MatMul(_gathered(x, index), w)
    yield _gathered(product, index), of_row
    yield _gathered(product + bias, index), of_row + bias


@rewrite(out="batch last n")
def last_row_of_product(x: Term = tensor("batch rows k"), w: Term = weight("k n"), bias: Term = weight("n")) -> Rules:
    """A Slice of the last row of a product becomes the product of that row."""
    product, of_row = op.MatMul(x, w), op.MatMul(_last(x), w)
    yield _last(product), of_row
    yield _last(product + bias), of_row + bias


ROWS: Final[tuple[Rewrite, ...]] = (
    *product_of_rows, *product_of_heads, *product_of_context, *bias_of_heads, *row_of_product, *last_row_of_product,
)  # fmt: skip
