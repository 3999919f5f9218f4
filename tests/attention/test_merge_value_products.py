"""Products of the same probabilities with several values become one, of the values side by side."""

from __future__ import annotations

import numpy as np
from onnx_models import apply, assert_same_at_all_sizes, ops, parse

from onnxfuse.attention.merge_value_products import merge_value_products

REPEATED = """{0}_apart = Unsqueeze ({0}, axis) {0}_repeated = Expand ({0}_apart, repeats)
    {0}_heads = Reshape ({0}_repeated, shape)"""
CONSTANTS = {"axis": np.array([2]), "repeats": np.array([1, 1, 2, 1, 1])}


def test_values_are_joined() -> None:
    text = """(float[B,2,N,M] s, float[B,2,M,3] v, float[B,2,M,5] w) => (y, z) {
        p = Softmax (s) y = MatMul (p, v) z = MatMul (p, w) }"""
    before = parse(text, 17)
    after, (_, again) = apply(before, merge_value_products, merge_value_products)
    assert (ops(after), again) == ("Softmax Concat MatMul Slice Slice", 0)
    assert_same_at_all_sizes(before, after)


def test_values_are_joined_before_their_heads_are_repeated() -> None:
    text = f"""(float[B,4,N,M] s, float[B,2,M,3] v, float[B,2,M,3] w) => (y, z) {{
        {REPEATED.format("v")} {REPEATED.format("w")}
        p = Softmax (s) y = MatMul (p, v_heads) z = MatMul (p, w_heads) }}"""
    before = parse(text, 17, **CONSTANTS, shape=np.array([0, 4, -1, 3]))
    after, (_, again) = apply(before, merge_value_products, merge_value_products)
    assert (ops(after), again) == ("Softmax Concat Unsqueeze Expand Reshape MatMul Slice Slice", 0)
    assert_same_at_all_sizes(before, after, sizes=(1, 2, 3))


def test_values_of_other_shapes_stay() -> None:
    text = """(float[B,2,N,M] s, float[B,2,M,3] v, float[2,M,5] w) => (y, z) {
        p = Softmax (s) y = MatMul (p, v) z = MatMul (p, w) }"""
    assert not any(apply(parse(text, 17), merge_value_products)[1])
