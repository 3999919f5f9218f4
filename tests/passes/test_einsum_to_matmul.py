"""Einsums that become a Transpose or a MatMul, with the same values, and those that stay."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_models import apply, ops, parse, run

from onnxfuse.passes.einsum_to_matmul import einsum_to_matmul

SIZES = dict(zip("abcdefg", (2, 3, 4, 5, 6, 7, 8), strict=True))


def check(equation: str, expected: str, dims: dict[str, str] | None = None) -> None:
    """Assert which operators an Einsum becomes, and that they compute the same; `dims` are names of dynamic axes."""
    letters = equation.replace(" ", "").partition("->")[0].split(",")
    named = dims or {}
    inputs = [f"float[{','.join(named.get(x, str(SIZES[x])) for x in axes)}] x{i}" for i, axes in enumerate(letters)]
    read = ", ".join(f"x{i}" for i in range(len(letters)))
    before = parse(f'({", ".join(inputs)}) => (y) {{ y = Einsum <equation = "{equation}"> ({read}) }}')
    after, (count,) = apply(before, einsum_to_matmul)
    assert ops(after) == expected
    assert bool(count) == (expected != "Einsum")
    random = np.random.default_rng(0)
    values = [random.standard_normal([SIZES[x] for x in axes]).astype(np.float32) for axes in letters]
    feeds = {f"x{i}": value for i, value in enumerate(values)}
    np.testing.assert_allclose(run(after, feeds)[0], run(before, feeds)[0], atol=1e-5)


@pytest.mark.parametrize(
    ("equation", "expected"),
    [
        ("ab,bc->ac", "MatMul"),
        ("ab,cb->ac", "Transpose MatMul"),
        ("ab,cb->ca", "Transpose MatMul Transpose"),
        ("cabd,eabd->abce", "Transpose Transpose MatMul"),
        ("abce,eabd->cabd", "Transpose MatMul Transpose"),
        ("abc,cde->abde", "Reshape MatMul Reshape"),
        ("abcd,ecd->abe", "Reshape Transpose Reshape MatMul"),
        ("abcd,bed->abce", "Transpose MatMul"),
        ("abcd,aed->abce", "Transpose Reshape MatMul"),  # b is a row among the leading axes
        ("adcb,adeb->adec", "Transpose MatMul"),  # the operand that has the result's last axis is the right one
        ("abdc,abed->abce", "Transpose Transpose MatMul"),
        ("abcd,ced->abce", "Transpose Transpose MatMul Transpose"),
        ("abc,abcd->abd", "Reshape MatMul Reshape"),  # vectors, which get an axis of rows
        ("abcd,abd->abc", "Reshape Transpose MatMul Reshape"),
        ("abcd->cabd", "Transpose"),
        ("ab,bc,cd->ad", "MatMul Einsum"),  # which the next round writes as a MatMul
        ("abcd,adbe,bef->acf", "Transpose MatMul Transpose Einsum"),
    ],
)
def test_what_is_one_product(equation: str, expected: str) -> None:
    check(equation, expected)


def test_dynamic_axes_need_no_computed_shapes() -> None:
    check("cabd,eabd->abce", "Transpose Transpose MatMul", {"a": "batch", "c": "queries", "e": "keys"})
    check("abc,cde->abde", "Reshape MatMul Reshape", {"a": "batch"})


@pytest.mark.parametrize(
    "equation",
    [
        "ab,bc->a",  # sums an axis of one operand alone
        "abc,abc->ab",  # has no columns
        "ab,cd->abcd",  # sums nothing
        "aab,bc->ac",  # reads a diagonal
        "ab,ab,bc->ac",  # whose first operands make no product
        "abc->ab",
    ],
)
def test_what_stays(equation: str) -> None:
    check(equation, "Einsum")


@pytest.mark.parametrize(
    ("equation", "shapes", "expected"),
    [
        ("...b,bc->...c", [(2, 3), (3, 4)], "MatMul"),
        ("...b,bc->...c", [(5, 2, 3), (3, 4)], "MatMul"),
        ("b...,bc->...c", [(3, 5, 2), (3, 4)], "Transpose MatMul"),
        ("...qhd,...khd->...hqk", [(2, 5, 4, 8), (2, 6, 4, 8)], "Transpose Transpose MatMul"),
        ("...qhd,...khd->...hqk", [(5, 4, 8), (6, 4, 8)], "Transpose Transpose MatMul"),
        ("...ij,...jk->...ik", [(2, 5, 4), (1, 4, 6)], "Einsum"),  # which broadcasts
        ("...ij->...ji", [(2, 5, 4)], "Transpose"),
        ("...ij,...jk", [(2, 5, 4), (2, 4, 6)], "Einsum"),  # whose result is in the order of the alphabet
    ],
)
def test_an_ellipsis_stands_for_axes(equation: str, shapes: list[tuple[int, ...]], expected: str) -> None:
    inputs = ", ".join(f"float[{','.join(map(str, shape))}] x{i}" for i, shape in enumerate(shapes))
    read = ", ".join(f"x{i}" for i in range(len(shapes)))
    before = parse(f'({inputs}) => (y) {{ y = Einsum <equation = "{equation}"> ({read}) }}')
    after, _ = apply(before, einsum_to_matmul)
    assert ops(after) == expected
    random = np.random.default_rng(0)
    feeds = {f"x{i}": random.standard_normal(shape).astype(np.float32) for i, shape in enumerate(shapes)}
    np.testing.assert_allclose(run(after, feeds)[0], run(before, feeds)[0], atol=1e-5)


def test_an_ellipsis_that_the_result_lacks_stays() -> None:
    """Nobody runs such an Einsum: onnxruntime refuses it."""
    before = parse('(float[2,5,4] x, float[2,4,6] w) => (y) { y = Einsum <equation = "...ij,...jk->ik"> (x, w) }')
    assert ops(apply(before, einsum_to_matmul)[0]) == "Einsum"


def test_probabilities_are_not_transposed() -> None:
    """One value head serves all heads: the result of the MatMul is transposed, and the larger probabilities are not."""
    before = parse("""(float[B,4,Q,K] x, float[B,K,8] v) => (y) {
        p = Softmax(x) y = Einsum<equation="bhqk,bkd->bqhd">(p, v) }""")
    after, _ = apply(before, einsum_to_matmul)
    assert ops(after) == "Softmax Unsqueeze MatMul Transpose"
