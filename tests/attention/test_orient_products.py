"""Attention that is computed transposed gets a row for each query, and the same results."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx_models import apply, assert_same_at_all_sizes, ops, parse

from onnxfuse.attention.orient_products import orient_products

# Queries and keys are columns, and so are values; and the operators that are written.
FORMS = {
    "p = Softmax (scores) t = Transpose <perm = [0, 1, 3, 2]> (p) y = MatMul (columns, t)": (
        "Transpose MatMul Softmax Transpose MatMul Transpose"
    ),
    "s = MatMul (kt, q) a = Mul (s, half) p = Softmax <axis = 2> (a) y = MatMul (columns, p)": (
        "Transpose MatMul Mul Softmax Transpose MatMul Transpose"
    ),
    "s = MatMul (kt, q) a = Add (s, of_keys) t = Transpose <perm = [0, 1, 3, 2]> (a) y = Softmax (t)": (
        "Transpose MatMul Reshape Add Softmax"
    ),
}


def model(form: str) -> onnx.ModelProto:
    inputs = "float[B,2,4,N] q, float[B,2,4,M] k, float[B,2,5,M] columns, float[N] of_keys"
    before = "kt = Transpose <perm = [0, 1, 3, 2]> (k)"
    if "scores" in form:
        before = "qt = Transpose <perm = [0, 1, 3, 2]> (q) scores = MatMul (qt, k)"
    half = {"half": np.array(0.5, np.float32)} if "half" in form else {}
    return parse(f"({inputs}) => (y) {{ {before} {form} }}", 17, **half)


@pytest.mark.parametrize("form", FORMS)
def test_queries_get_rows(form: str) -> None:
    before = model(form)
    after, (_, again) = apply(before, orient_products, orient_products)
    assert (ops(after), again) == (FORMS[form], 0)
    assert_same_at_all_sizes(before, after)
