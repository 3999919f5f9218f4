"""Einsums that become a Transpose or a MatMul, with the same values, and those that stay."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_models import apply, ops, parse, run

from onnxfuse.passes.spell_einsums import spell_einsums

SIZES = dict(zip("abcdefg", (2, 3, 4, 5, 6, 7, 8), strict=True))


def check(equation: str, expected: str, dims: dict[str, str] | None = None) -> None:
    """Assert which operators an Einsum becomes, and that they compute the same; `dims` are names of dynamic axes."""
    letters = equation.replace(" ", "").partition("->")[0].split(",")
    named = dims or {}
    inputs = [f"float[{','.join(named.get(x, str(SIZES[x])) for x in axes)}] x{i}" for i, axes in enumerate(letters)]
    read = ", ".join(f"x{i}" for i in range(len(letters)))
    before = parse(f'({", ".join(inputs)}) => (y) {{ y = Einsum <equation = "{equation}"> ({read}) }}')
    after, (count,) = apply(before, spell_einsums)
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
        ("abcd,ced->abce", "Transpose Transpose MatMul Transpose"),
        ("abcd->cabd", "Transpose"),
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
        "abc,abcd->abd",  # has no row beside its batch axes
        "aab,bc->ac",  # reads a diagonal
        "ab,bc,cd->ad",
        "abc->ab",
    ],
)
def test_what_stays(equation: str) -> None:
    check(equation, "Einsum")


def test_axes_without_letters_stay() -> None:
    before = parse('(float[2,3] x, float[3,4] w) => (y) { y = Einsum <equation = "...b,bc->...c"> (x, w) }')
    assert ops(apply(before, spell_einsums)[0]) == "Einsum"
